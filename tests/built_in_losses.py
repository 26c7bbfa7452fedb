"""Keras's losses and metrics, a trial of each, and the result under a ShardedStrategy.

`python tests/built_in_losses.py` tries them all and writes docs/losses.md; tests/training/test_losses.py and
tests/training/test_metrics.py check it.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

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

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}, "model4": {"model": 4}}

# The loss, the end of the model, and labels.
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


class MeanPrediction(keras.metrics.Mean):
    """The mean of the predictions. Takes labels as compiled metrics do."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred, sample_weight)


class SumOfPredictions(keras.metrics.Sum):
    """The sum of the predictions. Takes labels as compiled metrics do."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred, sample_weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model, and metrics that fit it.

    Attributes:
        units: The number of outputs.
        activation: The last activation.
        loss: The name of the loss in Keras.
        labels: (24, ...), or (24, 3, ...) for models with three timesteps, some of them masked.
        metrics: Makes new metrics at each call.
    """

    units: int
    activation: str | None
    loss: str
    labels: np.ndarray
    metrics: Callable[[], list[keras.metrics.Metric]]

    @property
    def is_masked(self) -> bool:
        return self.labels.shape[1:2] == (3,)


M = keras.metrics
# Rows of the metrics' data: batches of 8, 8 and 5. No batch axis divides the last batch.
ROWS = 21
WEIGHTS = np.where(np.arange(24) % 5, RS.uniform(0.5, 2.0, 24), 0).astype("float32")
# Timesteps of zeros are masked.
TIMESTEPS = RS.normal(size=(24, 3, 5)).astype("float32") * (RS.uniform(size=(24, 3, 1)) < 0.7)
CLASSES_OF_STEPS = RS.randint(0, 4, (24, 3))
WEIGHTS_OF_STEPS = np.where(RS.uniform(size=(24, 3)) < 0.8, RS.uniform(0.5, 2.0, (24, 3)), 0).astype("float32")

KINDS = {
    "yes or no": Kind(
        units=1, activation="sigmoid", loss="binary_crossentropy",
        labels=RS.randint(0, 2, (24, 1)).astype("float32"),
        metrics=lambda: [
            M.AUC(name="auc"), M.AUC(curve="PR", num_thresholds=20, name="auc_pr"),
            M.AUC(thresholds=[0.1, 0.4, 0.45], name="auc_at"),
            M.AUC(summation_method="minoring", from_logits=True, name="auc_of_logits"),
            M.PrecisionAtRecall(0.5), M.RecallAtPrecision(0.5), M.SensitivityAtSpecificity(0.5),
            M.SpecificityAtSensitivity(0.5), M.BinaryIoU(threshold=0.6), M.Precision(), M.Recall(thresholds=[0.3, 0.5]),
            M.TruePositives(), M.FalsePositives(), M.TrueNegatives(), M.FalseNegatives(),
            M.TruePositives(thresholds=[0.3, 0.5], name="true_positives_at"), M.BinaryAccuracy(),
            M.Accuracy(), M.BinaryCrossentropy(), M.Hinge(), M.SquaredHinge(),
        ],
    ),
    "one of four": Kind(
        units=4, activation="softmax", loss="categorical_crossentropy", labels=ONE_HOT,
        metrics=lambda: [
            M.AUC(multi_label=True), M.AUC(multi_label=True, label_weights=[1.0, 2.0, 0.0, 1.0], name="auc_weighted"),
            M.AUC(name="auc_of_all"),
            M.OneHotMeanIoU(4), M.OneHotIoU(4, [1]), M.Precision(top_k=2), M.Recall(class_id=1),
            M.Precision(top_k=2, class_id=1, name="precision_of_class"), M.Recall(top_k=3, name="recall_top"),
            M.PrecisionAtRecall(0.5, class_id=1), M.RecallAtPrecision(0.3, class_id=2),
            M.SensitivityAtSpecificity(0.5, class_id=3), M.SpecificityAtSensitivity(0.5, class_id=0),
            M.F1Score(), M.F1Score("weighted", name="f1_weighted"), M.F1Score("micro", 0.3, name="f1_micro"),
            M.FBetaScore("macro", 2.0, 0.4), M.CategoricalAccuracy(), M.TopKCategoricalAccuracy(2),
            M.CategoricalCrossentropy(), M.CategoricalCrossentropy(label_smoothing=0.1, name="smoothed"),
            M.KLDivergence(), M.CategoricalHinge(), M.Poisson(), M.FalsePositives(), M.BinaryAccuracy(threshold=0.2),
        ],
    ),
    "one of four, by number": Kind(
        units=4, activation="softmax", loss="sparse_categorical_crossentropy", labels=CLASSES,
        metrics=lambda: [
            M.MeanIoU(4, sparse_y_pred=False), M.IoU(4, [0, 2], sparse_y_pred=False),
            M.MeanIoU(4, sparse_y_pred=False, ignore_class=1, name="mean_io_u_but_one"),
            M.SparseCategoricalAccuracy(), M.SparseTopKCategoricalAccuracy(2), M.SparseCategoricalCrossentropy(),
            M.SparseCategoricalCrossentropy(ignore_class=0, name="crossentropy_but_one"),
        ],
    ),
    "numbers": Kind(
        units=4, activation=None, loss="mse", labels=NUMBERS,
        metrics=lambda: [
            M.MeanSquaredError(), M.RootMeanSquaredError(), M.MeanAbsoluteError(), M.MeanAbsolutePercentageError(),
            M.MeanSquaredLogarithmicError(), M.CosineSimilarity(), M.LogCoshError(), M.R2Score(),
            M.R2Score("variance_weighted_average", name="r2_weighted"), M.R2Score(None, name="r2_of_each"),
            M.PearsonCorrelation(), M.ConcordanceCorrelation(),
            M.MeanMetricWrapper(lambda y_true, y_pred: abs(y_true - y_pred), name="by_function"),
            MeanPrediction(), SumOfPredictions(),
        ],
    ),
    "masked, yes or no": Kind(
        units=1, activation="sigmoid", loss="binary_crossentropy",
        labels=RS.randint(0, 2, (24, 3, 1)).astype("float32"),
        metrics=lambda: [
            M.AUC(), M.PrecisionAtRecall(0.5), M.BinaryIoU(), M.Precision(), M.Recall(), M.TruePositives(),
            M.FalseNegatives(), M.BinaryAccuracy(), M.Accuracy(), M.BinaryCrossentropy(), M.Hinge(), M.SquaredHinge(),
        ],
    ),
    "masked, one of four": Kind(
        units=4, activation="softmax", loss="categorical_crossentropy", labels=np.eye(4, dtype="f")[CLASSES_OF_STEPS],
        metrics=lambda: [
            M.AUC(), M.OneHotMeanIoU(4), M.OneHotIoU(4, [1]), M.Precision(top_k=2), M.Recall(class_id=1),
            M.CategoricalAccuracy(), M.TopKCategoricalAccuracy(2), M.CategoricalCrossentropy(), M.KLDivergence(),
            M.CategoricalHinge(), M.Poisson(),
        ],
    ),
    "masked, one of four, by number": Kind(
        units=4, activation="softmax", loss="sparse_categorical_crossentropy", labels=CLASSES_OF_STEPS,
        metrics=lambda: [
            M.MeanIoU(4, sparse_y_pred=False), M.IoU(4, [0, 2], sparse_y_pred=False), M.SparseCategoricalAccuracy(),
            M.SparseTopKCategoricalAccuracy(2), M.SparseCategoricalCrossentropy(),
        ],
    ),
    "masked, numbers": Kind(
        units=4, activation=None, loss="mse", labels=RS.uniform(0.1, 1.0, (24, 3, 4)).astype("float32"),
        metrics=lambda: [
            M.MeanSquaredError(), M.RootMeanSquaredError(), M.MeanAbsoluteError(), M.MeanAbsolutePercentageError(),
            M.MeanSquaredLogarithmicError(), M.CosineSimilarity(), M.LogCoshError(), M.ConcordanceCorrelation(),
            MeanPrediction(), SumOfPredictions(),
        ],
    ),
}  # fmt: skip


def strategy(mesh: str, *, classes: int) -> tfshard.ShardedStrategy:
    """Return a strategy with a model axis that shards the classes, or else the hidden layer."""
    layout_map = None
    if "model" in MESHES[mesh]:
        layout_map = tfshard.LayoutMap()
        if classes % 2:
            layout_map.column("hidden", axis="model")
            layout_map.row("last", axis="model")
        else:
            layout_map.column("last", axis="model")
            layout_map.replicated("hidden/kernel")
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
    # Three classes per timestep: the model axis shards the hidden layer.
    chosen = None if mesh is None else strategy(mesh, classes=3 if ending == "timesteps" else 4)
    return parity.train(
        lambda: model_for(ending), [(INPUTS[:8], labels[:8])], optimizer=lambda: keras.optimizers.SGD(0.1), loss=loss(),
        steps=2, strategy=chosen,
    )  # fmt: skip


@functools.cache
def trained_on_one_device(name: str) -> parity.Run:
    return train(name, None)


def loss_outcome(name: str, mesh: str) -> str:
    """Return `"right"`, the difference, or the text of the refusal."""
    reference = trained_on_one_device(name)
    assert abs(reference.losses[1] - reference.losses[0]) > 1e-5, "premise: it trains"
    try:
        run = train(name, mesh)
    except tfshard.errors.ShardingError as error:
        return f"refused: {error}"
    assert set(MESHES[mesh]) >= parity.shard_axes(run.model) >= set(MESHES[mesh]) - {"batch"}
    try:
        # Some gradients are in the hundreds.
        parity.assert_same(run, reference, rtol=1e-5, atol=2e-5)
    except AssertionError as error:
        return f"wrong: {error}"
    return "right"


# --- Metrics ---------------------------------------------------------------------------------------


def named(kind: str) -> dict[str, keras.metrics.Metric]:
    """Return the metrics of a kind by name. Keras derives the names from the classes."""
    keras.backend.clear_session()
    return {metric.name: metric for metric in KINDS[kind].metrics()}


def keras_class(metric: keras.metrics.Metric) -> str:
    """Return the name of the Keras class of a metric."""
    return next(each.__name__ for each in type(metric).__mro__ if vars(keras.metrics).get(each.__name__) is each)


def weighted(kind: str, names: list[str]) -> list[keras.metrics.Metric]:
    """Return new copies of the named metrics, with other names."""
    found = [metric for name, metric in named(kind).items() if name in names]
    for metric in found:
        metric.name = f"weighted_{metric.name}"
    return found


def measured_model(kind: Kind) -> keras.Model:
    """Return a model of two layers, which are applied to each timestep if the input has timesteps."""
    inputs = x = keras.Input((3, 5) if kind.is_masked else (5,))
    if kind.is_masked:
        x = keras.layers.Masking()(x)
    x = keras.layers.Dense(4, activation="tanh", name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(kind.units, activation=kind.activation, name="last")(x))


def fitted(kind: str, names: list[str], mesh: str | None) -> dict[str, np.ndarray]:
    """Return the metrics that fit and evaluate report for one model, with and without sample weights."""
    of_kind = KINDS[kind]
    again = weighted(kind, names)
    chosen = [metric for name, metric in named(kind).items() if name in names]
    keras.utils.set_random_seed(1)
    model = measured_model(of_kind)
    options: dict = {"jit_compile": False}
    if mesh is not None:
        tfshard.as_distributed(model)
        options = {"strategy": strategy(mesh, classes=of_kind.units)}
    model.compile(keras.optimizers.SGD(0.1), of_kind.loss, metrics=chosen, weighted_metrics=again, **options)
    inputs, weights = (TIMESTEPS, WEIGHTS_OF_STEPS) if of_kind.is_masked else (INPUTS, WEIGHTS)
    data = {"x": inputs[:ROWS], "y": of_kind.labels[:ROWS], "sample_weight": weights[:ROWS], "batch_size": 8}
    history = model.fit(**data, verbose=0, shuffle=False).history
    evaluated = model.evaluate(**data, verbose=0, return_dict=True)
    assert mesh is None or model.trainable_variables[0].value.mesh.size == 4
    return {**{f"fit {k}": np.asarray(v) for k, v in history.items()}, **evaluated}


def metric_outcomes(kind: str, names: list[str], mesh: str) -> dict[str, str]:
    """Return for each metric `"right"`, the difference, or the text of the refusal.

    Tries all metrics in one model first, and one by one if that model is refused.
    """
    expected = fitted(kind, names, None)
    assert len(expected) == 2 + 4 * len(names), "premise: metrics, with weights and without, of fit and of evaluate"
    try:
        found = fitted(kind, names, mesh)
    except tfshard.errors.ShardingError as error:
        if len(names) == 1:
            return {names[0]: f"refused: {error}"}
        return {name: outcome for each in names for name, outcome in metric_outcomes(kind, [each], mesh).items()}
    return {name: _compared(name, found, expected) for name in names}


def _compared(name: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    for key in (name, f"weighted_{name}", f"fit {name}", f"fit weighted_{name}"):
        if not np.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6):
            return f"wrong: {key} is {found[key]} in place of {expected[key]}"
    return "right"


# --- docs/losses.md ----------------------------------------------------------------------------------

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "losses.md"
MARK = "<!-- The tables below are written by python tests/built_in_losses.py -->\n"


def short(outcome: str) -> str:
    """Shorten an outcome for docs/losses.md."""
    return re.sub(r"^refused: .*", "**refused**", outcome, flags=re.DOTALL)


def documented() -> dict[str, list[str]]:
    """Return the outcomes of docs/losses.md for each loss and for each metric (`kind: name`), by mesh."""
    rows = re.findall(r"^\| (.+?) \| (\S.*?) \|$", DOCS.read_text().partition(MARK)[2], re.MULTILINE)
    return {name: outcomes.split(" | ") for name, outcomes in rows if name not in ("Loss", "Metric", "---")}


def main() -> None:
    tfshard.initialize(num_devices=4, device_type="CPU")
    head = " | ".join(("On four devices", "On two by two", "On a model axis of four"))
    lines = [f"| Loss | {head} |", "|---|---|---|---|"]
    for name in LOSSES:
        lines.append(f"| {name} | " + " | ".join(short(loss_outcome(name, mesh)) for mesh in MESHES) + " |")
        print(lines[-1], flush=True)
    lines += ["", f"| Metric | {head} |", "|---|---|---|---|"]
    for kind in KINDS:
        metrics = named(kind)
        outcomes = [metric_outcomes(kind, list(metrics), mesh) for mesh in MESHES]
        for name, metric in metrics.items():
            found = " | ".join(short(of_mesh[name]) for of_mesh in outcomes)
            lines.append(f"| {keras_class(metric)}, {kind}: {name} | {found} |")
            print(lines[-1], flush=True)
    DOCS.write_text(DOCS.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
