"""Compressed gradient reductions match a NumPy reference with error feedback."""

import functools
import math
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.contrib.compression import gradient_codes
from tfshard.errors import StrategyError
from tfshard.layouts import variable_layout

FLAT, HYBRID = {"batch": 4}, {"replica": 2, "batch": 2}
RS = np.random.RandomState(0)
X = RS.normal(size=(16, 10)).astype("float32")
TOKENS = RS.randint(0, 24, (16, 6)).astype("int32")
CLASSES = (np.arange(16) % 4).astype("int32")
RATE = 0.5
LOW_RANK = tfshard.PowerSGD(rank=2, warm_up_steps=1)


def title(value):
    """Return the title of a case."""
    if isinstance(value, tfshard.PowerSGD):
        return "powersgd"
    if isinstance(value, dict):
        return "hybrid" if value == HYBRID else f"flat{value['batch']}"
    return "_".join(map(title, value)) if isinstance(value, tuple) else str(value)


@pytest.fixture(autouse=True)
def kernels_of_small_models(monkeypatch):
    """Compress the gradients of small kernels, but not of biases."""
    monkeypatch.setattr(variable_layout, "LEAST_BY_REPLICAS_BYTES", 200)


def mlp():
    """Return kernels that are sharded in dim 1, in dim 0, in dim 0, and not at all."""
    layers = [keras.layers.Dense(units, activation="tanh") for units in (8, 12, 7)]
    return keras.Sequential([keras.Input((10,)), *layers, keras.layers.Dense(9)])


def tied():
    """Return a table that is used twice, and a kernel of three dims."""
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(24, 16)
    x = table(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x)
    return keras.Model(inputs, keras.ops.max(table(x, reverse=True), axis=1))


def strategy_of(mesh, stage, compression, **options):
    options = {"analyzer": tfshard.ParameterAnalyzer(group_threshold_bytes=200), **options}
    return tfshard.ShardedStrategy(
        tfshard.create_mesh(**mesh), zero_stage=stage, compression=compression, **options
    )  # fmt: skip


def sgd():
    return keras.optimizers.SGD(RATE)


def run(mesh, stage=3, compression=None, *, build=mlp, x=X, optimizer=sgd, steps=4, eager=False, **options):
    strategy = None if mesh is None else strategy_of(mesh, stage, compression, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(
        build, [(x, CLASSES)], optimizer=optimizer, loss=loss, strategy=strategy, steps=steps, eager=eager
    )


@functools.cache
def on_one_device(build=mlp, optimizer=sgd, steps=4):
    return run(None, build=build, x=X if build is mlp else TOKENS, optimizer=optimizer, steps=steps)


def kept(model):
    """Return the compression state of each compressed gradient, by the index of the variable and the name."""
    return {
        (number, name): each.numpy()
        for number, variable in enumerate(model.trainable_variables)
        for name, each in variable.value.kept.items()
    }


# --- the reference, in NumPy


def rounded(chunks, compression):
    """Return lines of values after compression and decompression."""
    if compression == "bfloat16":
        return tf.cast(tf.cast(chunks, tf.bfloat16), tf.float32).numpy()
    lines, elements = chunks.shape
    blocks = np.pad(chunks, [[0, 0], [0, -elements % 256]]).reshape(lines, -1, 256)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(127)).astype("float32")
    codes = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    return (codes * scale).astype("float32").reshape(lines, -1)[:, :elements]


class Reference:
    """Reduces local gradients as replicas and devices do, and keeps the error-feedback residuals."""

    def __init__(self, shape, dim, mesh, compression):
        self.shape, self.dim, self.compression = shape, dim, compression
        self.adders = mesh["batch"] if "replica" in mesh else 1
        self.exchanging = math.prod(mesh.values()) // self.adders
        self.error = self.sum_error = np.float32(0)
        self.steps = 0

    def add_up(self, parts):
        if isinstance(self.compression, tfshard.PowerSGD):
            return self.by_rank(parts)
        elements, count = math.prod(self.shape), self.exchanging
        if self.dim is not None:  # Chunks are the shards.
            parts = np.moveaxis(parts, 1 + self.dim, 1)
        # Added up within a replica: shards, concatenated.
        lines = parts.reshape(count, self.adders, elements).sum(1)
        piece = -(-elements // self.adders)
        pieces = np.pad(lines, [[0, 0], [0, self.adders * piece - elements]]).reshape(count, self.adders, piece)
        chunk = -(-piece // count)
        chunks = np.pad(pieces, [[0, 0], [0, 0], [0, count * chunk - piece]])
        chunks = chunks.reshape(count, self.adders, count, chunk) + self.error
        sent = rounded(chunks.reshape(-1, chunk), self.compression).reshape(chunks.shape)
        self.error = chunks - sent
        total = sent.sum(0)
        if self.dim is None:
            total = total + self.sum_error
            sent = rounded(total.reshape(-1, chunk), self.compression).reshape(total.shape)
            self.sum_error, total = total - sent, sent
            total = total.reshape(self.adders, -1)[:, :piece]
        total = total.reshape(-1)[:elements]
        if self.dim is None:
            return total.reshape(self.shape)
        moved = (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])
        return np.moveaxis(total.reshape(moved), 0, self.dim)

    def by_rank(self, parts):
        matrices = parts.reshape(len(parts), *self.shape)
        if self.steps == 0:
            columns = self.shape[1]
            drawn = np.random.RandomState(math.prod(self.shape)).normal(size=(columns, self.compression.rank))
            self.factor = drawn.astype("float32")
        self.steps += 1
        if self.steps <= self.compression.warm_up_steps:
            return matrices.sum(0)
        matrices = matrices + self.error
        left, _ = np.linalg.qr((matrices @ self.factor).sum(0))
        rights = np.swapaxes(matrices, 1, 2) @ left
        self.factor = rights.sum(0)
        self.error = matrices - left @ np.swapaxes(rights, 1, 2)
        return left @ self.factor.T


def reference(mesh, stage, compression, steps=4):
    """Return losses and weights of one device that reduces per-device gradients with `Reference`."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    references = {}
    for number, variable in enumerate(model.trainable_variables):
        if len(variable.shape) == 2:
            divides = [dim for dim in range(2) if variable.shape[dim] % 4 == 0]
            dim = divides[0] if divides and stage > 0 and "replica" not in mesh else None
            references[number] = Reference(tuple(variable.shape), dim, mesh, compression)
    losses = []
    for _ in range(steps):
        parts = []
        losses.append(float(loss(CLASSES, model(X))) / len(X))
        for device in range(4):
            rows = slice(4 * device, 4 * device + 4)
            with tf.GradientTape() as tape:
                value = loss(CLASSES[rows], model(X[rows])) / len(X)
            parts.append(tape.gradient(value, model.trainable_variables))
        for number, variable in enumerate(model.trainable_variables):
            of_devices = np.stack([part[number].numpy() for part in parts])
            own = references.get(number)
            variable.assign_sub(RATE * (of_devices.sum(0) if own is None else own.add_up(of_devices)))
    return losses, model.get_weights()


CASES = [
    *((FLAT, stage, code) for stage in (3, 2, 1, 0) for code in ("int8",)),
    (FLAT, 3, "bfloat16"),
    (FLAT, 0, "bfloat16"),
    (FLAT, 3, LOW_RANK),
    (FLAT, 0, LOW_RANK),
    (HYBRID, 3, "int8"),
    (HYBRID, 0, "bfloat16"),
    (HYBRID, 2, LOW_RANK),
]


def assert_same_codes(weights, expected):
    """Assert equal weights, except for a few elements between two codes, which may be one code off."""
    ours, theirs = (np.concatenate([each.ravel() for each in given]) for given in (weights, expected))
    assert np.mean(np.isclose(ours, theirs, rtol=0, atol=5e-6)) >= 0.98
    np.testing.assert_allclose(ours, theirs, atol=0.01)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("mesh", "stage", "compression"), CASES, ids=title)
def test_a_step_adds_up_what_the_reference_does(mesh, stage, compression):
    trained = run(mesh, stage, compression)
    losses, weights = reference(mesh, stage, compression)
    with pytest.raises(AssertionError):  # Premise: exact sums give other numbers.
        assert_same_codes(trained.model.get_weights(), on_one_device().model.get_weights())
    assert_same_codes(trained.model.get_weights(), weights)
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-4)
    trained.model.distribute_strategy.check_consistency(trained.model)


@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
def test_codes_are_rounded_to_the_nearest(compression):
    values = RS.normal(size=(3, 1001)).astype("float32")
    values[1, :300] = 0.0
    encoded = gradient_codes.encode(tf.constant(values), compression)
    words = {"bfloat16": 501, "int8": 4 * 65}
    assert (encoded.dtype, tuple(encoded.shape)) == (tf.float32, (3, words[compression]))
    decoded = gradient_codes.decode(encoded, compression, 1001).numpy()
    np.testing.assert_array_equal(decoded, rounded(values, compression))
    values[0, 5], values[2, 700] = np.nan, np.inf
    decoded = gradient_codes.decode(gradient_codes.encode(tf.constant(values), compression), compression, 1001).numpy()
    assert not np.isfinite(decoded[0, 5]) and not np.isfinite(decoded[2, 700]) and np.isfinite(decoded[1]).all()


# --- combined with other features of a step

ADAM = functools.partial(keras.optimizers.Adam, 1e-2)
SETTINGS = {
    "adam": (ADAM, FLAT, {}),
    "microbatches": (ADAM, FLAT, {"microbatches": 2}),
    "microbatches of replicas": (ADAM, HYBRID, {"microbatches": 2, "stage": 0}),
    "reduce_once": (ADAM, FLAT, {"microbatches": 2, "reduce_once": True}),
    "accumulated": (functools.partial(keras.optimizers.Adam, 1e-2, gradient_accumulation_steps=2), FLAT, {}),
    "clipped": (functools.partial(keras.optimizers.Adam, 1e-2, global_clipnorm=0.1), FLAT, {"stage": 1}),
    "whole gradients": (functools.partial(keras.optimizers.Lamb, 1e-2), FLAT, {"stage": 2}),
    "kept gathered": (ADAM, FLAT, {"reshard_after_forward": False}),
    "int8 slots": (ADAM, FLAT, {"slot_dtype": "int8"}),
    "no groups": (ADAM, HYBRID, {"analyzer": None}),
    "one group": (ADAM, FLAT, {"analyzer": tfshard.ParameterAnalyzer()}),
    "one group of replicas": (ADAM, HYBRID, {"analyzer": tfshard.ParameterAnalyzer(), "stage": 1}),
}


BY_RANK = ("microbatches", "reduce_once", "one group of replicas")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "compression"),
    [*((name, "int8") for name in SETTINGS), *((name, LOW_RANK) for name in BY_RANK)],
    ids=title,
)
def test_a_model_trains_nearly_as_on_one_device_with(name, compression):
    optimizer, mesh, options = SETTINGS[name]
    trained = run(mesh, compression=compression, optimizer=optimizer, steps=8, **options)
    exact = on_one_device(optimizer=optimizer, steps=8)
    assert exact.losses[-1] < 0.95 * exact.losses[0], "premise: it learns"
    near = 0.01 if compression == "int8" else 0.25
    learned = exact.losses[0] - exact.losses[-1]
    assert abs(trained.losses[-1] - exact.losses[-1]) < near * learned
    assert any(np.abs(error).max() > 0 for (_, name), error in kept(trained.model).items() if "error" in name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [FLAT, HYBRID], ids=title)
@pytest.mark.parametrize("compression", ["bfloat16", "int8", LOW_RANK], ids=title)
def test_variables_that_are_used_twice_and_kernels_of_three_dims_are_compressed(mesh, compression):
    trained = run(mesh, compression=compression, build=tied, x=TOKENS, optimizer=ADAM, steps=6)
    exact = on_one_device(tied, ADAM, 6)
    np.testing.assert_allclose(trained.losses, exact.losses, rtol=0.1 if compression == LOW_RANK else 0.01)
    # PowerSGD leaves the table uncompressed, and compresses all kernels of the attention.
    assert len({number for number, _ in kept(trained.model)}) == (4 if compression == LOW_RANK else 5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_and_recomputed_blocks_are_compressed(policy):
    def run_in(policy, compression):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, activation="tanh", name=f"block{i}_dense", dtype=policy) for i in range(3)]
        model = keras.Sequential([keras.Input((10,)), *layers, keras.layers.Dense(4, dtype="float32")])
        tfshard.as_distributed(model)
        strategy = strategy_of(FLAT, 3, compression)
        model.compile(ADAM(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), strategy=strategy)
        assert strategy.recompute(model) == ["block0", "block1", "block2"]
        return [float(model.train_on_batch(X, CLASSES)) for _ in range(6)], model

    losses, model = run_in(policy, "int8")
    exact, _ = run_in(policy, None)
    np.testing.assert_allclose(losses, exact, rtol=0.02)
    assert len(kept(model)) == 4 and all(np.abs(error).max() > 0 for error in kept(model).values())


def test_what_is_not_a_number_is_not_kept():
    trained = run(FLAT, compression="int8", steps=1)
    model, before = trained.model, trained.model.get_weights()
    poisoned = X.copy()
    poisoned[3] = np.nan
    assert np.isnan(model.train_on_batch(poisoned, CLASSES))
    assert all(np.isfinite(error).all() for error in kept(model).values())
    model.set_weights(before)
    assert np.isfinite(model.train_on_batch(X, CLASSES))


def test_eager_steps_add_up_exactly():
    trained = run(FLAT, compression="int8", eager=True)
    parity.assert_same(trained, on_one_device(), rtol=1e-5, atol=1e-5, slots=False)
    assert all(not error.any() for error in kept(trained.model).values())


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage"), [(FLAT, 3), (FLAT, 1), (HYBRID, 3)], ids=title)
def test_verify_compares_exact_sums(mesh, stage):
    trained = run(mesh, stage, compression="int8", steps=2)
    before = kept(trained.model)
    verdict = tfshard.verify(trained.model, (X, CLASSES))
    assert verdict.ok, verdict
    for key, value in kept(trained.model).items():
        np.testing.assert_array_equal(value, before[key])


# --- communication and storage


def large_model(strategy):
    inputs = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(4000, 512)(inputs)
    x = keras.layers.MultiHeadAttention(4, 128)(x, x)
    outputs = keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(x))
    model = tfshard.as_distributed(keras.Model(inputs, outputs))
    model.compile("adam", "sparse_categorical_crossentropy", strategy=strategy)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("mesh", "stage", "compression"),
    [
        (FLAT, 3, "int8"),
        (FLAT, 1, "bfloat16"),
        (FLAT, 0, "int8"),
        (FLAT, 2, tfshard.PowerSGD(rank=2, warm_up_steps=1)),
        (HYBRID, 3, "bfloat16"),
        (HYBRID, 0, "int8"),
        (HYBRID, 3, tfshard.PowerSGD(rank=2, warm_up_steps=0)),
    ],
    ids=title,
)
def test_a_step_sends_and_devices_hold_what_is_planned(mesh, stage, compression, monkeypatch):
    monkeypatch.setattr(variable_layout, "LEAST_BY_REPLICAS_BYTES", 1 << 16)
    batch = np.zeros((16, 16), "int32"), np.zeros((16,), "int32")
    strategy = strategy_of(mesh, stage, compression, analyzer=tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 16))
    model = large_model(strategy)
    plan = strategy.plan(model, inputs=batch[0])
    profile = tfshard.profile_step(model, batch)
    tfshard.measure.assert_matches_plan(profile, plan)
    groups = strategy.config.analyzer
    exact = tfshard.plan(model, mesh, zero_stage=stage, analyzer=groups, inputs=batch[0])
    compressed = [each for each in plan.collectives if each not in exact.collectives]
    assert compressed, "premise: it is planned"
    if compression == "int8" and mesh == FLAT:
        large = [each.bytes for each in compressed if each.kind == "all-to-all" and each.bytes >= 1 << 18]
        assert profile.bytes("all-to-all") == sum(large)
        assert sum(large) == 4 * (4000 * 512 + 4 * 512 * 512) * 65 // 256, "blocks are full"
    report = strategy.report(model)
    for kind in ("parameter", "slot"):
        assert report.bytes_per_device(kind) == plan.bytes_per_device(kind)
        assert report.bytes_on_one_device(kind) == plan.bytes_on_one_device(kind) == exact.bytes_on_one_device(kind)
    assert plan.bytes_per_device("slot") > exact.bytes_per_device("slot")
    assert max(profile.variable_bytes.values()) == report.bytes_per_device()


@pytest.mark.slow
@pytest.mark.parametrize("reduce_once", [False, True])
def test_microbatches_send_what_is_planned(reduce_once):
    model = run(FLAT, 0, "int8", steps=1, microbatches=2, reduce_once=reduce_once).model
    plan = model.distribute_strategy.plan(model, inputs=X)
    profile = tfshard.profile_step(model, (X, CLASSES))
    tfshard.measure.assert_matches_plan(profile, plan)
    assert profile.count("all-gather") == profile.count("all-to-all") == 4 * (1 if reduce_once else 2)


# --- checkpoints


def saved(tmp_path, mesh=FLAT, stage=3, compression="int8"):
    trained = run(mesh, stage, compression, optimizer=ADAM, steps=3)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(trained.model, step=3)
    return manager, trained.model


def restored(manager, mesh=FLAT, stage=3, compression="int8"):
    model = run(mesh, stage, compression, optimizer=ADAM, steps=1).model
    manager.restore(model)
    return model


def totals(model, mesh, compression):
    """Return the sum over all devices of the unsent part of each gradient."""
    pieces = 2 if mesh == HYBRID and compression != LOW_RANK else 1
    found = {}
    for (number, name), kept_ in kept(model).items():
        shape = tuple(model.trainable_variables[number].shape)
        elements = math.prod(shape)
        if name == "error":  # The shards of each replica or device are concatenated.
            found[number] = kept_.reshape(len(kept_) // pieces, -1).sum(0)[:elements].reshape(shape)
        if name == "sum_error":  # The chunks of each shard are concatenated.
            chunks = [kept_[piece::pieces].reshape(-1)[: -(-elements // pieces)] for piece in range(pieces)]
            found[number] = found[number] + np.concatenate(chunks)[:elements].reshape(shape)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage", "compression"), [(FLAT, 3, "int8"), (HYBRID, 0, LOW_RANK)], ids=title)
def test_a_restored_run_goes_on_with_the_same_bits(tmp_path, mesh, stage, compression):
    manager, model = saved(tmp_path, mesh, stage, compression)
    again = restored(manager, mesh, stage, compression)
    for key, value in kept(model).items():
        np.testing.assert_array_equal(kept(again)[key], value)
    losses = [[float(each.train_on_batch(X, CLASSES)) for _ in range(2)] for each in (model, again)]
    assert losses[0] == losses[1]
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("mesh", "stage", "compression"),
    [(FLAT, 0, "int8"), ({"batch": 2}, 3, "int8"), (HYBRID, 3, LOW_RANK)],
    ids=title,
)
@pytest.mark.parametrize("saved_as", [(FLAT, 3), (HYBRID, 0)], ids=title)
def test_on_other_devices_what_was_not_sent_is_shared_out(tmp_path, saved_as, mesh, stage, compression):
    manager, model = saved(tmp_path, *saved_as)
    again = restored(manager, mesh, stage, compression)
    expected, found = totals(model, saved_as[0], "int8"), totals(again, mesh, compression)
    assert len(expected) == 4 and all(np.abs(each).max() > 0 for each in expected.values()), "premise"
    assert found.keys() == expected.keys()
    for number, value in found.items():
        np.testing.assert_allclose(value, expected[number], atol=1e-8)
    assert np.isfinite(again.train_on_batch(X, CLASSES))


DROPPED = ".*with compressed gradients.*of 4 variables, such as '.*kernel', are dropped"


def test_a_model_that_moves_takes_what_was_not_sent_along_and_says_when_it_is_dropped():
    model = run(FLAT, 3, "int8", optimizer=ADAM, steps=3).model
    weights, expected = model.get_weights(), totals(model, FLAT, "int8")
    assert len(expected) == 4 and all(np.abs(each).max() > 0 for each in expected.values()), "premise"
    for mesh, stage in [({"batch": 2}, 3), (HYBRID, 0)]:
        model.compile("adam", model.loss, strategy=strategy_of(mesh, stage, "int8"))
        found = totals(model, mesh, "int8")
        assert found.keys() == expected.keys()
        for number, value in found.items():
            np.testing.assert_allclose(value, expected[number], atol=1e-8)
    with pytest.warns(UserWarning, match=f"Model '.*' was trained{DROPPED}"):
        model.compile("adam", model.loss, strategy=strategy_of(FLAT, 3, None))
    assert kept(model) == {}
    for ours, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.isfinite(model.train_on_batch(X, CLASSES))


@pytest.mark.slow
def test_a_run_without_compression_leaves_it_out_and_says_so(tmp_path):
    manager, model = saved(tmp_path)
    with pytest.warns(UserWarning, match=DROPPED):
        again = restored(manager, compression=None)
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_run_that_was_saved_without_begins_with_zeros(tmp_path):
    manager, _ = saved(tmp_path, compression=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = restored(manager)
    assert len(kept(again)) == 5 and not any(error.any() for error in kept(again).values())


# --- errors


@pytest.mark.parametrize("given", ["int4", True, 8, tfshard.PowerSGD, {}])
def test_an_unknown_compression_is_refused(given):
    with pytest.raises(StrategyError, match="compression must be None, 'bfloat16', 'int8' or a tfshard.PowerSGD. Rec"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), compression=given)
    with pytest.raises(StrategyError, match="compression must be None"):
        tfshard.plan(mlp(), {"batch": 4}, compression=given)


def test_the_class_of_a_compression_is_refused_with_the_call_that_is_missing():
    with pytest.raises(StrategyError, match=r"Call the class: PowerSGD\(\)"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), compression=tfshard.PowerSGD)


@pytest.mark.parametrize("given", [{"rank": 0}, {"rank": 1.5}, {"rank": True}, {"warm_up_steps": -1}])
def test_nonsense_of_powersgd_is_refused(given):
    name, value = next(iter(given.items()))
    with pytest.raises(
        StrategyError, match=rf"{name} of PowerSGD must be an integer, . or more. Received: {name}={value}"
    ):
        tfshard.PowerSGD(**given)


def test_a_model_axis_is_refused():
    with pytest.raises(
        StrategyError, match="compression needs a mesh of only a batch axis.*'int8', mesh={'batch': 2, 'model': 2}"
    ):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), compression="int8")


def test_small_variables_and_one_device_are_exact():
    strategy = strategy_of({"batch": 1}, 3, "int8")
    assert all(layout.reduction is None for layout in strategy.placement_of(mlp()).variables)
    placed = strategy_of(FLAT, 3, "int8").placement_of(mlp()).variables
    assert [layout.reduction and layout.reduction.option for layout in placed] == ["int8", None] * 4
