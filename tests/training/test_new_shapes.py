"""Loops over many batch sizes and sequence lengths match one device, compile rarely, and use bounded memory."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import sweeps
import tfshard
from tfshard.training import step_functions

L = keras.layers


class BatchMean(keras.layers.Layer):
    """Subtracts the mean over the batch: each row depends on all rows."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class ManyOperations(keras.layers.Layer):
    """Applies elementwise functions."""

    def call(self, x):
        ops = keras.ops
        positive = ops.abs(x) + 0.5
        elements = [
            ops.maximum(x, 0.1), ops.minimum(x, 0.2), ops.power(positive, 1.5), ops.log(positive), ops.softplus(x),
            ops.softsign(x), ops.selu(x), ops.leaky_relu(x), ops.relu6(x), ops.erf(x), ops.sin(x), ops.cos(x),
            ops.sigmoid(x), ops.clip(x, -0.5, 0.5), ops.square(x), ops.sign(x) * x, ops.floor(x) * x, ops.expm1(x),
            ops.where(ops.logical_or(x > 1.0, ops.logical_not(x < 0.5)), x, -x), ops.hard_sigmoid(x), ops.exp(-x),
            ops.reciprocal(positive), ops.rsqrt(positive), ops.log_sigmoid(x), ops.floor_divide(x, 0.3) * x,
            ops.cast(ops.logical_and(x >= 0.1, x <= 0.7), "float32") * x, ops.log1p(positive), ops.tanh(x) / positive,
        ]  # fmt: skip
        return ops.sum(ops.stack(elements), axis=0)


def contrastive(y_true, y_pred):
    """Return a loss over pairs of the samples of a batch."""
    near = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return -keras.ops.diagonal(keras.ops.log_softmax(near, axis=-1))


class OwnSteps(keras.Model):
    """Custom `train_step` and `test_step`, with a loss of the batch's mean."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)

    def _loss(self, data):
        outputs = self(data[0])
        apart = tf.reduce_mean(tf.square(outputs - data[1]))
        return apart + 0.1 * tf.reduce_sum(tf.square(tf.reduce_mean(outputs, axis=0)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "samples": tf.shape(data[0])[0]}

    def test_step(self, data):
        return {"loss": self._loss(data)}


def sequential(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


def transformer():
    tokens = keras.Input((None,), dtype="int32")
    x = L.Embedding(11, 8)(tokens)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, L.Dense(11)(L.Dense(8, activation="gelu")(x)))


def masked():
    tokens = keras.Input((None,), dtype="int32")
    x = L.Dense(8, activation="relu")(L.Embedding(11, 8, mask_zero=True)(tokens))
    return keras.Model(tokens, L.Dense(1)(L.GlobalAveragePooling1D()(x)))


def convolved_sequence():
    inputs = keras.Input((None, 4))
    x = L.Conv1D(8, 3, padding="causal", activation="relu")(inputs)
    return keras.Model(inputs, L.Dense(1)(L.GlobalMaxPooling1D()(x)))


def two_inputs_and_outputs():
    first, second = keras.Input((4,)), keras.Input((3,))
    x = L.Concatenate()([L.Dense(8, activation="relu")(first), second])
    return keras.Model([first, second], [L.Dense(2)(x), L.Dense(1)(x)])


def floats(r, *shape):
    return r.normal(size=shape).astype("float32")


def integers(r, most, *shape):
    return r.integers(0, most, shape).astype("int32")


def labels_from_logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# A model, its loss, and a function that makes a batch of a given number and length of samples.
CASES = {
    "dense": (
        lambda: sequential((4,), L.Dense(8, activation="relu"), L.Dense(1)),
        "mse",
        lambda r, size, length: (floats(r, size, 4), floats(r, size, 1)),
    ),
    "sample weights": (
        lambda: sequential((4,), L.Dense(8, activation="tanh"), L.Dense(3)),
        labels_from_logits,
        lambda r, size, length: (floats(r, size, 4), integers(r, 3, size), np.abs(floats(r, size))),
    ),
    "batch normalization": (
        lambda: sequential((4,), L.Dense(8, use_bias=False), L.BatchNormalization(), L.ReLU(), L.Dense(1)),
        "mse",
        lambda r, size, length: (floats(r, size, 4), floats(r, size, 1)),
    ),
    "mean over the batch": (
        lambda: sequential((4,), L.Dense(8, activation="elu"), BatchMean(), L.Dense(1)),
        "mse",
        lambda r, size, length: (floats(r, size, 4), floats(r, size, 1)),
    ),
    "contrastive loss": (
        lambda: sequential((4,), L.Dense(8, activation="relu"), L.Dense(4)),
        lambda: contrastive,
        lambda r, size, length: (floats(r, size, 4), floats(r, size, 4)),
    ),
    "steps of its own": (
        OwnSteps, None, lambda r, size, length: (floats(r, size, 4), floats(r, size, 3)),
    ),
    "several inputs and outputs": (
        two_inputs_and_outputs,
        "mse",
        lambda r, size, length: ((floats(r, size, 4), floats(r, size, 3)), (floats(r, size, 2), floats(r, size, 1))),
    ),
    "images": (
        lambda: sequential(
            (8, 8, 3), L.Conv2D(4, 3, padding="same", activation="relu"), L.MaxPooling2D(), L.DepthwiseConv2D(3),
            L.AveragePooling2D(2), L.Flatten(), L.Dense(3),
        ),
        labels_from_logits,
        lambda r, size, length: (floats(r, size, 8, 8, 3), integers(r, 3, size)),
    ),
    "larger images": (
        lambda: sequential(
            (4, 4, 3), L.Conv2DTranspose(4, 3, padding="same"), L.UpSampling2D(), L.Conv2D(1, 3)
        ),
        "mae",
        lambda r, size, length: (floats(r, size, 4, 4, 3), floats(r, size, 6, 6, 1)),
    ),
    "probabilities": (
        lambda: sequential((4,), L.Dense(8, activation="silu"), L.Dense(3, "softmax", kernel_regularizer="l2")),
        "categorical_crossentropy",
        lambda r, size, length: (floats(r, size, 4), np.eye(3, dtype="float32")[r.integers(0, 3, size)]),
    ),
    "many operations": (
        lambda: sequential((4,), L.Dense(4), ManyOperations(), L.Dense(1)),
        "huber",
        lambda r, size, length: (floats(r, size, 4), floats(r, size, 1)),
    ),
    "yes or no": (
        lambda: sequential((4,), L.Dense(8, activation="relu"), L.Dense(1, activation="sigmoid")),
        "binary_crossentropy",
        lambda r, size, length: (floats(r, size, 4), (floats(r, size, 1) > 0).astype("float32")),
    ),
    "masked lengths": (
        masked, "mse", lambda r, size, length: (integers(r, 11, size, length), floats(r, size, 1)),
    ),
    "convolved lengths": (
        convolved_sequence, "mse", lambda r, size, length: (floats(r, size, length, 4), floats(r, size, 1)),
    ),
    "transformer": (
        transformer,
        labels_from_logits,
        lambda r, size, length: (integers(r, 11, size, length), integers(r, 11, size, length)),
    ),
}  # fmt: skip


def compiled(case: str, strategy: tfshard.ShardedStrategy | None) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    build, loss, _ = CASES[case]
    model = build()
    loss = loss() if callable(loss) else loss
    if strategy is None:
        model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False)
    else:
        tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.05), loss, strategy=strategy)
    return model


def functions_of(model: keras.Model, kind: str = "train") -> step_functions.StepFunctions:
    """Return the step functions of a model."""
    return getattr(model, f"{kind}_function")._functions


def logs_of(model: keras.Model, call: str, *batch) -> dict[str, np.ndarray]:
    model.reset_metrics()
    return {name: np.asarray(value) for name, value in getattr(model, call)(*batch, return_dict=True).items()}


def compare_shapes(case: str, shapes: list[tuple[int, int]], strategy: tfshard.ShardedStrategy) -> keras.Model:
    """Train, test and predict on batches of these sizes and lengths, and compare with one device."""
    random = np.random.default_rng(0)
    models = [compiled(case, each) for each in (strategy, None)]
    for size, length in shapes:
        batch = CASES[case][2](random, size, length)
        for call in ("train_on_batch", "test_on_batch"):
            ours, theirs = (logs_of(model, call, *batch) for model in models)
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{call} {size} {name}")
        predicted = [tf.nest.flatten(model.predict_on_batch(batch[0])) for model in models]
        for mine, other in zip(*predicted, strict=True):
            assert mine.shape == other.shape
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=f"predict {size} {length}")
    for mine, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    return models[0]


SHAPES = [
    (4, 5), (6, 7), (8, 5), *((size, 3 + size % 5) for size in (1, 2, 3, 5, 9, 12, 13, 31, 40)), (5, 6), (6, 7)
]  # fmt: skip


def zero_stage_3() -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)


@pytest.mark.sweep(1)
@sweeps.table("new shapes", "case", CASES, always=["dense", "batch normalization", "steps of its own"], sample=1)
def test_batches_of_many_shapes_train_test_and_predict_as_on_one_device(case):
    strategy = zero_stage_3()
    model = compare_shapes(case, SHAPES, strategy)
    assert strategy.mesh.size == 4 and parity.shard_axes(model) == {"batch"}, "premise: four devices, sharded variables"
    for kind in ("train", "test", "predict"):
        functions = functions_of(model, kind)
        assert functions.takes_open, f"{kind}: one open function runs all but the first shapes"
        assert functions.compiled <= step_functions.FIRST + 2, kind


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense", "mean over the batch", "contrastive loss", "sample weights"])
def test_batches_of_1_to_40_samples_train_test_and_predict_as_on_one_device(case):
    compare_shapes(case, [(size, 0) for size in range(1, 41)], zero_stage_3())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"batch": 4}, {"zero_stage": 1}),
        ({"replica": 2, "batch": 2}, {}),
        ({"batch": 2, "model": 2}, {"layout_map": "auto"}),
    ],
)
def test_many_batch_sizes_match_one_device_on_other_meshes(mesh, options):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **options)
    model = compare_shapes("dense", [(size, 0) for size in (4, 6, 8, 1, 3, 12, 7)], strategy)
    shared = "model" not in mesh
    assert (functions_of(model).compiled == step_functions.FIRST + 1) == shared


def test_dropout_of_a_shape_that_is_not_among_the_first_draws_the_masks_of_one_device():
    random = np.random.default_rng(0)
    models = []
    for strategy in (zero_stage_3(), None):
        keras.utils.set_random_seed(0)
        model = sequential((4,), L.Dense(16, activation="relu"), L.Dropout(0.5, seed=3), L.Dense(1))
        optimizer = keras.optimizers.SGD(0.0)  # Masks of the first shapes differ from one device.
        if strategy is None:
            model.compile(optimizer, "mse", jit_compile=False)
        else:
            tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy)
        models.append(model)
    for number, size in enumerate((4, 6, 8, 5, 7, 10, 12)):
        batch = floats(random, size, 4), floats(random, size, 1)
        ours, theirs = (logs_of(model, "train_on_batch", *batch)["loss"] for model in models)
        if number >= step_functions.FIRST:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert functions_of(models[0]).takes_open


@pytest.mark.slow
def test_fit_evaluate_and_predict_of_batches_of_many_shapes_match_one_device():
    random = np.random.default_rng(0)
    batches = [CASES["convolved lengths"][2](random, size, 3 + size % 4) for size in (8, 4, 5, 8, 6, 7, 1, 9, 12, 3)]
    specs = (tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)
    data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
    runs = []
    for strategy in (zero_stage_3(), None):
        model = compiled("convolved lengths", strategy)
        losses = model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
        runs.append((losses, model.evaluate(data, verbose=0), model.predict(data.map(lambda x, y: x), verbose=0)))
        if strategy is not None:
            assert functions_of(model).compiled == step_functions.FIRST + 1
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_whose_operations_were_not_tried_keeps_few_functions_frees_the_others_and_warns(monkeypatch):
    """An open function may not contain the loop of a recurrent layer."""
    monkeypatch.setattr(step_functions, "MOST", 4)
    monkeypatch.setattr(step_functions, "MANY", 7)
    random = np.random.default_rng(0)
    inputs = keras.Input((None, 4))
    model = tfshard.as_distributed(keras.Model(inputs, L.Dense(1)(L.GRU(3)(inputs))))
    model.compile("sgd", "mse", strategy=zero_stage_3())

    def step(size):
        return model.train_on_batch(floats(random, size, 3, 4), floats(random, size, 1))

    def graphs():
        gc.collect()
        return sum(type(found).__name__ == "FuncGraph" for found in gc.get_objects())

    for size in (4, 8, 5, 6):
        step(size)
    functions, held = functions_of(model), graphs()
    assert not functions.takes_open
    with pytest.warns(
        UserWarning, match="has compiled its training step for 7 shapes of batches.*drop_remainder"
    ) as told:
        for size in (7, 9, 10, 11):
            step(size)
    assert [each.filename for each in told] == [__file__], "the warning names the user's line, once"
    assert len(functions.functions) == 4
    assert graphs() <= held, "graphs of functions that were dropped are gone"


def trained_on(sizes: list[int]) -> step_functions.StepFunctions:
    """Return the step functions of a model that was trained on batches of these sizes."""
    model, random = compiled("dense", zero_stage_3()), np.random.default_rng(0)
    for size in sizes:
        model.train_on_batch(*CASES["dense"][2](random, size, 0))
    return functions_of(model)


@pytest.mark.filterwarnings("ignore:.*is not divisible:UserWarning")
def test_a_large_batch_that_the_axis_divides_has_a_function_of_its_own(monkeypatch):
    monkeypatch.setattr(step_functions, "CHEAP", 0)
    compiled = trained_on([4, 6, 10, 8, 3, 12, 5]).compiled
    assert compiled == step_functions.FIRST + 3, "8, 12, and all others together"


def test_a_shape_that_comes_many_times_in_a_row_gets_a_function_of_its_own(monkeypatch):
    monkeypatch.setattr(step_functions, "IN_A_ROW", 3)
    assert trained_on([4, 6, 10, 7, 8, 8, 8, 8]).compiled == step_functions.FIRST + 2


@pytest.mark.slow
def test_a_second_sweep_over_sizes_and_lengths_compiles_nothing_and_takes_no_memory():
    model = compiled("masked lengths", zero_stage_3())
    random = np.random.default_rng(0)

    def resident() -> int:
        with open("/proc/self/status") as status:
            return int(next(line.split()[1] for line in status if line.startswith("VmRSS"))) >> 10

    def sweep():
        for number in range(1, 61):
            batch = CASES["masked lengths"][2](random, number, 1 + number * 7 % 30)
            model.train_on_batch(*batch)
            model.predict_on_batch(batch[0])

    sweep()
    made, held = functions_of(model).compiled, resident()
    sweep()
    assert functions_of(model).compiled == made <= step_functions.FIRST + 3
    assert resident() - held < 60, "MiB"


@pytest.mark.parametrize(("batch_size", "warns"), [(6, True), (8, False)])
def test_batches_that_the_batch_axis_does_not_divide_are_warned_of_once(monkeypatch, batch_size, warns):
    monkeypatch.setattr(step_functions, "CHEAP", 0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    x, y = np.ones((30, 4), "float32"), np.ones((30, 3), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0)
    found = [each for each in caught if "is not divisible" in str(each.message)]
    assert len(found) == warns, "a remainder at the end of each epoch is no reason"
    if warns:
        assert found[0].filename == __file__ and "axis 'batch' of 4 devices" in str(found[0].message)
        assert "Use a batch_size that is a multiple of 4, such as 8." in str(found[0].message), "the remedy"
