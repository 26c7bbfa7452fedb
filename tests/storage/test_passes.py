"""Test each pass alone, on a small graph and a hand-written record."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.layouts.config import ReshardPolicy
from tfshard.storage import passes
from tfshard.storage.barrier import Barrier, write_then_read
from tfshard.storage.graph_edits import ancestors
from tfshard.storage.late_slices import slice_with_gradient
from tfshard.storage.recomputing import BlockRecorder, recompute_blocks
from tfshard.storage.slot_reads import read_slots_after_write
from tfshard.storage.small_copies import hold_small_copies
from tfshard.storage.step_record import JointUpdate, PendingGradient, SlicedRead, StepRecord, StoredRead
from tfshard.storage.unshard_schedule import schedule_unshards
from tfshard.storage.update_order import order_updates

SIZE = 512  # A matrix of a MiB.


@dataclasses.dataclass(eq=False, kw_only=True)
class FakeStorage:
    """A storage of one variable, as far as passes know it."""

    mesh: object
    variable: tf.Variable
    axes: tuple[str | None, ...] = (None, None)
    is_group: bool = False
    is_stored_as_updated: bool = True
    paths: tuple[str, ...] = ("variable",)
    name: str = "variable"
    written: list = dataclasses.field(default_factory=list)

    @property
    def format(self):
        return types.SimpleNamespace(
            storage=self.axes,
            is_gathered=any(self.axes),
            gathered_elements=self.variable.shape.num_elements(),
            codes=None,
        )

    @property
    def updated_bytes(self):
        return self.variable.shape.num_elements() * 4

    def read(self):
        return tf.raw_ops.ReadVariableOp(resource=self.variable.handle, dtype=tf.float32)

    def write_stored(self, value, takers=()):
        self.written.append((value, takers))
        self.variable.assign(value)


@pytest.fixture
def mesh():
    return tfshard.create_mesh(batch=4)


@pytest.fixture
def storages(mesh):
    """Makes storages of matrices."""
    random = np.random.RandomState(0)

    def make(count=1, size=SIZE, **options):
        variables = [tf.Variable(random.normal(size=(size, size)).astype("float32")) for _ in range(count)]
        return [FakeStorage(mesh=mesh, variable=each, **options) for each in variables]

    return make


@pytest.fixture
def barrier():
    number = tf.Variable(0.0)
    return Barrier(read_token=lambda: tf.raw_ops.ReadVariableOp(resource=number.handle, dtype=tf.float32))


def depends(tensor, on):
    return on.op in ancestors([tensor])


def traced(build):
    """Calls a function in a graph, and returns its result."""
    found = []

    @tf.function(autograph=False)
    def function():
        found.append(build(tf.compat.v1.get_default_graph()))

    function.get_concrete_function()
    return found[0]


def test_recompute_blocks_gives_the_backward_pass_copies_that_wait_for_the_gradient(storages, barrier):
    (kernel,) = storages()

    def build(graph):
        record = StepRecord(graph=graph, reshard=ReshardPolicy())
        with tf.GradientTape() as tape:
            read = kernel.read()
            tape.watch(read)
            with BlockRecorder(graph, record.blocks).block("block", frozenset()):
                hidden = tf.exp(tf.matmul(tf.compat.v1.placeholder(tf.float32, (2, SIZE)), read))
                out = tf.tanh(hidden)
            loss = tf.reduce_sum(tf.square(out))
        gradient = tape.gradient(loss, read)
        record.reads.append(StoredRead(storage=kernel, tensor=read))
        before = len(graph.get_operations())
        recompute_blocks(record, barrier)
        return record, before, hidden, gradient

    record, before, hidden, gradient = traced(build)
    assert len(record.blocks) == 1
    assert len(record.operations) > before
    assert not any("gradient_tape/" in user.name for user in hidden.consumers()), "the backward pass takes a copy"
    (copy,) = (each for each in ancestors([gradient]) if each.type == "Exp" and each is not hidden.op)
    assert any(each.type == "IdentityN" for each in ancestors(copy.outputs)), "the copy waits"
    assert barrier.tokens


def test_schedule_unshards_gathers_again_and_holds_the_backward_pass_back(storages, barrier):
    kernels = storages(3, axes=("batch", None))

    def build(graph):
        record = StepRecord(graph=graph, reshard=ReshardPolicy(prefetch=0))
        reads = [kernel.read() for kernel in kernels]
        used = [tf.identity(read) for read in reads]
        x = tf.compat.v1.placeholder(tf.float32, (2, SIZE))
        first = tf.matmul(x, used[0])
        second = tf.matmul(first, used[1])
        third = tf.matmul(second, used[2])
        back = tf.matmul(third, used[2], transpose_b=True)
        last = tf.matmul(back, used[1], transpose_b=True)
        for kernel, read in zip(kernels, reads, strict=True):
            record.reads.append(StoredRead(storage=kernel, tensor=read))
        gradient = tf.matmul(second, third, transpose_a=True)
        record.gradients.append(PendingGradient(storage=kernels[2], tensor=gradient, is_scattered=True))
        record.values[kernels[2]] = reads[2] - gradient
        schedule_unshards(record, barrier)
        return record, used, second, last

    record, used, second, last = traced(build)
    del record
    assert all(each is not used[1] for each in second.op.inputs), "the second use has a gather of its own"
    kernel_of = {each.type for each in ancestors([last.op.inputs[1]])}
    assert "IdentityN" in kernel_of, "the gather for the backward pass waits"


def test_slice_with_gradient_lets_a_slice_wait(storages, barrier):
    (kernel,) = storages()

    def build(graph):
        record = StepRecord(graph=graph)
        read = kernel.read()
        cut = read[: SIZE // 2]
        gradient = tf.exp(tf.ones((SIZE, SIZE)))
        record.sliced_reads.append(SlicedRead(stored=read, gradient=gradient))
        updated = cut - gradient[: SIZE // 2]
        assert not depends(cut, gradient), "premise"
        slice_with_gradient(record, barrier)
        return cut, gradient, updated

    cut, gradient, updated = traced(build)
    assert depends(cut, gradient) and depends(updated, gradient)
    assert not barrier.tokens, "the read of the variable itself is the first input"


def test_order_updates_lets_each_update_wait_for_all_gradients_and_the_update_before(storages, barrier):
    kernels = storages(2)

    def build(graph):
        record = StepRecord(graph=graph)
        gradients = [tf.exp(tf.fill((SIZE, SIZE), float(n))) for n in range(2)]
        since = len(graph.get_operations())
        for kernel, gradient in zip(kernels, gradients, strict=True):
            record.updates.append(JointUpdate(storage=kernel, gradient=gradient, since=since))
            record.updated[kernel] = record.values[kernel] = kernel.read() - gradient
        assert not depends(record.values[kernels[0]], gradients[1]), "premise"
        order_updates(record, barrier)
        return record, gradients

    record, gradients = traced(build)
    first, second = (record.values[kernel] for kernel in kernels)
    assert depends(first, gradients[1])
    subtraction = next(each for each in ancestors([first]) if each.type == "Sub")
    assert subtraction in ancestors([second])
    assert record.updated[kernels[0]] is first


@pytest.mark.parametrize("is_stored_as_updated", [True, False])
def test_read_slots_after_write_finds_the_operations_that_use_a_new_value(storages, barrier, is_stored_as_updated):
    (slot,) = storages(is_stored_as_updated=is_stored_as_updated, axes=("batch", None))

    def build(graph):
        record = StepRecord(graph=graph)
        new = slot.read() * 2
        used = tf.sqrt(new)
        record.updated[slot], record.values[slot] = new, tf.identity(new)
        read_slots_after_write(record, barrier)
        return record, used

    record, used = traced(build)
    assert [each.operation for each in record.takers[slot]] == ([used.op] if is_stored_as_updated else [])


def test_hold_small_copies_lets_a_counter_wait_for_a_large_value(storages, barrier, mesh):
    (kernel,) = storages(axes=("batch", None))
    counter = FakeStorage(mesh=mesh, variable=tf.Variable(0.0), axes=())

    def build(graph):
        record = StepRecord(graph=graph, tokens=barrier.tokens)
        record.values = {counter: tf.constant(1.0) + 1, kernel: tf.exp(tf.ones((SIZE, SIZE)))}
        large = record.values[kernel]
        hold_small_copies(record, barrier)
        return record, large

    record, large = traced(build)
    assert depends(record.values[counter], large)
    assert any(each.type == "AssignVariableOp" for each in record.graph.get_operations()), "tokens are used"


def test_hold_small_copies_returns_the_tokens_of_a_step_that_writes_nothing(barrier):
    def build(graph):
        barrier.tie(tf.ones(()))
        record = StepRecord(graph=graph, tokens=barrier.tokens)
        hold_small_copies(record, barrier)
        return record

    assert traced(build).token is not None


def test_write_assigns_each_storage_once(storages, barrier):
    kernels = storages(2)
    record = StepRecord(graph=None, values={kernel: tf.ones((SIZE, SIZE)) for kernel in kernels})
    passes.write(record, barrier)
    assert [len(kernel.written) for kernel in kernels] == [1, 1]
    np.testing.assert_array_equal(kernels[0].variable, np.ones((SIZE, SIZE)))


def test_a_microbatch_runs_the_first_passes_of_a_step():
    assert passes.PASSES[: len(passes.MICROBATCH_PASSES)] == passes.MICROBATCH_PASSES


def test_an_eager_step_runs_all_passes_and_adds_no_barrier(storages):
    (kernel,) = storages()
    record = StepRecord(graph=None, reshard=ReshardPolicy())
    record.values, record.updated = {kernel: tf.ones((SIZE, SIZE))}, {kernel: tf.ones((SIZE, SIZE))}
    passes.run(passes.PASSES, record)
    assert len(kernel.written) == 1 and not record.tokens


# --- barrier.py ----------------------------------------------------------------------------------------


def test_a_barrier_ties_tensors_behind_the_read_of_a_token(barrier):
    def build(graph):
        del graph
        a, b = tf.exp(tf.ones(())), tf.exp(tf.zeros(()))
        tied = barrier.tie(a, b)
        return a, b, tied

    a, b, (tied, other) = traced(build)
    assert tied.op is other.op and tied.op.type == "IdentityN"
    assert tied.op.inputs[0].op.type == "ReadVariableOp", "Grappler keeps it (barrier.py)"
    assert depends(tied, b) and depends(other, a)
    assert [each.op for each in barrier.tokens] == [tied.op]


def test_a_read_behind_a_write_gives_the_new_value_and_takes_its_handle_through_a_barrier():
    variable = tf.Variable(1.0)

    @tf.function
    def step():
        read = write_then_read(variable, variable.read_value() * 3)
        assert read.op.inputs[0].op.type == "IdentityN"
        return read

    assert float(step()) == float(variable) == 3.0
