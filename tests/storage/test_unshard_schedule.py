"""The unshard schedule: values are gathered before each use, and freed: fewer bytes in memory, the same bits."""

import itertools
import os

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import small_models
import tfshard
from tfshard.devices import reductions
from tfshard.layouts.config import ReshardPolicy
from tfshard.planning import Link, Links
from tfshard.storage import unshard_schedule
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import ancestors

RS = np.random.RandomState(0)


def stored(key, size=1, keeps=False):
    return unshard_schedule.StoredBuffer(key=key, bytes=size, keeps=keeps)


def unshards(text, kept_bytes=1, sizes=None, keeps="", prefetch=0):
    """Return the unshards of uses that are letters, as a text."""
    uses = [[stored(key, (sizes or {}).get(key, 1), key in keeps) for key in use] for use in text.split()]
    return " ".join("".join(begins) for begins in unshard_schedule.unshards(uses, kept_bytes, prefetch))


@pytest.mark.parametrize(
    ("uses", "options", "expected"),
    [
        ("a b c c b a", {}, "a b c  b a"),
        ("a b c c b a", {"kept_bytes": 2}, "a b c   a"),
        ("a b c c b a", {"kept_bytes": 3}, "a b c   "),
        ("a b c d d c b a", {"kept_bytes": 2}, "a b c d   b a"),
        ("a b c c b a", {"keeps": "a"}, "a b c  b "),
        ("a b a c a", {"kept_bytes": 2}, "a b  c "),
        ("ab c ab", {"kept_bytes": 2}, "ab c b"),
        ("a B c c B a", {"sizes": {"B": 9}}, "a B c  B a"),
        ("B a B c B", {"kept_bytes": 9, "sizes": {"B": 9}}, "B a B c B"),
        ("B a B c B", {"kept_bytes": 9, "sizes": {"B": 9}, "prefetch": 1}, "B a  c "),
        ("B a a B", {"kept_bytes": 9, "sizes": {"B": 9}, "prefetch": 1}, "B a  "),
        ("B a c B", {"kept_bytes": 9, "sizes": {"B": 9}, "prefetch": 1}, "B a c B"),
        ("B a c B", {"kept_bytes": 9, "sizes": {"B": 9}, "prefetch": 2}, "B a c "),
        ("a b a c a", {"prefetch": 1}, "a b a c a"),
        ("AB aB C C aB A", {"kept_bytes": 32, "sizes": {"A": 32, "B": 32, "C": 32, "a": 2}}, "AB a C  B A"),
    ],
)
def test_a_use_gathers_what_was_freed(uses, options, expected):
    assert unshards(uses, **options) == expected


@hypothesis.given(st.text("abcd", min_size=1, max_size=9), st.integers(1, 3))
def test_the_schedule_takes_the_fewest_gathers(uses, kept):
    def fewest(place, held):
        if place == len(uses):
            return 0
        key = uses[place]
        everything = {*held, key}
        subsets = [set(each) for size in range(kept + 1) for each in itertools.combinations(sorted(everything), size)]
        choices = [each for each in subsets if key in each]
        return (key not in held) + min(fewest(place + 1, each) for each in choices)

    found = unshards(" ".join(uses), kept)
    assert len(found.replace(" ", "")) == fewest(0, set())


@pytest.mark.parametrize(("others", "waits"), [((), True), ((1 << 20,) * 10, False)])
def test_what_makes_a_large_gradient_waits_for_the_last_use_of_the_variable(others, waits):
    def step(x):
        barrier = Barrier(read_token=lambda: tf.raw_ops.ReadVariableOp(resource=number.handle, dtype=tf.float32))
        reads = [tf.raw_ops.ReadVariableOp(resource=kernel.handle, dtype=tf.float32) for _ in range(1 + len(others))]
        by_y = tf.matmul(x, reads[0]) * 2
        by_x = tf.matmul(by_y, reads[0], transpose_b=True)
        by_kernel = tf.matmul(x, by_y, transpose_a=True)
        results = tf.reduce_sum(by_x), tf.reduce_sum(by_kernel), *(tf.reduce_sum(x @ each) for each in reads[1:])
        gradient = unshard_schedule.WaitingGradient(key=0, tensor=results[1], is_scattered=False)
        assert by_x.op not in ancestors(results[1:2]), "premise"
        stored = [unshard_schedule.StoredBuffer(key=key, bytes=bytes_) for key, bytes_ in enumerate((1 << 20, *others))]
        operations = by_x.graph.get_operations()
        reads = list(zip(stored, reads, strict=True))
        unshard_schedule.arrange(operations, reads, [gradient], ReshardPolicy(), barrier)
        assert (by_x.op in ancestors(results[1:2])) == waits
        return *results, *barrier.tokens

    number, kernel = tf.Variable(0.0), tf.Variable(RS.normal(size=(4, 4)).astype("float32"))
    x = RS.normal(size=(2, 4)).astype("float32")
    by_x, by_kernel = tf.function(step)(tf.constant(x))[:2]
    by_y = 2 * x @ kernel.numpy()
    np.testing.assert_allclose(by_x, np.sum(by_y @ kernel.numpy().T), rtol=1e-4)
    np.testing.assert_allclose(by_kernel, np.sum(x.T @ by_y), rtol=1e-4)


# --- Models ----------------------------------------------------------------------------------------------

WIDTH = 16
X = RS.normal(size=(16, WIDTH)).astype("float32")
TOKENS = RS.randint(0, 24, (16, 6)).astype("int32")
IMAGES = RS.normal(size=(16, 8, 8, 4)).astype("float32")
CLASSES = (np.arange(16) % 4).astype("int32")


def mlp():
    hidden = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(5)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(4)])


def tied():
    """Return a model that also computes its logits from the embeddings: the table is used first and last."""
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(24, WIDTH)
    x = table(inputs)
    for _ in range(3):
        x = x + keras.layers.Dense(WIDTH, activation="tanh")(x)
    return keras.Model(inputs, keras.ops.max(table(x, reverse=True), axis=1))


def shared():
    """Return a model with a layer that is used repeatedly between others."""
    inputs = keras.Input((WIDTH,))
    x, again = inputs, keras.layers.Dense(WIDTH, activation="tanh")
    for _ in range(3):
        x = again(keras.layers.Dense(WIDTH, activation="tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def convolutions():
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.5)(x)
        x = keras.layers.DepthwiseConv2D(3)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


def biased_convolutions():
    """oneDNN fuses the gradients of a kernel and of the bias after it: both or none may wait."""
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(2):
        x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(x)))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(24, WIDTH)(inputs)
    x = keras.layers.GRU(WIDTH, return_sequences=True)(x)
    x = keras.layers.Bidirectional(keras.layers.LSTM(8))(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


class Chosen(keras.layers.Layer):
    """A choice between two kernels by a value."""

    def build(self, shape):
        self.first = self.add_weight(shape=(WIDTH, WIDTH), name="first")
        self.second = self.add_weight(shape=(WIDTH, WIDTH), name="second")

    def call(self, x):
        use = [lambda: tf.matmul(x, self.first), lambda: tf.tanh(tf.matmul(x, self.second))]
        return tf.cond(tf.reduce_sum(x) > 0, *use)


def branches():
    layers = itertools.chain(*[(Chosen(), keras.layers.Dense(WIDTH, activation="tanh")) for _ in range(3)])
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(4)])


class OfWeights(keras.layers.Layer):
    """A kernel computed from weights: a product of two, divided by the norm of a third."""

    def build(self, shape):
        self.a = self.add_weight(shape=(WIDTH, 8), name="a")
        self.b = self.add_weight(shape=(8, WIDTH), name="b")
        self.c = self.add_weight(shape=(WIDTH, WIDTH), name="c", regularizer="l2")

    def call(self, x):
        kernel = tf.matmul(self.a, self.b) + self.c / (1 + tf.norm(self.c))
        return tf.tanh(tf.matmul(x, kernel)) + tf.reduce_mean(self.c, 0)


def of_weights():
    layers = [OfWeights() for _ in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(4, kernel_regularizer="l1")])


class Twice(keras.Model):
    """A step with two tapes, and penalties on the gradient with respect to the input."""

    def train_step(self, data):
        x, y, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                first = self.compute_loss(x, y, self(x, training=True))
            penalty = tf.reduce_mean(tape.gradient(first, x) ** 2)
            loss = self.compute_loss(x, y, self(x, training=True)) + penalty
        variables = self.trainable_variables
        self.optimizer.apply(outer.gradient(loss, variables), variables)
        return {"loss": loss}


def twice():
    plain = mlp()
    return Twice(plain.inputs, plain.outputs)


MODELS = {
    "mlp": (mlp, X), "tied": (tied, TOKENS), "shared": (shared, X), "convolutions": (convolutions, IMAGES),
    "biased convolutions": (biased_convolutions, IMAGES),
    "recurrent": (recurrent, TOKENS), "attention": (small_models.attention, TOKENS), "branches": (branches, X),
    "of weights": (of_weights, X), "twice": (twice, X),
}  # fmt: skip


def run(name, *, mesh=None, stage=3, optimizer=lambda: keras.optimizers.Adam(1e-2), steps=4, **options):
    build, x = MODELS[name]
    batches = [(x[:8], CLASSES[:8]), (x[8:], CLASSES[8:])]
    strategy = None
    if mesh is not None:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), zero_stage=stage, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(build, batches, optimizer=optimizer, loss=loss, strategy=strategy, steps=steps)


@pytest.mark.slow
def test_an_update_that_reads_full_weights_waits_for_no_unshard_that_waits_for_it():
    muon = {"optimizer": lambda: keras.optimizers.Muon(1e-2), "steps": 2}
    trained, reference = run("mlp", mesh={"batch": 4}, analyzer=None, **muon), run("mlp", **muon)
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_bits_with_and_without_gathering_again_and_those_of_one_device(name):
    reference = run(name)
    alone = dict(mesh={"batch": 4}, analyzer=None)
    kept = run(name, reshard_after_forward=False, **alone)
    again = run(name, reshard_after_forward=True, **alone)
    assert "batch" in parity.shard_axes(again.model), "premise"
    assert again.losses == kept.losses
    parity.assert_same(again, reference, rtol=1e-5, atol=1e-5, slots=False)


def gathers(model, batch):
    """Return how often a step gathers each variable, and the profile."""
    profile = tfshard.profile_step(model, batch)
    return profile.count("all-gather"), profile


@pytest.mark.on_cpu("the trace of their allocator")
def test_a_step_holds_a_layer_or_two_whole_and_not_all():
    """Checks the allocator's trace: eight layers of 4 MiB each, on four devices."""
    layers, width = 8, 1024
    layer = 4 * width * width
    added = {}
    for again in (False, True):
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), reshard_after_forward=again)
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
        model = tfshard.as_distributed(keras.Sequential([keras.Input((width,)), *hidden]))
        model.compile("adam", "mse", strategy=strategy)
        count, profile = gathers(model, (np.ones((4, width), "f"), np.ones((4, width), "f")))
        assert profile.peak is not None and profile.peak.before >= 3 * layers * layer, "premise"
        # The last layer's two uses share one unshard, and no gradient goes into the first layer. The biases add one.
        assert count == (2 * layers - 2 if again else layers) + 1
        added[again] = profile.peak.added / (4 * layer)
        assert not profile.peak.made.get("all-gather", 0) > 4 * layer * (3 if again else layers)
    assert added[False] >= layers
    # Two gathered layers, a gradient, the buffers of its reduction. Devices may be a layer apart.
    assert added[True] <= 6


def test_kernels_of_convolutions_wait_for_their_unshard_in_the_backward_pass():
    """Checks a plan. The gradients start with the shape of the kernel, which waits for nothing."""
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="tanh", use_bias=False) for _ in range(8)]
    model = tfshard.as_distributed(keras.Sequential([keras.Input((4, 4, 64)), *layers]))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
    model.compile("adam", "mse", strategy=strategy)
    peak = strategy.plan(model, inputs=np.ones((4, 4, 4, 64), "f")).peak
    assert peak is not None and 0 < peak.gathered_bytes <= 2 * (kernel := 4 * 3 * 3 * 64 * 64)
    assert peak.stored_bytes >= 3 * 8 * kernel // 4, "premise"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("patterns", "again"),
    [(".*", 2), (["sequential.*/layer_[12]/kernel"], 1), ([], 0), (["none"], 0), (True, 2), (False, 0)],
)
def test_variables_that_are_gathered_again_are_chosen_by_their_paths(patterns, again):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None, reshard_after_forward=patterns)
    layers = [keras.layers.Dense(WIDTH, use_bias=False, name=f"layer_{i}") for i in range(4)]
    model = tfshard.as_distributed(keras.Sequential([keras.Input((WIDTH,)), *layers]))
    model.compile("sgd", "mse", strategy=strategy)
    count, profile = gathers(model, (X, X))
    assert count == 4 + again
    tfshard.measure.assert_matches_plan(profile, strategy.plan(model))


@pytest.mark.on_cpu("equal bits: GPUs add in any order")
def test_prefetch_hides_reductions_behind_one_more_layer_and_takes_its_memory():
    """Checks the plan of a backward pass through equal layers. The numbers equal those without prefetch."""
    links = Links.of(devices_per_host=4, inside=Link(latency=0.0, bandwidth=1e9))
    x = np.random.RandomState(0).normal(size=(16, 256)).astype("float32")
    losses, overlaps, peaks = [], [], []
    for prefetch in (1, 2):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(256, activation="tanh", use_bias=False) for _ in range(12)]
        model = tfshard.Sequential([keras.Input((256,)), *layers])
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None, prefetch=prefetch)
        model.compile(keras.optimizers.Adam(1e-2), "mse", strategy=strategy)
        losses.append([float(model.train_on_batch(x, x)) for _ in range(3)])
        plan = strategy.plan(model, inputs=x, links=links, compute_seconds=0.01)
        overlaps.append(plan.overlap)
        peaks.append(plan.peak.peak_bytes)
    assert losses[0] == losses[1]
    assert overlaps[0].collective_seconds == pytest.approx(overlaps[1].collective_seconds), "premise"
    assert overlaps[1].hidden > overlaps[0].hidden + 0.1 and overlaps[1].seconds < overlaps[0].seconds
    # The peak may grow by one gradient and its reduction buffer.
    assert peaks[0] < peaks[1] <= peaks[0] + 2 * 4 * 256 * 256


@pytest.mark.parametrize("wrong", [3, None, ["("], [1], "("])
def test_wrong_patterns_are_refused(wrong):
    with pytest.raises(tfshard.errors.StrategyError, match="True, False, or regular expressions"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), reshard_after_forward=wrong)


@pytest.mark.parametrize("wrong", [-1, True, 0.5, "1"])
def test_wrong_prefetch_is_refused(wrong):
    with pytest.raises(tfshard.errors.StrategyError, match="0 or more. Received: prefetch="):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), prefetch=wrong)


# --- Bytes -----------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", [{"batch": 4}, {"batch": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_gathers_send_the_compute_dtype(policy, mesh):
    """Half the bytes are sent, as planned. Masters, slots and losses stay the same."""
    sent, losses, vocabulary = {}, {}, 3000
    for name, narrow in (("float32", False), (policy, False), (policy, True)):
        keras.config.set_dtype_policy(name)
        try:
            inputs = keras.Input((16,), dtype="int32")
            x = keras.layers.Embedding(vocabulary, 512)(inputs)
            for _ in range(3):
                x = keras.layers.Dense(512, activation="relu")(x)
            model = tfshard.as_distributed(keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x)))
        finally:
            keras.config.set_dtype_policy("float32")
        values = np.random.RandomState(1)
        model.set_weights([0.05 * values.normal(size=each.shape) for each in model.weights])
        layout_map = tfshard.LayoutMap()
        layout_map.replicated(".*", optional=True)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map)
        model.compile(keras.optimizers.Adam(1e-3), "mse", strategy=strategy)
        batch = values.randint(0, vocabulary, (8, 16)), values.normal(size=(8, 512))
        with pytest.MonkeyPatch.context() as patch:
            if not narrow:
                patch.setattr(unshard_schedule, "sent_dtypes", lambda uses: {})
            plan = strategy.plan(model)
            profile = tfshard.profile_step(model, batch)
        planned = [each for each in plan.collectives if each.kind == "all-gather"]
        assert profile.count("all-gather") == sum(each.count for each in planned)
        if narrow:
            bytes_ = sum(each.count * each.bytes for each in planned)
            assert bytes_ - profile.untold_bytes("all-gather") <= profile.bytes("all-gather") <= bytes_
        sent[name, narrow] = profile.bytes("all-gather")
        losses[name, narrow] = [float(model.train_on_batch(*batch)) for _ in range(4)]
        held = [each.value.buffer for each in (*model.trainable_variables, *model.optimizer.variables[2:])]
        assert {each.dtype for each in held if each.dtype.is_floating} == {tf.float32}
    assert sent[policy, False] == sent["float32", False] >= 4 * (vocabulary * 512 + 3 * 512 * 512), "premise"
    assert sent[policy, True] == sent["float32", False] / 2
    assert losses[policy, True] == losses[policy, False] != losses["float32", False]


class CastBack(keras.layers.Dense):
    """Casts its kernel to the compute dtype and back, as KerasHub's norms cast their scales."""

    def call(self, inputs):
        return tf.cast(tf.matmul(tf.cast(inputs, "float32"), tf.cast(self.kernel, "float32")), self.compute_dtype)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_what_is_cast_back_is_sent_in_the_compute_dtype(policy):
    """As in plain Keras on one device."""
    losses, batch = {}, (RS.normal(size=(8, 256)).astype("float32"), RS.normal(size=(8, 256)))
    kernels = [0.1 * RS.normal(size=(256, 256)) for _ in range(3)]
    for is_sharded in (False, True):
        inputs = x = keras.Input((256,))
        for _ in kernels:
            x = CastBack(256, use_bias=False, dtype=policy)(x)
        model = keras.Model(inputs, x)
        options = {}
        if is_sharded:
            model = tfshard.as_distributed(model)
            options["strategy"] = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
        model.set_weights(kernels)
        model.compile(keras.optimizers.Adam(1e-2), "mse", **options)
        losses[is_sharded] = [float(model.train_on_batch(*batch)) for _ in range(4)]
    assert tfshard.profile_step(model, batch).count("all-gather") >= len(kernels), "premise"
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)


def test_the_dtype_of_reductions_is_a_switch_of_what_is_compiled_next(monkeypatch):
    monkeypatch.delenv(reductions.SWITCH, raising=False)
    monkeypatch.delenv(reductions.SIZE, raising=False)
    mesh = tfshard.create_mesh(batch=4)
    tfshard.ShardedStrategy(mesh)
    assert (os.environ[reductions.SWITCH], os.environ[reductions.SIZE]) == ("1", "1")
    tfshard.ShardedStrategy(mesh, reduce_dtype="bfloat16")
    assert reductions.SWITCH not in os.environ and reductions.SIZE not in os.environ
    with pytest.raises(tfshard.errors.StrategyError, match="'float32', 'bfloat16'.*Received: 'half'"):
        tfshard.ShardedStrategy(mesh, reduce_dtype="half")
