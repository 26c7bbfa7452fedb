"""Random numbers of a step match one device on every mesh, and each device draws only its rows."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import parity
import sweeps
import tfshard
from tfshard.devices import batching, transfer
from tfshard.operations import draws

random, stateless = keras.random, tf.random
ROWS = 8
X = np.random.RandomState(0).normal(size=(ROWS, 12)).astype("float32")
MESHES = {
    "batch": {"batch": 4},
    "batch x model": {"batch": 2, "model": 2},
    "replicas": {"replica": 2, "batch": 2},
    "model": {"model": 4},
}


def strategy_of(mesh: str, **options) -> tfshard.ShardedStrategy:
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), {".*": ()}, **options)
    assert strategy.mesh.size == 4
    return strategy


def placed(x: np.ndarray, strategy: tfshard.ShardedStrategy) -> tf.Tensor:
    return transfer.host_to_mesh(x, batching.batch_axes(x.shape, strategy.mesh), strategy.mesh)


# --- The counter -----------------------------------------------------------------------------------------

COUNTED = [
    *((f"StatelessRandom{name}V2", dtype) for name in ("Uniform", "Normal") for dtype in ("float16", "float32")),
    *((name, dtype) for name in ("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2")
      for dtype in ("bfloat16", "float64")),
    ("StatelessTruncatedNormalV2", "float32"),
    *((f"StatelessRandomUniform{name}", dtype) for name in ("FullIntV2", "IntV2") for dtype in ("int32", "int64")),
    *(("StatelessRandomGammaV3", dtype) for dtype in ("float16", "float32", "float64")),
]  # fmt: skip


@pytest.mark.parametrize(("type", "dtype"), COUNTED)
def test_a_draw_that_begins_later_is_a_part_of_the_whole_draw(type: str, dtype: str):
    generator, dtype = draws.GENERATORS[type], tf.as_dtype(dtype)
    parameters = {"dtype": dtype}
    if type.endswith("UniformIntV2"):
        parameters = {"minval": tf.constant(3, dtype), "maxval": tf.constant(1003, dtype)}
    elif "Gamma" in type:
        parameters = {"alpha": tf.constant(0.7, dtype)}
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 99])

    def draw(count, counter):
        return getattr(tf.raw_ops, type)(shape=[count], key=key, counter=counter, alg=1, **parameters).numpy()

    whole, group = draw(40_000, counter), generator.group(dtype)
    for begin in (4, 1002, 30_001):
        later = draws._later(counter, tf.constant(begin // group * generator.counts(dtype), tf.int64))
        np.testing.assert_array_equal(draw(500, later)[begin % group :][:400], whole[begin:][:400])


# --- Every generator -------------------------------------------------------------------------------------

# Functions of `x`, `(n, 12)`. For some shapes a device starts between two counts.
DRAWS = {
    "normal": lambda x, n: random.normal(tf.shape(x), 1.0, 2.0, seed=1),
    "float16": lambda x, n: random.normal((n, 5), dtype="float16", seed=1),
    "bfloat16": lambda x, n: random.uniform((n, 7), dtype="bfloat16", seed=1),
    "float64": lambda x, n: random.normal((n, 3), dtype="float64", seed=1),
    "uniform": lambda x, n: random.uniform((n, 7), -1, 2, seed=1),
    "truncated": lambda x, n: random.truncated_normal((n, 7), seed=1),
    "randint": lambda x, n: random.randint((n, 7), 2, 1000, seed=1),
    "int64": lambda x, n: random.randint((n, 3), 2, 1000, dtype="int64", seed=1),
    "full": lambda x, n: stateless.stateless_uniform((n, 3), [1, 2], None, None, tf.int32),
    "dropout": lambda x, n: random.dropout(x, 0.4, seed=1),
    "noise shape": lambda x, n: random.dropout(x, 0.4, noise_shape=(None, 1), seed=1),
    "gamma": lambda x, n: random.gamma((n, 7), 0.7, seed=1),
    "gamma of shapes": lambda x, n: random.gamma(x.shape, tf.abs(x) + 1, seed=1),
    "beta": lambda x, n: random.beta((n, 5), 0.7, 1.2, seed=1),
    "old": lambda x, n: tf.raw_ops.StatelessRandomNormal(shape=[n, 3], seed=[1, 2]),
    "line": lambda x, n: random.uniform((n,), seed=1),
    "more rows": lambda x, n: random.normal((5 * n, 3), seed=1),
}
# Every device draws all numbers of these.
WHOLE = {
    "categorical": lambda x, n: random.categorical(x, 3, seed=1),
    "shuffle": lambda x, n: random.shuffle(x, seed=1),
    "shuffle of a dim": lambda x, n: random.shuffle(x, axis=1, seed=1),
    "stateless shuffle": lambda x, n: stateless.experimental.stateless_shuffle(x, [1, 2]),
    "gamma of a line": lambda x, n: random.gamma(x.shape, tf.range(1.0, 13.0), seed=1),
    "binomial": lambda x, n: random.binomial((n, 3), 10.0, 0.3, seed=1),
    "poisson": lambda x, n: stateless.stateless_poisson(x.shape, [1, 2], 3.0),
    "between": lambda x, n: stateless.stateless_parameterized_truncated_normal((n, 3), [1, 2], 0.0, 1.0, -1.0, 2.0),
    "time first": lambda x, n: random.normal((3, n, 5), seed=1),
    "features": lambda x, n: x + random.normal((12,), seed=1),
    "weights": lambda x, n: x @ random.normal((12, 12), seed=1),
    "number": lambda x, n: x * random.normal((), seed=1),
}
# All others stay sharded, and so do computations on them.
SHARDED = {*DRAWS, *WHOLE} - {"stateless shuffle", "time first"}


def all_drawn(x: tf.Tensor) -> dict[str, tf.Tensor]:
    return {name: draw(x, x.shape[0]) for name, draw in (DRAWS | WHOLE).items()}


@functools.cache
def on_one_device(rows: int) -> dict[str, np.ndarray]:
    return {name: each.numpy() for name, each in tf.function(all_drawn, jit_compile=False)(X[:rows]).items()}


def used_draws(graph: tf.Graph) -> list[tf.Operation]:
    return [op for op in graph.get_operations() if op.type in draws.TYPES and op.outputs[0].consumers()]


WAYS = [
    ("batch", ROWS),
    ("batch x model", ROWS),
    ("replicas", ROWS),
    ("model", ROWS),
    ("batch", 6),
    ("batch x model", 6),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("mesh", "rows"), WAYS)
def test_each_generator_draws_what_one_device_draws(mesh: str, rows: int):
    strategy = strategy_of(mesh)
    step = tf.function(lambda x: strategy.run(all_drawn, args=(x,)), jit_compile=False)
    with strategy.extended.results_stay_sharded():
        found = step(placed(X[:rows], strategy))
    for name, expected in on_one_device(rows).items():
        rtol = 1e-6 if name in ("weights", "gamma of shapes") else 0
        np.testing.assert_allclose(transfer.to_host(found[name]), expected, rtol=rtol, atol=rtol, err_msg=name)
        axes = transfer.axes_of(dtensor.fetch_layout(found[name]))
        divides = rows % strategy.mesh_shape.data_size == 0 and strategy.mesh_shape.data_size > 1
        if divides and name in SHARDED:
            assert axes[0] == strategy.mesh_shape.data, (name, axes)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", ["batch", "batch x model"])
def test_an_eager_step_draws_what_one_device_draws(mesh: str):
    strategy = strategy_of(mesh)
    with strategy.extended.results_stay_sharded():
        found = strategy.run(all_drawn, args=(placed(X, strategy),))
    for name, expected in on_one_device(ROWS).items():
        rtol = 1e-6 if name in ("weights", "gamma of shapes") else 0
        np.testing.assert_allclose(transfer.to_host(found[name]), expected, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", ["batch", "replicas"])
def test_each_device_draws_its_rows_only(mesh: str):
    strategy = strategy_of(mesh)
    for name, draw in DRAWS.items():

        def drawn(x, draw=draw):
            return draw(x, ROWS)

        step = tf.function(lambda x, drawn=drawn: strategy.run(drawn, args=(x,)), jit_compile=False)
        graph = step.get_concrete_function(placed(X, strategy)).graph
        used = used_draws(graph)
        assert used, name
        for operation in used:
            (random,) = operation.outputs
            whole = sum(np.prod(each.shape) for each in on_one_device_graph(name) if each.dtype == random.dtype)
            assert random.shape.num_elements() <= whole / 4 + 3, (name, random.shape)


@functools.cache
def on_one_device_graph(name: str) -> list[tf.Tensor]:
    graph = tf.function(lambda x: DRAWS[name](x, ROWS)).get_concrete_function(tf.constant(X)).graph
    return [operation.outputs[0] for operation in used_draws(graph)]


# --- The dim of the batch --------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8,), 0), ((8, 64), 0), ((40, 64), 0), ((100, 2), 0), ((3, 8, 5), 1),
        ((64,), None), ((), None), ((12, 4), None), ((16, 32), None), ((4, 3), None), ((0, 3), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_draw_of_the_batch_is_told_from_one_of_weights(shape: tuple[int, ...], dim: int | None):
    strategy = strategy_of("batch")
    with strategy.scope():
        kernel = keras.Variable(np.zeros((16, 32), "float32"), name="kernel")
    found = []

    def step(x):
        kernel + 0.0
        found.append(draws.batch_dim(shape))
        return tf.reduce_sum(x)

    tf.function(lambda x: strategy.run(step, args=(x,)))(placed(X, strategy))
    assert found == [dim]


def test_what_is_computed_from_noise_is_shared_out():
    """The generator of a GAN takes random numbers: each device computes its rows."""
    strategy = strategy_of("batch")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        generator = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])

    def step(x):
        return generator(random.normal((tf.shape(x)[0], 6), seed=1))

    with strategy.extended.results_stay_sharded():
        made = tf.function(lambda x: strategy.run(step, args=(x,)))(placed(X, strategy))
    assert transfer.axes_of(dtensor.fetch_layout(made)) == ("batch", None)


# --- Layers ----------------------------------------------------------------------------------------------

VECTORS = X
SEQUENCES = np.random.RandomState(1).normal(size=(ROWS, 5, 8)).astype("float32")
IMAGES = np.random.RandomState(2).uniform(0, 255, size=(ROWS, 10, 10, 3)).astype("float32")
layers = keras.layers
LAYERS = {
    "Dropout": (VECTORS, lambda: layers.Dropout(0.4, seed=1)),
    "AlphaDropout": (VECTORS, lambda: layers.AlphaDropout(0.4, seed=1)),
    "GaussianNoise": (VECTORS, lambda: layers.GaussianNoise(0.4, seed=1)),
    "GaussianDropout": (VECTORS, lambda: layers.GaussianDropout(0.4, seed=1)),
    "Dropout, noise shape": (SEQUENCES, lambda: layers.Dropout(0.4, noise_shape=(None, 1, None), seed=1)),
    "SpatialDropout1D": (SEQUENCES, lambda: layers.SpatialDropout1D(0.4, seed=1)),
    "TimeDistributed": (SEQUENCES, lambda: layers.TimeDistributed(layers.Dropout(0.4, seed=1))),
    "LSTM": (SEQUENCES, lambda: layers.LSTM(5, dropout=0.3, recurrent_dropout=0.3, seed=1)),
    "GRU": (SEQUENCES, lambda: layers.Bidirectional(layers.GRU(5, dropout=0.3, recurrent_dropout=0.3, seed=1))),
    "SpatialDropout2D": (IMAGES, lambda: layers.SpatialDropout2D(0.4, seed=1)),
    "ConvLSTM1D": (IMAGES, lambda: layers.ConvLSTM1D(2, 3, dropout=0.3, recurrent_dropout=0.3, seed=1)),
    **{
        name: (IMAGES, functools.partial(getattr(layers, name), *arguments, seed=1))
        for name, arguments in {
            "RandomFlip": (), "RandomRotation": (0.2,), "RandomZoom": (0.3, 0.3), "RandomTranslation": (0.3, 0.3),
            "RandomCrop": (7, 7), "RandomContrast": (0.5,), "RandomBrightness": (0.3,), "RandomSaturation": (0.5,),
            "RandomHue": (0.3,), "RandomGrayscale": (0.5,), "RandomSharpness": (0.5,), "RandomShear": (0.3, 0.3),
            "RandomErasing": (0.8,), "RandomInvert": (0.5,), "RandomPerspective": (0.9,),
            "RandomGaussianBlur": (0.9,), "RandomColorDegeneration": (0.5,), "CutMix": (), "MixUp": (),
        }.items()
        if hasattr(layers, name)  # Older versions of Keras have fewer.
    },
}  # fmt: skip
LAYERED = [(name, mesh) for name in LAYERS for mesh in ("batch", "batch x model")]


def outputs_of(layer: keras.Layer, x: np.ndarray, strategy: tfshard.ShardedStrategy | None) -> list[np.ndarray]:
    """Return the outputs of a layer in two training steps."""
    if strategy is None:
        call = tf.function(lambda x: layer(x, training=True), jit_compile=False)
        return [call(x).numpy() for _ in range(2)]
    call = tf.function(lambda x: strategy.run(lambda x: layer(x, training=True), args=(x,)), jit_compile=False)
    return [transfer.to_host(call(placed(x, strategy))) for _ in range(2)]


@pytest.mark.sweep(1)
@sweeps.table("layers that draw", ("name", "mesh"), LAYERED, always=[("RandomFlip", "batch")], sample=2)
def test_a_layer_draws_what_it_draws_on_one_device(name: str, mesh: str):
    x, make = LAYERS[name]
    strategy, found = strategy_of(mesh), []
    for where in (None, strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope() if where else contextlib.nullcontext():
            layer = make()
            layer(x, training=False)
        found.append(outputs_of(layer, x, where))
    (first, second), ours = found
    assert not np.array_equal(first, x) or not np.array_equal(second, x), "premise: it draws"
    for expected, given in zip((first, second), ours, strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# --- Training --------------------------------------------------------------------------------------------


class Block(keras.Model):
    """Attention and a pair of Dense layers, with all possible dropout and additional noise."""

    def __init__(self):
        super().__init__(name="block")
        self.attention = layers.MultiHeadAttention(4, 4, dropout=0.2, seed=1, name="attention")
        self.residual = layers.Dropout(0.3, seed=2, name="residual")
        self.up = layers.Dense(24, "gelu", name="up")
        self.hidden = layers.Dropout(0.3, seed=3, name="hidden")
        self.down = layers.Dense(8, name="down")
        self.noise = layers.GaussianNoise(0.2, seed=4, name="noise")
        self.seed = keras.random.SeedGenerator(5)
        self.last = layers.Dense(1, name="last")

    def call(self, x, training=None):
        x = x + self.residual(self.attention(x, x, training=training), training=training)
        x = x + self.noise(self.down(self.hidden(self.up(x), training=training)), training=training)
        if training:
            x = x + tf.cast(random.uniform((tf.shape(x)[0], 1, 1), -0.1, 0.1, seed=self.seed), x.dtype)
        return self.last(x)


def megatron() -> tfshard.LayoutMap:
    layout_map = tfshard.LayoutMap()
    layout_map.column(".*attention/(query|key|value)")
    layout_map.row(".*attention/attention_output")
    layout_map.column(".*up")
    layout_map.row(".*down")
    layout_map.replicated(".*", optional=True)
    return layout_map


TRAINED = {
    "stage 3": ({"batch": 4}, {}),
    "stage 0": ({"batch": 4}, {"zero_stage": 0}),
    "replicas": ({"replica": 2, "batch": 2}, {}),
    "batch x model": ({"batch": 2, "model": 2}, {"layout_map": megatron()}),
    "model": ({"model": 4}, {"layout_map": megatron()}),
    "sequence parallel": ({"batch": 2, "model": 2}, {"layout_map": megatron(), "sequence_parallel": True}),
    "microbatches": ({"batch": 2}, {"microbatches": 3}),
    "reduced once": ({"batch": 4}, {"microbatches": 3, "reduce_once": True}),
    "whole batch": ({"batch": 4}, {"microbatches": 2}),
    "eager": ({"batch": 4}, {}),
    "bfloat16": ({"batch": 4}, {}),
}
SAMPLES = 12


def targets(rows: int) -> np.ndarray:
    return np.random.RandomState(3).normal(size=(rows, 5, 1)).astype("float32")


@functools.cache
def trained(way: str | None, rows: int, dtype: str) -> parity.Run:
    options: dict = {}
    if way is not None:
        mesh, options = TRAINED[way]
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **options)
        assert (strategy.mesh.size == 4) == (way != "microbatches"), "premise"
    x = np.random.RandomState(4).normal(size=(rows, 5, 8)).astype("float32")
    keras.config.set_dtype_policy(dtype)
    try:
        return parity.train(
            Block, [(x, targets(rows))], optimizer=lambda: keras.optimizers.SGD(0.05), loss="mse", steps=3,
            strategy=None if way is None else strategy, eager=way == "eager",
        )  # fmt: skip
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.sweep(1)
@sweeps.table("training with dropout", "way", TRAINED, always=["microbatches", "sequence parallel"], sample=1)
def test_a_model_with_dropout_trains_as_on_one_device(way: str):
    rows = 6 if way == "whole batch" else SAMPLES
    dtype = "mixed_bfloat16" if way == "bfloat16" else "float32"
    reference, run = trained(None, rows, dtype), trained(way, rows, dtype)
    assert len(set(reference.losses)) == 3
    near = 2e-2 if way == "bfloat16" else 2e-5
    parity.assert_same(run, reference, rtol=near, atol=near, slots=False)
    ours, theirs = (
        {v.path: np.array(v.numpy()) for v in each.model.non_trainable_variables} for each in (run, reference)
    )
    assert sum(path.endswith("seed_generator_state") for path in theirs) == 5
    for path, seed in theirs.items():
        np.testing.assert_array_equal(ours[path], seed, err_msg=path)


def test_without_the_rows_of_each_device_training_differs(monkeypatch):
    """Premise of the table: the masks decide the numbers."""
    monkeypatch.setattr(draws, "_later", lambda counter, counts: counter)
    run = trained.__wrapped__("stage 0", SAMPLES, "float32")
    assert abs(run.losses[0] / trained(None, SAMPLES, "float32").losses[0] - 1) > 1e-3


def test_blocks_that_are_computed_again_have_their_masks():
    def build():
        inputs = keras.Input((8,))
        x = inputs
        for number in range(2):
            x = layers.Dense(8, "tanh", name=f"block_{number}_dense")(x)
            x = layers.Dropout(0.4, seed=number, name=f"block_{number}_drop")(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    def fitted(strategy):
        keras.utils.set_random_seed(0)
        model = build()
        if strategy is None:
            model.compile("adam", "mse", jit_compile=False)
        else:
            tfshard.as_distributed(model).compile("adam", "mse", strategy=strategy)
            assert strategy.recompute(model) == ["block_0", "block_1"]
        x = np.random.RandomState(4).normal(size=(16, 8)).astype("float32")
        return model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    np.testing.assert_allclose(fitted(strategy_of("batch")), fitted(None), rtol=1e-5)


# --- Microbatches ----------------------------------------------------------------------------------------


def noisy() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", name="first"),
            layers.Dropout(0.4, seed=1),
            layers.Dense(9, "tanh", name="second"),
            layers.GaussianNoise(0.3, seed=2),
            layers.Dropout(0.4, seed=3),
            layers.Dense(1, name="last"),
        ]
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", [{"pipeline": 2, "batch": 2}, {"pipeline": 2}], ids=str)
def test_a_pipeline_draws_what_one_device_draws(mesh: dict[str, int]):
    x = np.random.RandomState(4).normal(size=(24, 8)).astype("float32")

    def fitted(is_pipeline: bool) -> tuple[list[float], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        model = noisy()
        if is_pipeline:
            model = tfshard.pipeline(model, ["second"], microbatches=3)
            model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh)))
        else:
            model.compile("sgd", "mse", jit_compile=False)
        history = model.fit(x, x[:, :1], batch_size=12, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], [np.array(each.numpy()) for each in model.weights + model.non_trainable_variables]

    (losses, weights), (ours, others) = fitted(False), fitted(True)
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_microbatches_draw_no_numbers_twice():
    """Also if the batch is another dim, or if a generator takes only a seed."""

    class Drawing(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(0)

        def call(self, x):
            rows = tf.shape(x)[0]
            time_first = random.normal((3, rows), seed=self.generator)[0]
            counted = tf.cast(random.binomial((rows,), 1e7, 0.5, seed=self.generator), "float32")
            return tf.stack([time_first, counted, random.normal((rows,), seed=self.generator)], 1) + 0.0 * x

    keras.utils.set_random_seed(0)
    model = tfshard.Sequential([keras.Input((3,)), Drawing(), layers.Dense(3, "linear", kernel_initializer="identity")])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), microbatches=2)
    seen = Seen()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[seen], strategy=strategy)
    model.train_on_batch(np.ones((8, 3), "float32"), np.zeros((8, 3), "float32"))
    for column in seen.rows.numpy().T:
        assert len(np.unique(column)) == 8, column


class Seen(keras.metrics.Metric):
    """The predictions of eight samples, in microbatches of four."""

    def __init__(self):
        super().__init__(name="seen")
        self.rows = self.add_variable((8, 3), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign(tf.concat([self.rows, y_pred], 0)[-8:])

    def result(self):
        return tf.reduce_sum(self.rows)
