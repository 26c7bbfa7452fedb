"""Gathers in codes of one byte: a step computes with rounded parameters, and updates exact parameters."""

import dataclasses
import itertools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from sweeps import table
from tfshard.errors import StrategyError
from tfshard.layouts import boxes, variable_layout

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(16, 64)).astype("float32"), RS.normal(size=(16, 8)).astype("float32")
TOKENS, CLASSES = RS.randint(0, 96, (16, 6)).astype("int32"), (np.arange(16) % 8).astype("int32")
ALONE, GROUPS = None, tfshard.ParameterAnalyzer()
FLAT, HYBRID, GRID = {"batch": 4}, {"replica": 2, "batch": 2}, {"batch": 2, "model": 2}
STEPS = 3


# --- the reference: one device that computes with rounded weights and updates exact weights -----------------------


def in_blocks(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round a local shard, in the order in which it is sent."""
    line = values.reshape(-1).astype("float32")
    blocks = np.pad(line, (0, -line.size % 256)).reshape(-1, 256)
    largest = np.float32({"int8": 127, "float8_e4m3fn": 448}[dtype])
    scale = np.abs(blocks).max(-1, keepdims=True) / largest
    multiples = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    if dtype == "int8":
        multiples = np.round(multiples)
    else:
        float8 = tf.dtypes.experimental.float8_e4m3fn.as_numpy_dtype
        multiples = np.clip(multiples, -largest, largest).astype(float8).astype("float32")
    return (multiples * scale).reshape(-1)[: line.size].reshape(values.shape).astype(values.dtype)


def rounded(values: dict[str, np.ndarray], model: keras.Model) -> dict[str, np.ndarray]:
    """Round the values of a model as its devices send them, by path."""
    sharded = {each.path: each.value for each in model.variables if each.path in values}
    found = dict(values)
    for path, variable in sharded.items():
        layout, mesh_axes, dtype = variable.layout, variable.storage.format.mesh_axes, variable.layout.gather_dtype
        if dtype is None or layout.storage == layout.gathered or layout.member:
            continue
        if layout.flat is None:
            result = values[path].copy()
            for location in itertools.product(*(range(size) for size in mesh_axes.values())):
                at = dict(zip(mesh_axes, location, strict=True))
                box = boxes.shard_box(result.shape, layout.storage, mesh_axes, at)
                shard = np.moveaxis(values[path][box.slices], layout.storage.index("batch"), 0)
                result[box.slices] = np.moveaxis(in_blocks(shard, dtype), 0, layout.storage.index("batch"))
            found[path] = result
            continue
        members = [each for each in sharded.values() if each.storage is variable.storage]
        paths = [path for path, each in sharded.items() if each.storage is variable.storage]
        buffer = variable_layout.flatten_host_values((values[each] for each in paths), values[path].dtype, layout.flat)
        rows = buffer.reshape(-1, buffer.shape[-1])
        buffer = np.stack([in_blocks(row, dtype) for row in rows]).reshape(buffer.shape)
        for each, member in zip(paths, members, strict=True):
            place = layout.flat.members[member.member]
            found[each] = variable_layout.unflatten_host_value(buffer, layout.flat, place)
    return found


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    return {each.path: np.array(each.numpy()) for each in model.weights}


def assign(model: keras.Model, values: dict[str, np.ndarray]) -> None:
    for each in model.weights:
        each.assign(values[each.path])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train with gathers in codes."""

    gather_dtype: object = "int8"
    mesh: dict = dataclasses.field(default_factory=lambda: FLAT)
    analyzer: tfshard.ParameterAnalyzer | None = ALONE
    build: Callable[[], keras.Model] = None
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    policy: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    recompute: object = None
    jit_compile: bool = False
    tolerance: float = 1e-5


def mlp():
    """Return kernels that four devices shard in dim 0, in dim 1, and not at all."""
    layers = [keras.layers.Dense(units, activation="tanh", name=f"hidden_{units}") for units in (98, 96, 67, 66)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8, name="head")], name="net")


def first_dim_odd():
    inputs = keras.Input((65,))
    x = keras.layers.Dense(64, activation="tanh", name="by_columns")(inputs)
    return keras.Model(inputs, keras.layers.Dense(8, name="head")(x), name="net")


def tied():
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(96, 64, name="table")
    x = table(inputs)
    x = x + keras.layers.Dense(64, activation="tanh", use_bias=False, name="inner")(x)
    return keras.Model(inputs, keras.ops.max(table(x, reverse=True), axis=1)[:, :8], name="net")


def convolution():
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((4, 4, 4))(inputs)
    x = keras.layers.Conv2D(128, 3, padding="same", activation="relu", name="conv")(x)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(8, name="head")(keras.layers.GlobalAveragePooling2D()(x)), name="net")


def frozen():
    model = mlp()
    model.get_layer("hidden_96").trainable = False
    return model


def constrained():
    norm = keras.constraints.UnitNorm()
    layers = [keras.layers.Dense(96, activation="tanh", kernel_constraint=norm, name=f"hidden_{i}") for i in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8, name="head")], name="net")


def blocks():
    """Return a model of equal blocks, which `jit_compile=True` compiles."""
    inputs = keras.Input((64,))
    x = inputs
    for number in range(3):
        layers = [keras.layers.Dense(96, activation="tanh"), keras.layers.Dense(64)]
        x = x + keras.Sequential([keras.Input((64,)), *layers], name=f"block_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(8, name="head")(x), name="net")


COLUMNS = {"net/hidden_98/kernel": (None, "model"), "net/hidden_96/kernel": ("model", None), ".*": ()}
CASES = {
    "int8": Case(),
    "float8": Case(gather_dtype="float8_e4m3fn"),
    "groups": Case(analyzer=GROUPS),
    "float8 in groups": Case(gather_dtype="float8_e4m3fn", analyzer=GROUPS),
    "a kernel sharded by columns": Case(build=first_dim_odd),
    "replicas": Case(mesh=HYBRID),
    "replicas in groups": Case(mesh=HYBRID, analyzer=GROUPS),
    "a model axis": Case(mesh=GRID, options={"layout_map": COLUMNS}),
    "a model axis in groups": Case(mesh=GRID, analyzer=GROUPS, options={"layout_map": COLUMNS}),
    "recomputed": Case(recompute="net/hidden.*", analyzer=ALONE),
    "recomputed in groups": Case(recompute="net/hidden.*", analyzer=GROUPS),
    "microbatches": Case(options={"microbatches": 2}),
    "microbatches in groups": Case(options={"microbatches": 2}, analyzer=GROUPS),
    "microbatches, reduced once": Case(options={"microbatches": 2, "reduce_once": True}),
    "kept gathered": Case(options={"reshard_after_forward": False}),
    "prefetch": Case(options={"prefetch": 2}),
    "mixed bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2),
    "mixed bfloat16 in groups": Case(policy="mixed_bfloat16", analyzer=GROUPS, tolerance=2e-2),
    "mixed float16": Case(policy="mixed_float16", tolerance=1e-2),
    "bfloat16": Case(policy="bfloat16", tolerance=5e-2),
    "compiled blocks": Case(build=blocks, jit_compile=True, analyzer=GROUPS),
    "compiled blocks, recomputed": Case(build=blocks, jit_compile=True, recompute=".*block_.*"),
    "a tied table": Case(build=tied),
    "a tied table, mixed": Case(build=tied, policy="mixed_bfloat16", tolerance=1e-1),
    "convolution": Case(build=convolution, tolerance=1e-4),
    "frozen": Case(build=frozen),
    "frozen in groups": Case(build=frozen, analyzer=GROUPS),
    "constraints": Case(build=constrained),
    "constraints in groups": Case(build=constrained, analyzer=GROUPS),
    "adamw": Case(optimizer=lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1, clipnorm=1.0), tolerance=1e-3),
    "averages": Case(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True), analyzer=GROUPS),
    "lamb in groups": Case(optimizer=lambda: keras.optimizers.Lamb(1e-3), analyzer=GROUPS, tolerance=1e-3),
    "accumulation": Case(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), analyzer=GROUPS),
    "narrow slots": Case(options={"slot_dtype": "bfloat16"}, analyzer=GROUPS, tolerance=1e-2),
    "compressed gradients": Case(options={"compression": "bfloat16"}, tolerance=1e-2),
    "patterns": Case(gather_dtype={".*hidden_96.*": "float32", ".*hidden_98.*": "float8_e4m3fn", ".*": "int8"}),
}
ALWAYS = [
    "int8", "float8 in groups", "a kernel sharded by columns", "replicas in groups", "a model axis",
    "recomputed in groups", "microbatches", "mixed bfloat16", "constraints", "compiled blocks",
]  # fmt: skip


def batch_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    if case.build is tied:
        return TOKENS, CLASSES
    return (X if case.build is not first_dim_odd else np.pad(X, ((0, 0), (0, 1)), constant_values=1.0)), Y


def loss_of(case: Case) -> keras.losses.Loss:
    return (
        keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if case.build is tied
        else keras.losses.MeanSquaredError()
    )


def born(case: Case) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    try:
        return (case.build or mlp)()
    finally:
        keras.config.set_dtype_policy("float32")


def compiled(case: Case, gather_dtype=None) -> tuple[keras.Model, tfshard.ShardedStrategy]:
    model = tfshard.as_distributed(born(case))
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**case.mesh), analyzer=case.analyzer, gather_dtype=gather_dtype, **case.options
    )
    if case.recompute:
        strategy.recompute(model, case.recompute)
    model.compile(case.optimizer(), loss_of(case), strategy=strategy, jit_compile=case.jit_compile)
    return model, strategy


def on_one_device(case: Case, sharded: keras.Model | None) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train plain Keras. Rounds its weights for each forward and backward pass as `sharded` does, if it is given."""
    plain, (x, y) = born(case), batch_of(case)
    plain.compile(case.optimizer(), loss_of(case), jit_compile=False)
    optimizer, losses = plain.optimizer, []
    optimizer.build(plain.trainable_variables)
    for _ in range(STEPS):
        exact = weights_of(plain)
        if sharded is not None:
            assign(plain, rounded(exact, sharded))
        with tf.GradientTape() as tape:
            loss = plain.compute_loss(x, y, plain(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, plain.trainable_variables)
        gradients = [tf.convert_to_tensor(each) for each in gradients]
        statistics = {path: value for path, value in weights_of(plain).items() if "moving" in path}
        assign(plain, exact | statistics)
        optimizer.apply(gradients, plain.trainable_variables)
        losses.append(float(loss))
    return losses, weights_of(plain)


def is_close(value: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Return whether almost all elements agree: an element between two codes may be rounded to either."""
    value, other = value.astype("float32"), other.astype("float32")
    return bool(np.mean(np.isclose(value, other, rtol=tolerance, atol=tolerance * np.abs(other).max())) > 0.99)


@table("gathers in codes", ("name",), [(each,) for each in CASES], always=[(each,) for each in ALWAYS])
def test_training_matches_one_device_with_rounded_weights(name):
    case = CASES[name]
    x, y = batch_of(case)
    model, _ = compiled(case, case.gather_dtype)
    coded = [each for each in model.weights if each.value.storage.format.codes]
    assert coded and all(each.value.storage.format.is_gathered for each in coded), "premise"
    losses = [float(model.train_on_batch(x, y)) for _ in range(STEPS)]
    expected, weights = on_one_device(case, model)
    np.testing.assert_allclose(losses, expected, rtol=case.tolerance)
    exact = on_one_device(case, None)[0]
    if case.tolerance < 1e-3:
        assert np.abs(np.subtract(exact, expected)).max() > 3 * np.abs(np.subtract(losses, expected)).max(), "premise"
    for each in model.weights:
        assert is_close(np.array(each.numpy()), weights[each.path], case.tolerance), each.path


# --- what is exact -----------------------------------------------------------------------------------------


class Same(keras.constraints.Constraint):
    """A constraint that all weights fulfil: each update writes what it reads."""

    def __call__(self, w):
        return 1.0 * w


def with_same():
    layers = [keras.layers.Dense(96, activation="tanh", kernel_constraint=Same(), name=f"hidden_{i}") for i in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8, name="head")], name="net")


class Rewriting(keras.optimizers.Optimizer):
    """A user's optimizer. tfshard does not know whether it is elementwise."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, variable * (1.0 - 0.0 * keras.ops.sum(gradient)))


STILL = {
    "rewriting": lambda: Rewriting(0.0),
    "sgd": lambda: keras.optimizers.SGD(0.0),
    "lamb": lambda: keras.optimizers.Lamb(0.0),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
    "muon": lambda: keras.optimizers.Muon(0.0, weight_decay=0.1),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grouping", ["alone", "groups"])
@pytest.mark.parametrize("optimizer", STILL)
def test_updates_never_round_stored_parameters(optimizer, grouping):
    analyzer = {"alone": ALONE, "groups": GROUPS}[grouping]
    model, _ = compiled(Case(build=with_same, optimizer=STILL[optimizer], analyzer=analyzer), "int8")
    before = weights_of(model)
    kernel = model.get_layer("hidden_0").kernel
    assert np.abs(rounded(before, model)[kernel.path] - before[kernel.path]).max() > 0, "premise: a code rounds"
    for _ in range(2):
        model.train_on_batch(X, Y)
    for path, value in weights_of(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("grouping", ["alone", "groups"])
def test_traced_steps_round_and_eager_steps_and_assignments_do_not(grouping):
    model, strategy = compiled(Case(analyzer={"alone": ALONE, "groups": GROUPS}[grouping]), "int8")
    exact = weights_of(model)
    in_codes = rounded(exact, model)
    kernel = model.get_layer("hidden_96").kernel
    assert np.abs(in_codes[kernel.path] - exact[kernel.path]).max() > 1e-4, "premise"

    @tf.function
    def step():
        read = tf.identity(kernel.value)
        kernel.assign_sub(tf.zeros(kernel.shape))
        return read, tf.identity(kernel.value)

    read, after = strategy.run(step)
    np.testing.assert_allclose(read.numpy(), in_codes[kernel.path], rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(after.numpy(), exact[kernel.path], err_msg="a read behind a write")
    np.testing.assert_array_equal(kernel.numpy(), exact[kernel.path], err_msg="what is stored")
    np.testing.assert_array_equal(tf.function(lambda: kernel.value.value())().numpy(), exact[kernel.path])
    np.testing.assert_array_equal(strategy.run(lambda: tf.identity(kernel.value)).numpy(), exact[kernel.path])
    plain = born(Case())
    plain.compile(loss="mse")
    assign(plain, in_codes)
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(plain.evaluate(X, Y, verbose=0), rel=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("grouping", ["alone", "groups"])
def test_a_step_that_writes_back_what_it_rounded_is_refused(grouping):
    model, strategy = compiled(Case(analyzer={"alone": ALONE, "groups": GROUPS}[grouping]), "int8")
    kernel = model.get_layer("hidden_96").kernel

    @tf.function
    def decay():
        kernel.assign(tf.maximum(0.9 * kernel, 0.0))

    with pytest.raises(StrategyError, match=f"assigns variable '{kernel.path}' a value .* rounded to int8"):
        strategy.run(decay)

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X) ** 2)
        (gradient,) = tape.gradient(loss, [kernel])
        kernel.assign_sub(0.1 * gradient)
        model.get_layer("hidden_98").kernel.assign(tf.ones((64, 98)))
        return loss

    before = np.array(kernel.numpy())
    strategy.run(train)
    assert 0 < np.abs(kernel.numpy() - before).max() < 0.1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("grouping", ["alone", "groups"])
def test_copies_of_other_variables_are_exact(grouping):
    model, strategy = compiled(Case(analyzer={"alone": ALONE, "groups": GROUPS}[grouping]), "int8")
    with strategy.scope():
        target = mlp()
    pairs = list(zip(model.trainable_variables, target.trainable_variables, strict=True))

    @tf.function
    def copy():
        for source, copied in pairs[1:]:
            copied.assign(source)
        (source, copied), read = pairs[0], tf.identity(pairs[0][0].value)
        tf.cond(tf.reduce_all(source == source), lambda: (copied.assign(read), 0)[1], lambda: 0)

    strategy.run(copy)
    for source, copied in pairs:
        np.testing.assert_array_equal(copied.numpy(), source.numpy(), err_msg=source.path)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("grouping", ["alone", "groups"])
def test_a_copy_has_the_value_at_its_read(grouping):
    model, strategy = compiled(Case(analyzer={"alone": ALONE, "groups": GROUPS}[grouping]), "int8")
    with strategy.scope():
        early, late = mlp().layers[0].kernel, mlp().layers[0].kernel
    kernel = model.layers[0].kernel
    before = np.array(kernel.numpy())

    @tf.function
    def step():
        read = tf.identity(kernel.value)
        kernel.assign_add(tf.ones(kernel.shape))
        early.assign(read)
        late.assign(kernel)
        other = model.layers[1].kernel
        read = tf.identity(other.value)
        other.assign_add(tf.ones(other.shape))
        other.assign(read - 0.5)

    other = np.array(model.layers[1].kernel.numpy())
    strategy.run(step)
    np.testing.assert_array_equal(early.numpy(), before)
    np.testing.assert_array_equal(late.numpy(), kernel.numpy())
    np.testing.assert_array_equal(kernel.numpy(), before + 1)
    np.testing.assert_allclose(model.layers[1].kernel.numpy(), other - 0.5, rtol=1e-6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["branch", "loop", "product"])
def test_a_rounded_value_is_refused_behind(way):
    model, strategy = compiled(Case(), "int8")
    kernel = model.get_layer("hidden_96").kernel

    @tf.function
    def step(is_halved):
        value = kernel.value.value()
        if way == "branch":
            value = tf.cond(is_halved, lambda: 0.5 * value, lambda: 0.9 * value)
        elif way == "loop":
            _, value = tf.while_loop(lambda i, _: i < 2, lambda i, each: (i + 1, 0.9 * each), (0, value))
        else:
            value = tf.matmul(value, tf.eye(96))
        kernel.assign(value)

    with pytest.raises(StrategyError, match="gather_dtype"):
        strategy.run(step, args=(tf.constant(True),))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["assign_sub", "assign"])
def test_steps_of_a_regularized_loss_are_exact_sums(way):
    model, strategy = compiled(Case(), "int8")
    kernel = model.get_layer("hidden_96").kernel
    exact = np.array(kernel.numpy())

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel**2)
        gradient = tape.gradient(loss, kernel)
        if way == "assign":
            kernel.assign(kernel - 0.25 * gradient)
        else:
            kernel.assign_sub(0.25 * gradient)

    in_codes = rounded(weights_of(model), model)[kernel.path]
    strategy.run(step)
    np.testing.assert_allclose(kernel.numpy(), exact - 0.5 * in_codes, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_verify_compares_exact_steps():
    model, _ = compiled(Case(), "int8")
    assert tfshard.verify(model, (X, Y)).ok


# --- bytes --------------------------------------------------------------------------------------------------


def wide():
    layers = [keras.layers.Dense(512, activation="tanh", name=f"hidden_{i}") for i in range(3)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8, name="head")], name="net")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("mesh", [FLAT, HYBRID, GRID], ids=["batch4", "replica2_batch2", "batch2_model2"])
@pytest.mark.parametrize("grouping", ["alone", "groups"])
def test_a_step_sends_the_planned_bytes(dtype, mesh, grouping):
    layout_map = tfshard.LayoutMap()
    layout_map.column("net/hidden_0")
    layout_map.row("net/hidden_1")
    layout_map.replicated(".*")
    options = {"layout_map": layout_map} if "model" in mesh else {}
    case = Case(build=wide, mesh=mesh, analyzer={"alone": ALONE, "groups": GROUPS}[grouping], options=options)
    model, strategy = compiled(case, dtype)
    plan = strategy.plan(model, inputs=X)
    coded = {each.what: each for each in plan.collectives if f"in {dtype}, with scales" in each.formula}
    elements = dict.fromkeys(coded, 0)
    for layout in strategy.placement_of(model).variables:
        unit = layout.spec.path if layout.group is None else f"group {layout.group}"
        if unit in coded:
            assert layout.spec.path.endswith("kernel")
            elements[unit] += int(np.prod(layout.spec.shape)) // (2 if "model" in layout.compute else 1)
    assert sum(elements.values()) > 512 * 512
    for unit, each in coded.items():
        assert elements[unit] <= each.bytes < 1.1 * elements[unit], "a quarter of float32, and scales"
    tfshard.measure.assert_matches_plan(tfshard.profile_step(model, (X, Y)), plan)
    again = tfshard.plan(model, mesh, inputs=X, analyzer=case.analyzer, gather_dtype=dtype, **options)
    assert set(coded.values()) <= set(again.collectives)


# --- settings, checkpoints, refusals --------------------------------------------------------------------------


def test_gathers_are_exact_by_default():
    model, strategy = compiled(Case(analyzer=GROUPS))
    assert strategy.config.precision.gather_dtypes.rules == ()
    assert not [each.path for each in model.weights if each.value.storage.format.codes]


def test_first_matching_pattern_chooses_the_gather_dtype():
    model, _ = compiled(CASES["patterns"], CASES["patterns"].gather_dtype)
    found = {each.path: each.value.storage.format.codes for each in model.weights}
    kernels = {"net/hidden_98/kernel": "float8_e4m3fn", "net/hidden_67/kernel": "int8", "net/hidden_66/kernel": "int8"}
    assert {path: codes for path, codes in found.items() if codes} == kernels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather_dtype": "int4"}, "must be None, or one of 'float32', 'int8', .*Received: gather_dtype='int4'"),
        ({"gather_dtype": {"*": "int8"}}, "not a regular expression: .*Received: gather_dtype="),
        ({"gather_dtype": "int8", "zero_stage": 0}, "needs zero_stage=3.*nothing is gathered.*zero_stage=0"),
        ({"gather_dtype": {".*": "int8"}, "zero_stage": 2}, "needs zero_stage=3.*only copy.*zero_stage=2"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(options, message):
    for function in (
        lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options),
        lambda: tfshard.plan(mlp(), {"batch": 4}, **options),
    ):
        with pytest.raises(StrategyError, match=message):
            function()


def test_a_pipeline_is_refused():
    with pytest.raises(StrategyError, match="gather_dtype does not work with a pipeline axis"):
        tfshard.ShardedStrategy(tfshard.create_mesh(pipe=2, batch=2, roles={"pipe": "pipeline"}), gather_dtype="int8")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("source", "target"), [("int8", None), (None, "int8")])
def test_checkpoints_hold_exact_weights_for_any_gather_dtype(source, target, tmp_path):
    model, _ = compiled(Case(analyzer=GROUPS), source)
    model.train_on_batch(X, Y)
    tfshard.CheckpointManager(tmp_path).save(model, 1)
    saved = weights_of(model)
    other, _ = compiled(Case(analyzer=ALONE, mesh={"batch": 2}), target)
    tfshard.CheckpointManager(tmp_path).restore(other)
    for path, value in weights_of(other).items():
        np.testing.assert_array_equal(value, saved[path], err_msg=path)
