"""The layouts of gradients in an optimizer, their bytes on devices, and their rows in the report."""

import functools
import pathlib
import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import parity
import tfshard
from tfshard import _private
from tfshard.devices import transfer
from tfshard.storage import gradient

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
# Larger variables stand alone.
ALONE = tfshard.ParameterAnalyzer(group_threshold_bytes=256)
RS = np.random.RandomState(0)
X, Y = RS.normal(size=(24, 16)).astype("float32"), RS.normal(size=(24, 3)).astype("float32")
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]


def build() -> keras.Model:
    """Return two kernels that stand alone, and small variables. The batch axis divides a dim of the first kernel."""
    inputs = keras.Input((16,))
    x = keras.layers.Dense(18, activation="tanh", name="cut")(inputs)
    x = keras.layers.Dense(5, activation="tanh", name="odd")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="small")(x))


def strategy(mesh: str, stage: int) -> tfshard.ShardedStrategy:
    layout_map = tfshard.LayoutMap()
    if "model" in mesh:
        layout_map.column("cut")
        layout_map.row("odd")
        layout_map.replicated(".*")
    return tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage, analyzer=ALONE)


class Watched(keras.optimizers.Adam):
    """Keeps the gradients of the backward pass, and the gradients that the update gets."""

    tfshard_elementwise = True

    def apply(self, grads, trainable_variables=None):
        self.came = dict(zip((v.path for v in trainable_variables), grads, strict=True))
        self.updates = {}
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        self.updates[variable.path] = gradient
        return super().update_step(gradient, variable, learning_rate)


def watch_step(model: keras.Model, chosen: tfshard.ShardedStrategy) -> tuple[dict, dict]:
    """Train a step. Returns its gradients on the devices, from the backward pass and in the update."""

    def step(data):
        model.train_step(data)
        return model.optimizer.came, model.optimizer.updates

    @tf.function(autograph=False)
    def traced(data):
        with chosen.extended.results_stay_sharded():
            return chosen.run(step, args=(data,))

    (batch,) = chosen.experimental_distribute_dataset(tf.data.Dataset.from_tensors(BATCHES[0]))
    return traced(batch)


def piece(tensor: tf.Tensor) -> tuple[int, ...]:
    """Return the shape of the local shards."""
    (shape,) = {tuple(part.shape) for part in dtensor.unpack(tensor)}
    return shape


# The local shard of each ungrouped kernel's gradient: full over the batch axis, and cut.
WHOLE = {"batch4": {"cut": (16, 18), "odd": (18, 5)}, "batch2_model2": {"cut": (16, 9), "odd": (9, 5)}}
CUT = {"batch4": {"cut": (4, 18), "odd": (18, 5)}, "batch2_model2": {"cut": (8, 9), "odd": (9, 5)}}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_come_in_shards_from_stage_2_on_and_the_report_measures_it(mesh, stage):
    assert len(tf.config.list_logical_devices("CPU")) >= 4
    chosen, model = strategy(mesh, stage), tfshard.as_distributed(build())
    model.compile(Watched(1e-3), "mse", strategy=chosen)
    before = chosen.report(model)
    came, updates = watch_step(model, chosen)
    report = chosen.report(model)
    rows = {row.path: row for row in report.variables}
    assert rows["cut/kernel"].group is None and rows["odd/kernel"].group is None
    grouped = [path for path in came if rows[path].group is not None]
    assert len(grouped) >= 3

    # From the backward pass.
    expected = (CUT if stage >= 2 else WHOLE)[mesh]
    assert {name: piece(came[f"{name}/kernel"]) for name in expected} == expected
    assert all("batch" not in dtensor.fetch_layout(came[path]).sharding_specs for path in grouped)

    # In the update: a group, and a padded kernel, as a matrix with a row for each device.
    size = MESHES[mesh]["batch"]
    rests = updates["cut/kernel"]
    assert piece(rests) == (CUT if stage >= 1 else WHOLE)[mesh]["cut"]
    packed = {path: tensor for path, tensor in updates.items() if path != "cut/kernel"}
    assert packed.keys() & set(grouped), "premise: a group was updated"
    for path, tensor in packed.items():
        if tuple(tensor.shape) != rows[path].shape:
            assert tensor.shape[-2] == size and piece(tensor)[-2] == (1 if stage >= 1 else size), path

    # Parameters and slots.
    slots = [row for row in report.variables if row.kind == "slot" and row.shape]
    assert {"batch" in row.storage_layout for row in slots} == {stage >= 1}
    assert {"batch" in rows[path].storage_layout for path in came} == {stage == 3}

    # The report matches the devices.
    held = {path: 4 * int(np.prod(piece(tensor))) for path, tensor in came.items()}
    assert {path: rows[path].gradient_bytes_per_device for path in came} == held
    assert report.gradient_bytes_per_device == sum(held.values())
    assert report.gradients_reduce_scattered is (stage >= 2)
    for path, tensor in came.items():
        specs = dtensor.fetch_layout(tensor).sharding_specs
        assert rows[path].gradient_layout == tuple(None if axis == dtensor.UNSHARDED else axis for axis in specs)

    # Before the step, the report has no measurement.
    assert before.gradients_reduce_scattered is None and before.gradient_bytes_per_device is None
    assert before.to_dict()["totals"]["gradient"]["bytes_per_device"] is None
    assert "no step has run yet" in str(before) and "no step has run yet" not in str(report)
    assert ("A step reduce-scatters gradients" in str(report)) == (stage >= 2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["clipped", "scaled", "accumulated", "eager"])
def test_the_report_follows_a_gradient_to_where_it_is_used(way):
    adam = {
        "clipped": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
        "accumulated": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
        "eager": lambda: keras.optimizers.Adam(1e-3),
    }
    chosen, model = strategy("batch4", 2), tfshard.as_distributed(build())
    model.compile(adam[way](), "mse", strategy=chosen, run_eagerly=way == "eager")
    model.train_on_batch(*BATCHES[0])
    rows = {row.path: row for row in chosen.report(model).variables}
    assert rows["cut/kernel"].gradient_layout == ("batch", None)
    assert rows["odd/kernel"].gradient_layout == (None, None)
    assert rows["small/bias"].gradient_layout == (None,)


class Waits(keras.Sequential):
    """No device updates before all devices have all gradients."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        # Includes the loss, which may be reduced in one buffer with the gradients.
        norm = loss + tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
        with tf.name_scope("all_have_come"):
            # Each device adds its rows, so the sum waits for all devices.
            factor = tf.math.rsqrt(1.0 + tf.reduce_sum(tf.square(x) * norm))
        self.optimizer.apply([gradient * factor for gradient in gradients], self.trainable_variables)
        return {"loss": loss}


def live_bytes(model: keras.Model, batch: tuple, operation: str) -> int | None:
    """Return the bytes that a step has allocated and not freed, on all devices, when an operation first starts.

    Excludes local shards of variables that are read. Returns None if the allocator does not report (oneDNN's does, for
    blocks from 256 KiB on).
    """
    for _ in range(3):  # The second step instantiates its functions again.
        model.train_on_batch(*batch)
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)):
            model.train_on_batch(*batch)
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        trace = _private.read_trace(file.read_bytes())
    if not any(event.name == "MemoryAllocation" for event in trace):
        return None
    live: dict[int, int] = {}
    for event in trace:
        if event.name == "MemoryAllocation" and "ReadVariableOp" not in event.stats.get("tf_op", ""):
            live[event.stats["addr"]] = event.stats["requested_bytes"]
        elif event.name == "MemoryDeallocation":
            live.pop(event.stats["addr"], None)
        elif operation in event.name:
            return sum(live.values())
    raise AssertionError(f"The step did not run {operation}.")


WIDTH = 512
# Bytes of the gradients on a device, in kernels, by mesh and stage.
LIVE = {
    "batch4": {0: 2, 1: 2, 2: 1 / 2, 3: 1 / 2},
    "batch2_model2": {1: 1, 2: 1 / 2},
}


@pytest.mark.sweep(1)
@pytest.mark.on_cpu("the trace of their allocator")
@pytest.mark.parametrize("mesh", LIVE)
def test_devices_hold_shards_of_gradients_from_stage_2_on(mesh):
    kernel = 4 * WIDTH * WIDTH
    x = RS.normal(size=(8, WIDTH)).astype("float32")
    for stage, kernels in LIVE[mesh].items():
        keras.backend.clear_session()
        layout_map = tfshard.LayoutMap()
        if "model" in mesh:
            layout_map.column(".*up")
            layout_map.row(".*down")
        chosen = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage)
        layers = [keras.layers.Dense(WIDTH, use_bias=False, name=name) for name in ("up", "down")]
        model = tfshard.as_distributed(Waits([keras.Input((WIDTH,)), *layers]))
        model.compile("sgd", "mse", strategy=chosen)
        found = live_bytes(model, (x, x), "all_have_come/Rsqrt")
        if found is None:
            pytest.skip("This TensorFlow's CPU allocator does not report what it holds (no oneDNN).")
        report = chosen.report(model)
        assert report.bytes_on_one_device("parameter") == 2 * kernel
        assert report.gradient_bytes_per_device == kernels * kernel, stage
        # No other result of the step is alive then. Four devices share an allocator.
        assert found == pytest.approx(4 * kernels * kernel, rel=0.02), stage


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)


@functools.cache
def accumulated_on_one_device(steps: int) -> parity.Run:
    return parity.train(build, BATCHES, optimizer=accumulating, loss="mse", steps=steps)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("mesh", "stage"), [("batch4", 2), ("batch2_model2", 3)])
def test_accumulated_gradients_are_sharded_and_match_one_device(mesh, stage):
    # Includes a padded kernel, for which the accumulated gradient is stored in another form.
    run = parity.train(build, BATCHES, optimizer=accumulating, loss="mse", strategy=strategy(mesh, stage), steps=6)
    accumulators = run.model.optimizer._accumulated_gradients
    assert len(accumulators) == 6
    assert all("batch" in variable.value.layout.storage for variable in accumulators)
    start, one = accumulated_on_one_device(1), accumulated_on_one_device(6)  # The first step only adds.
    moved = [np.abs(one.weights[path] - start.weights[path]).max() for path in one.weights]
    assert min(moved) > 100 * 2e-5
    parity.assert_same(run, one, rtol=0, atol=2e-5)


def test_accumulated_gradients_are_gathered_by_no_step():
    kernel = 4 * WIDTH * WIDTH
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=2)
    model = tfshard.as_distributed(keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)]))
    model.compile(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=2), "mse", strategy=chosen)
    x = np.ones((8, WIDTH), np.float32)
    # The profile of the second of two steps contains an update. After one more step, the profile only accumulates.
    updates = tfshard.profile_step(model, (x, x))
    model.train_on_batch(x, x)
    adds = tfshard.profile_step(model, (x, x))
    assert updates.bytes("all-gather") == kernel, "the new parameter"
    assert adds.count("all-gather") == 0


AFTER_A_PRODUCT = {
    "transposed": ((8, 12), 0, lambda x: tf.transpose(x, (1, 0)), (12, 8)),
    "transposed by an inverse": ((8, 12), 0, lambda x: tf.transpose(x, tf.math.invert_permutation((1, 0))), (12, 8)),
    "cut along the last dim": ((8, 12), 1, lambda x: tf.transpose(x, (1, 0)), (12, 8)),
    "cast, then transposed": ((8, 12), 0, lambda x: tf.transpose(tf.cast(x, tf.float64)), (12, 8)),
    "transposed, then made three": ((8, 12), 0, lambda x: tf.reshape(tf.transpose(x), (12, 2, 4)), (12, 2, 4)),
    "made three, then transposed": (
        (8, 12), 2, lambda x: tf.transpose(tf.reshape(x, (8, 2, 6)), tf.math.invert_permutation((2, 1, 0))), (6, 2, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AFTER_A_PRODUCT)
def test_what_comes_after_a_product_is_done_on_the_shards_of_its_gradient(case):
    """DTensor then reduce-scatters the gradient, as for a table that is transposed for the logits."""
    shape, dim, rearrange, made = AFTER_A_PRODUCT[case]
    mesh = tfshard.create_mesh(batch=4)
    left, right = RS.normal(size=(16, shape[0])).astype("float32"), RS.normal(size=(16, shape[1])).astype("float32")
    traced = {}

    @tf.function(autograph=False)
    def run(x, y):
        product = tf.matmul(x, y, transpose_a=True)
        backward = tuple("batch" if each == dim else None for each in range(len(made)))
        shards = gradient.scatter(rearrange(product), forward=(None,) * len(made), backward=backward, mesh=mesh)
        traced["users"] = {each.type for each in product.consumers()}
        return shards

    found = run(*(transfer.host_to_mesh(each, ("batch", None), mesh) for each in (left, right)))
    assert piece(found) == tuple(size // 4 if each == dim else size for each, size in enumerate(made))
    np.testing.assert_allclose(transfer.to_host(found), rearrange(left.T @ right), rtol=1e-5)
    # TensorFlow removes the unused rearrangement of the full tensor.
    assert "Relayout" in traced["users"]


# --- Sparse gradients of embeddings ---------------------------------------------------------------------


def embedding_model(name: str, *, tied: bool = False) -> keras.Model:
    ids = keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(12, 8, name=name)
    hidden = table(ids)
    logits = keras.layers.Lambda(lambda h: keras.ops.matmul(h, keras.ops.transpose(table.embeddings)))(hidden)
    return keras.Model(ids, logits if tied else keras.layers.Dense(3)(hidden))


MODEL_MESH = {"batch": 2, "model": 2}
BY_ROWS = tfshard.LayoutMap()
BY_ROWS[".*embeddings"] = ("model", None)
BY_ROWS.replicated(".*", optional=True)


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("default:Optimizer .* updates embedding:UserWarning")
@pytest.mark.parametrize(
    ("name", "optimizer", "options", "warns"),
    [
        ("adam", lambda: keras.optimizers.Adam(0.01), {}, True),
        ("grouped", lambda: keras.optimizers.RMSprop(0.01), {"analyzer": tfshard.ParameterAnalyzer()}, True),
        ("clipped", lambda: keras.optimizers.SGD(0.01, global_clipnorm=1.0), {}, True),
        ("sgd", lambda: keras.optimizers.SGD(0.01), {}, False),
        ("lion", lambda: keras.optimizers.Lion(0.01), {}, False),
        ("tied", lambda: keras.optimizers.Adam(0.01), {}, False),
        ("of_tables", lambda: keras.optimizers.Adam(0.01), {"tables": "of_tables/embeddings"}, False),
        ("by_rows", lambda: keras.optimizers.Adam(0.01), {"mesh": MODEL_MESH, "layout_map": BY_ROWS}, True),
        ("by_rows_tied", lambda: keras.optimizers.Adam(0.01), {"mesh": MODEL_MESH, "layout_map": BY_ROWS}, False),
    ],
)
def test_an_embedding_that_keras_would_update_differently_is_warned_of_once(name, optimizer, options, warns):
    model = embedding_model(name, tied="tied" in name)
    options = {"analyzer": None, **options}
    mesh = tfshard.create_mesh(**options.pop("mesh", {"batch": 4}))
    model.compile(optimizer(), "mse", strategy=tfshard.ShardedStrategy(mesh, **options))
    x = np.tile(np.arange(4, dtype="int32"), (8, 1))  # Each row occurs eight times.
    y = np.zeros((8, *model.output_shape[1:]), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    found = [each for each in caught if issubclass(each.category, tfshard.errors.NumericsWarning)]
    assert len(found) == warns
    if warns:
        assert f"embedding '{name}/embeddings'" in str(found[0].message)
        assert found[0].filename == __file__


def test_the_remedy_of_that_warning_gives_the_numbers_of_keras():
    def history(**strategy):
        keras.utils.set_random_seed(0)
        model = embedding_model("remedy")
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False, **strategy)
        x = np.tile(np.arange(4, dtype="int32"), (8, 1))
        y = np.arange(8 * 4 * 3, dtype="float32").reshape(8, 4, 3) / 50
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        return model.get_weights()

    mesh = tfshard.create_mesh(batch=4)
    plain = history()
    remedied = history(strategy=tfshard.ShardedStrategy(mesh, tables="remedy/embeddings"))
    dense = history(strategy=tfshard.ShardedStrategy(mesh))
    for ours, theirs in zip(remedied, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(dense[0] - plain[0]).max() > 1e-5, "premise: by a dense gradient the rows differ"
