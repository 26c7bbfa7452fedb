"""Updates run one after the other and free the replaced values: the peak of an update, and parity with one device.

tests/storage/test_optimizers.py trains all optimizers with ordered updates of any size.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.devices import merges
from tfshard.storage import late_slices, passes, slot_reads, update_order
from tfshard.storage.graph_edits import ancestors

MEBI = 1 << 20
WIDTH, NARROW, LAYERS = 1024, 256, 4
X = np.random.RandomState(0).normal(size=(16, WIDTH)).astype("float32")


def build(width=WIDTH):
    """Return kernels of 4 MiB, with small activations."""
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((width,)), *hidden])


def strategy(stage, mesh=None, threshold=32 * MEBI):
    analyzer = tfshard.ParameterAnalyzer(group_threshold_bytes=threshold)
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(mesh or {"batch": 4})), zero_stage=stage, analyzer=analyzer)


def adam():
    return keras.optimizers.Adam(1e-3)


def profile(stage):
    """Return the memory that a step of a one-group model adds on a device, as a multiple of the variables' bytes."""
    model = tfshard.as_distributed(build())
    chosen = strategy(stage)
    model.compile(adam(), "mse", strategy=chosen)
    for _ in range(2):
        model.train_on_batch(X, X)
    (group,) = {row.group for row in chosen.report(model).variables if row.kind == "parameter" and row.shape}
    assert group is not None, "premise"
    peaks = [tfshard.profile_step(model, (X, X)).peak for _ in range(3)]
    if peaks[0] is None:
        pytest.skip("This TensorFlow's CPU allocator does not report what it holds (no oneDNN).")
    # The thread that ends a reduction frees the reduced tensor when it next runs.
    return min(each.device_added for each in peaks) / (4 * model.count_params())


@pytest.mark.sweep(1)
@pytest.mark.on_cpu("the trace of their allocator")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_holds_gradients_and_what_they_were_joined_in(stage):
    """A step holds gradients, cut out of a buffer of the same size. The update adds only one new slot at a time."""
    assert 1.9 < profile(stage) < 2.2


def written(stage, mesh=None):
    """Return the writes of a step with ungrouped kernels.

    For each: the storage, its new value, and the uses that read the value from the storage.
    """
    seen = []
    original = slot_reads.takers_of

    def noting(storage, made, value):
        seen.append((storage, made, original(storage, made, value)))
        return seen[-1][-1]

    model = tfshard.as_distributed(build())
    model.compile(adam(), "mse", strategy=strategy(stage, mesh=mesh, threshold=1 << 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_reads, "takers_of", noting)
        model.train_on_batch(X, X)
    return seen


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_uses_a_new_slot_takes_it_from_the_slot(stage):
    slots = [each for each in written(stage) if each[-1]]
    assert len(slots) == 2 * LAYERS
    for _, made, users in slots:
        (read,) = {user.tensor.op for user in users}
        assert read.type == "ReadVariableOp"
        (write,) = (each for each in read.control_inputs if each.type == "AssignVariableOp")
        handle, value = read.inputs[0].op, write.inputs[1]
        # Otherwise DTensor would put the read before the write.
        assert handle is value.op and handle.type == "IdentityN"
        assert _depends(value, made)


@pytest.mark.parametrize("devices", [1, 4])
def test_updates_of_gradients_that_come_at_once_are_one_after_the_other(devices):
    kernels = [made for storage, made, users in written(0, {"batch": devices}) if not users and made.shape.rank == 2]
    assert len(kernels) == LAYERS
    for earlier, later in itertools.pairwise(kernels):
        assert _depends(later, earlier) == (devices > 1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "cut"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_part_of_a_variable_is_cut_when_there_is_its_gradient(stage, cut):
    """At stage 3 the storage holds shards already, and at stage 0 the update takes full variables."""
    waiting = []
    original = late_slices.wait_for_gradient

    def noting(stored, gradient):
        before = stored.consumers()
        original(stored, gradient)
        if 4 * gradient.shape.num_elements() >= update_order.LEAST_BYTES:
            waiting.append(all(_depends(each.inputs[0], gradient) for each in before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_slices, "wait_for_gradient", noting)
        written(stage)
    assert waiting == [True] * (LAYERS if cut else 0)


def _depends(tensor, on):
    return on.op in ancestors([tensor])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("threshold", [32 * MEBI, 1 << 16])
def test_training_is_that_of_one_device(stage, threshold):
    def train(chosen=None):
        return parity.train(build, [(X, X)], optimizer=adam, loss="mse", strategy=chosen, steps=4)

    assert update_order.LEAST_BYTES <= WIDTH * WIDTH, "premise: a quarter of a kernel, too, is large enough"
    parity.assert_same(train(strategy(stage, threshold=threshold)), train(), rtol=1e-5, atol=2e-6)


def test_two_optimizers_in_one_step_of_which_one_uses_what_the_other_has_made():
    """As in adversarial training: the second gradients depend on the first update."""

    def step(first, second, optimizers, x):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(second(first(x)) - x))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def models():
        keras.utils.set_random_seed(0)
        return build(), build()

    plain = models()
    optimizers = adam(), adam()
    losses = [float(step(*plain, optimizers, tf.constant(X))) for _ in range(3)]
    chosen = strategy(0)
    with chosen.scope():
        sharded, optimizers = models(), (adam(), adam())
        for model, optimizer in zip(sharded, optimizers, strict=True):
            optimizer.build(model.trainable_variables)

    @tf.function
    def run(x):
        return step(*sharded, optimizers, x)

    for expected, batch in zip(losses, chosen.experimental_distribute_dataset(dataset()), strict=True):
        np.testing.assert_allclose(float(chosen.run(run, args=(batch,))), expected, rtol=1e-5)
    for model, reference in zip(sharded, plain, strict=True):
        for variable, other in zip(model.trainable_variables, reference.trainable_variables, strict=True):
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-4, atol=3e-6)


def dataset():
    return tf.data.Dataset.from_tensors(X).repeat(3)


# The variables of the first and the second optimizer, among four kernels and four biases.
PARTS = {
    "halves": (slice(0, 4), slice(4, 8)),
    "every second variable": (slice(0, 8, 2), slice(1, 8, 2)),
    "some variables twice": (slice(0, 6), slice(2, 8)),
    "all variables twice": (slice(0, 8), slice(0, 8)),
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "clipped": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, use_ema=True),
}


class TwoOptimizers(keras.Model):
    """Trains parts of its variables with one optimizer, and parts with another one."""

    def __init__(self, parts, optimizers, tapes):
        super().__init__()
        self.body, self.parts, self.tapes = build(NARROW), parts, tapes
        self.first, self.second = optimizers

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        variables = self.body.trainable_variables
        for number, (part, optimizer) in enumerate(zip(self.parts, (self.first, self.second), strict=True)):
            if number < self.tapes:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self.body(data[0]) - data[1]))
                gradients = tape.gradient(loss, variables)
            optimizer.apply(gradients[part], variables[part])
        return {"loss": loss}


def train_two(parts, optimizers, tapes, chosen=None):
    """Return the losses of three steps, and the weights and slots behind them."""
    keras.utils.set_random_seed(0)
    model = TwoOptimizers(PARTS[parts], [OPTIMIZERS[each]() for each in optimizers], tapes)
    model.compile(jit_compile=False, **({} if chosen is None else {"strategy": chosen}))
    x = X[:, :NARROW]
    losses = [float(model.train_on_batch(x, x, return_dict=True)["loss"]) for _ in range(3)]
    return losses, [np.array(v) for v in (*model.variables, *model.first.variables, *model.second.variables)]


BOTH = [("adam", "adam"), ("clipped", "averaged"), ("averaged", "clipped")]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tapes", [1, 2])
@pytest.mark.parametrize("optimizers", BOTH, ids="-".join)
@pytest.mark.parametrize("parts", PARTS)
def test_two_optimizers_with_slots_train_one_model_as_on_one_device(parts, optimizers, tapes):
    """With one tape both optimizers use gradients of one forward pass; with two, the second sees the first update."""
    assert_two_match_one_device(0, parts, optimizers, tapes)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tapes", [1, 2])
@pytest.mark.parametrize("optimizers", BOTH, ids="-".join)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_optimizers_with_sharded_slots_train_one_model_as_on_one_device(stage, parts, optimizers, tapes):
    assert_two_match_one_device(stage, parts, optimizers, tapes)


def assert_two_match_one_device(stage, parts, optimizers, tapes):
    chosen = strategy(stage, threshold=1 << 16)
    assert merges.happen(chosen.mesh) and update_order.LEAST_BYTES <= 4 * NARROW * NARROW, "premise"
    losses, values = train_two(parts, optimizers, tapes, chosen)
    expected, plain = train_two(parts, optimizers, tapes)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for value, reference in zip(values, plain, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-3, atol=1e-5)


def test_updates_of_each_of_two_optimizers_are_one_after_the_other(monkeypatch):
    orders = []
    original = update_order.order_updates

    def noting(record, barrier):
        original(record, barrier)
        large = [each.storage for each in record.updates if each.storage.updated_bytes >= update_order.LEAST_BYTES]
        orders.append([record.updated[storage] for storage in large])

    monkeypatch.setattr(passes, "PASSES", tuple(noting if each is original else each for each in passes.PASSES))
    train_two("halves", ("adam", "adam"), 1, strategy(0, threshold=1 << 16))
    (order,) = orders
    assert len(order) == LAYERS, "premise: a kernel for each layer"
    assert _depends(order[1], order[0]) and _depends(order[3], order[2])


def test_nothing_waits_where_reductions_are_not_merged(monkeypatch):
    mesh = tfshard.create_mesh(batch=4)
    monkeypatch.delenv(merges.SWITCH, raising=False)
    assert merges.happen(mesh) and not merges.happen(tfshard.create_mesh(model=4))
    monkeypatch.setenv(merges.SWITCH, "1")
    assert not merges.happen(mesh)
