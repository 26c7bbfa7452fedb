"""Keras's losses and metrics, how each was tried, and what a step under a ShardedStrategy makes of it.

`python tests/built_in_losses.py` tries them all and writes docs/losses.md; tests/training/test_losses.py and
tests/training/test_metrics.py prove it.
"""

import functools
import pathlib
import re

import keras
import numpy as np

import parity
import tfshard

RS = np.random.RandomState(0)
INPUTS = RS.normal(size=(24, 5)).astype("float32")
CLASSES = RS.randint(0, 4, 24)
ONE_HOT = np.eye(4, dtype="float32")[CLASSES]
YES_OR_NO = RS.randint(0, 2, (24, 4)).astype("float32")
NUMBERS = RS.uniform(0.1, 1.0, (24, 4)).astype("float32")
L = keras.losses

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}

# The loss, what the model ends in, and labels.
LOSSES = {
    "BinaryCrossentropy": (L.BinaryCrossentropy, "sigmoid", YES_OR_NO),
    "BinaryFocalCrossentropy": (L.BinaryFocalCrossentropy, "sigmoid", YES_OR_NO),
    "CategoricalCrossentropy": (L.CategoricalCrossentropy, "softmax", ONE_HOT),
    "CategoricalFocalCrossentropy": (L.CategoricalFocalCrossentropy, "softmax", ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": (L.CategoricalGeneralizedCrossEntropy, "softmax", CLASSES),
    "CategoricalHinge": (L.CategoricalHinge, "softmax", ONE_HOT),
    "Circle": (L.Circle, "normalized", CLASSES),
    "CosineSimilarity": (L.CosineSimilarity, None, NUMBERS),
    "CTC": (L.CTC, "timesteps", RS.randint(1, 4, (24, 2))),
    "Dice": (L.Dice, "sigmoid", YES_OR_NO),
    "Hinge": (L.Hinge, "tanh", YES_OR_NO),
    "Huber": (L.Huber, None, NUMBERS),
    "KLDivergence": (L.KLDivergence, "softmax", NUMBERS),
    "LogCosh": (L.LogCosh, None, NUMBERS),
    "MeanAbsoluteError": (L.MeanAbsoluteError, None, NUMBERS),
    "MeanAbsolutePercentageError": (L.MeanAbsolutePercentageError, None, NUMBERS),
    "MeanSquaredError": (L.MeanSquaredError, None, NUMBERS),
    "MeanSquaredLogarithmicError": (L.MeanSquaredLogarithmicError, "sigmoid", NUMBERS),
    "Poisson": (L.Poisson, "sigmoid", NUMBERS),
    "SparseCategoricalCrossentropy": (L.SparseCategoricalCrossentropy, "softmax", CLASSES),
    "SquaredHinge": (L.SquaredHinge, "tanh", YES_OR_NO),
    "Tversky": (L.Tversky, "sigmoid", YES_OR_NO),
}

# Units, activation, loss and labels of each kind of model, and its metrics.
KINDS = {
    "yes or no": (
        1, "sigmoid", "binary_crossentropy", RS.randint(0, 2, (24, 1)).astype("float32"),
        lambda m: [
            m.AUC(name="auc"), m.AUC(curve="PR", num_thresholds=20, name="auc_pr"),
            m.AUC(thresholds=[0.1, 0.4, 0.45], name="auc_at"),
            m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5), m.SensitivityAtSpecificity(0.5),
            m.SpecificityAtSensitivity(0.5), m.BinaryIoU(threshold=0.6), m.Precision(), m.Recall(thresholds=[0.3, 0.5]),
            m.TruePositives(), m.FalsePositives(), m.TrueNegatives(), m.FalseNegatives(), m.BinaryAccuracy(),
            m.Accuracy(), m.BinaryCrossentropy(), m.Hinge(), m.SquaredHinge(),
        ],
    ),
    "one of four": (
        4, "softmax", "categorical_crossentropy", ONE_HOT,
        lambda m: [
            m.AUC(multi_label=True), m.OneHotMeanIoU(4), m.OneHotIoU(4, [1]), m.Precision(top_k=2),
            m.Recall(class_id=1),
            m.F1Score(), m.FBetaScore("macro", 2.0, 0.4), m.CategoricalAccuracy(), m.TopKCategoricalAccuracy(2),
            m.CategoricalCrossentropy(), m.KLDivergence(), m.CategoricalHinge(), m.Poisson(),
        ],
    ),
    "one of four, by number": (
        4, "softmax", "sparse_categorical_crossentropy", CLASSES,
        lambda m: [
            m.MeanIoU(4, sparse_y_pred=False), m.IoU(4, [0, 2], sparse_y_pred=False), m.SparseCategoricalAccuracy(),
            m.SparseTopKCategoricalAccuracy(2), m.SparseCategoricalCrossentropy(),
        ],
    ),
    "numbers": (
        4, None, "mse", NUMBERS,
        lambda m: [
            m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(), m.MeanAbsolutePercentageError(),
            m.MeanSquaredLogarithmicError(), m.CosineSimilarity(), m.LogCoshError(), m.R2Score(),
            m.PearsonCorrelation(), m.ConcordanceCorrelation(),
        ],
    ),
}  # fmt: skip


def strategy(mesh: str, *, classes: int) -> tfshard.ShardedStrategy:
    """A model axis shards the classes, or where it cannot what is before the last layer."""
    layout_map = None
    if "model" in MESHES[mesh]:
        layout_map = tfshard.LayoutMap()
        if classes % 2:
            layout_map.column("hidden", axis="model")
            layout_map.row("last", axis="model")
        else:
            layout_map.column("last", axis="model")
            layout_map.whole("hidden/kernel")
    return tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=1)


# --- Losses ----------------------------------------------------------------------------------------


def model_for(ending: str | None) -> keras.Model:
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    if ending == "timesteps":
        return keras.Model(inputs, keras.layers.Reshape((5, 4))(keras.layers.Dense(20, name="last")(x)))
    if ending == "normalized":
        return keras.Model(inputs, keras.layers.UnitNormalization()(keras.layers.Dense(4, name="last")(x)))
    return keras.Model(inputs, keras.layers.Dense(4, activation=ending, name="last")(x))


def train(name: str, mesh: str | None) -> parity.Run:
    loss, ending, labels = LOSSES[name]
    # Classes beyond those of a timestep are rearranged before the loss.
    chosen = None if mesh is None else strategy(mesh, classes=3 if ending == "timesteps" else 4)
    return parity.train(
        lambda: model_for(ending), [(INPUTS[:8], labels[:8])], optimizer=lambda: keras.optimizers.SGD(0.1), loss=loss(),
        steps=2, strategy=chosen,
    )  # fmt: skip


@functools.cache
def trained_on_one_device(name: str) -> parity.Run:
    return train(name, None)


def loss_outcome(name: str, mesh: str) -> str:
    """`"right"`, or what is wrong, or with which words it was refused."""
    reference = trained_on_one_device(name)
    assert abs(reference.losses[1] - reference.losses[0]) > 1e-5, "premise: it trains"
    try:
        run = train(name, mesh)
    except tfshard.errors.ShardingError as error:
        return f"refused: {error}"
    assert set(MESHES[mesh]) >= parity.shard_axes(run.model) >= set(MESHES[mesh]) - {"batch"}
    try:
        # Gradients of some are in the hundreds.
        parity.assert_same(run, reference, rtol=1e-5, atol=2e-5)
    except AssertionError as error:
        return f"wrong: {error}"
    return "right"


# --- Metrics ---------------------------------------------------------------------------------------


def named(kind: str) -> dict[str, keras.metrics.Metric]:
    """The metrics of a kind by their names, which Keras makes of their classes."""
    keras.backend.clear_session()
    return {metric.name: metric for metric in KINDS[kind][-1](keras.metrics)}


def fitted(kind: str, names: list[str], mesh: str | None) -> dict[str, np.ndarray]:
    """What fit and evaluate report of metrics that are compiled into one model."""
    units, activation, loss, labels, _ = KINDS[kind]
    chosen = [metric for name, metric in named(kind).items() if name in names]
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(units, activation=activation, name="last")(hidden))
    options: dict = {"jit_compile": False}
    if mesh is not None:
        tfshard.as_distributed(model)
        options = {"strategy": strategy(mesh, classes=units)}
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=chosen, **options)
    history = model.fit(INPUTS, labels, batch_size=8, verbose=0, shuffle=False).history
    evaluated = model.evaluate(INPUTS, labels, batch_size=8, verbose=0, return_dict=True)
    assert mesh is None or model.trainable_variables[0].value.mesh.size == 4
    return {**{f"fit {k}": np.asarray(v) for k, v in history.items()}, **evaluated}


def metric_outcome(kind: str, name: str, mesh: str) -> str:
    """`"right"`, or what is wrong, or with which words it was refused."""
    expected = fitted(kind, [name], None)
    assert len(expected) == 4, "premise: the loss and the metric, of fit and of evaluate"
    try:
        found = fitted(kind, [name], mesh)
    except tfshard.errors.ShardingError as error:
        return f"refused: {error}"
    for key, value in expected.items():
        if not np.allclose(found[key], value, rtol=1e-5, atol=1e-6):
            return f"wrong: {key} is {found[key]} in place of {value}"
    return "right"


# --- docs/losses.md ----------------------------------------------------------------------------------

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "losses.md"
MARK = "<!-- The tables below are written by python tests/built_in_losses.py -->\n"


def short(outcome: str) -> str:
    """An outcome as docs/losses.md says it."""
    return re.sub(r"^refused: .*", "**refused**", outcome, flags=re.DOTALL)


def documented() -> dict[str, list[str]]:
    """What docs/losses.md says of each loss, and of each metric, `kind: name`, on each mesh."""
    rows = re.findall(r"^\| (.+?) \| (\S.*?) \| (\S.*?) \|$", DOCS.read_text().partition(MARK)[2], re.MULTILINE)
    return {name: outcomes for name, *outcomes in rows if name not in ("Loss", "Metric", "---")}


def main() -> None:
    tfshard.initialize(num_devices=4, device_type="CPU")
    lines = ["| Loss | On four devices | On two by two |", "|---|---|---|"]
    for name in LOSSES:
        lines.append(f"| {name} | " + " | ".join(short(loss_outcome(name, mesh)) for mesh in MESHES) + " |")
        print(lines[-1], flush=True)
    lines += ["", "| Metric | On four devices | On two by two |", "|---|---|---|"]
    for kind in KINDS:
        for name, metric in named(kind).items():
            outcomes = [short(metric_outcome(kind, name, mesh)) for mesh in MESHES]
            lines.append(f"| {type(metric).__name__}, {kind}: {name} | " + " | ".join(outcomes) + " |")
            print(lines[-1], flush=True)
    DOCS.write_text(DOCS.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
