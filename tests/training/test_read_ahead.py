"""Batches that a thread copies to the devices ahead of the step, in the order of plain Keras, and not too many."""

import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import batching, transfer
from tfshard.training import datasets
from tfshard.training.read_ahead import ReadAhead

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(64, 6)).astype("float32"), RS.normal(size=(64, 1)).astype("float32")
pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed, but will be ignored:UserWarning")
SAMPLES = tf.data.Dataset.from_tensor_slices((X, Y))


def strategy(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


def ahead(depth: int) -> tf.distribute.InputOptions:
    return tf.distribute.InputOptions(experimental_per_replica_buffer_size=depth)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tfshard-input"]


def assert_no_reader() -> None:
    end = time.monotonic() + 20
    while readers() and time.monotonic() < end:
        time.sleep(0.01)
    assert not readers()


@pytest.fixture
def prefetched(monkeypatch):
    """Copy one batch ahead on CPU devices, too."""
    monkeypatch.setitem(datasets.PREFETCH, "CPU", 1)


def compiled(sharded: bool, **options) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    if sharded:
        tfshard.as_distributed(model).compile(keras.optimizers.Adam(0.05), "mse", strategy=strategy(), **options)
    else:
        model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=False, **options)
    return model


# --- the thread


class Source:
    """Count calls, and fail or end at some."""

    def __init__(self, errors: dict[int, BaseException] | None = None):
        self.calls = 0
        self.errors = errors or {}

    def __call__(self) -> int:
        self.calls += 1
        if self.calls in self.errors:
            raise self.errors[self.calls]
        return self.calls


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_at_most_depth_of_them_wait(depth):
    source = Source()
    items = ReadAhead(source, depth)
    assert source.calls == 0
    for number in range(1, 8):
        assert items.peek() == items.take() == number
        assert source.calls <= number + depth
        assert items.waiting() == list(range(number + 1, number + 1 + depth))
        assert_no_reader()


def test_an_error_is_raised_where_its_item_is_taken_and_reading_goes_on_behind_it():
    error = ValueError("third")
    source = Source({3: error})
    items = ReadAhead(source, 4)
    assert items.take() == 1
    assert_no_reader()
    assert source.calls == 3, "nothing is read behind an error"
    assert items.take() == 2
    with pytest.raises(ValueError, match="third") as raised:
        items.take()
    assert raised.value is error
    assert "__call__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert items.take() == 4


def test_an_error_that_waits_is_raised_instead_of_the_items():
    items = ReadAhead(Source({2: ValueError("second")}), 1)
    assert items.take() == 1
    with pytest.raises(ValueError, match="second"):
        items.waiting()
    ended = ReadAhead(Source({2: StopIteration()}), 2)
    assert ended.take() == 1
    assert ended.waiting() == []


def test_a_closed_reader_keeps_nothing_and_reads_no_more_ahead():
    begun, goes_on = threading.Event(), threading.Event()
    source = Source()

    def slowly() -> int:
        if source.calls:
            begun.set()
            assert goes_on.wait(20)
        return source()

    items = ReadAhead(slowly, 2)
    assert items.take() == 1
    assert begun.wait(20)
    items.close()
    goes_on.set()
    assert items.waiting() == []
    assert_no_reader()
    assert (source.calls, items.take(), items.waiting()) == (2, 3, [])


# --- fit, evaluate, predict


@pytest.mark.usefixtures("prefetched")
@pytest.mark.parametrize("together", [1, 2])
def test_training_validation_and_prediction_match_one_device(together):
    found = []
    for sharded in (False, True):
        model = compiled(sharded, steps_per_execution=together)
        train, held_out = SAMPLES.take(48).shuffle(48, seed=3).batch(8), SAMPLES.skip(48).repeat().batch(8)
        history = model.fit(train, epochs=2, validation_data=held_out, validation_steps=2, verbose=0).history
        found.append(
            [*history["loss"], *history["val_loss"], model.evaluate(X, Y, batch_size=12, verbose=0),
             *model.predict(SAMPLES.map(lambda x, y: x).batch(12), verbose=0).ravel()]
        )  # fmt: skip
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert_no_reader()


class Pipeline:
    """A dataset that counts the batches that were read from it, and may fail at one."""

    def __init__(self, fails_at: int = -1):
        self.read = 0
        self.fails_at = fails_at
        specs = (tf.TensorSpec((8, 6)), tf.TensorSpec((8, 1)))
        options = tf.data.Options()
        options.autotune.enabled = options.experimental_optimization.inject_prefetch = False
        dataset = tf.data.Dataset.from_generator(self._batches, output_signature=specs)
        self.dataset = dataset.with_options(options)  # TensorFlow reads nothing ahead.

    def _batches(self):
        for start in range(0, 1 << 20, 8):
            if self.read == self.fails_at:
                raise ValueError("the pipeline failed")
            self.read += 1
            rows = start % 64
            yield X[rows : rows + 8], Y[rows : rows + 8]


class Watch(keras.callbacks.Callback):
    """Record how many batches were read before and after each step, and raise or stop after one."""

    def __init__(self, pipeline: Pipeline, stop_at: int = -1, error: BaseException | None = None):
        super().__init__()
        self.pipeline, self.stop_at, self.error = pipeline, stop_at, error
        self.most: list[int] = []
        self.iterator: datasets.ShardedIterator | None = None

    def on_train_batch_begin(self, batch, logs=None):
        self.most.append(self.pipeline.read)

    def on_train_batch_end(self, batch, logs=None):
        epochs = datasets.epochs_of(self.model)
        self.iterator = epochs._distributed_dataset.current
        self.iterator.read_ahead()  # Waits for the thread.
        self.most.append(self.pipeline.read)
        if len(self.most) == 2 * self.stop_at:
            if self.error is not None:
                raise self.error
            self.model.stop_training = True


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_fit_reads_at_most_depth_batches_ahead_of_the_step(depth, monkeypatch):
    monkeypatch.setitem(datasets.PREFETCH, "CPU", depth)
    pipeline, model = Pipeline(), compiled(True)
    watch = Watch(pipeline)
    model.fit(pipeline.dataset, steps_per_epoch=4, epochs=2, verbose=0, callbacks=[watch])
    begins, ends = watch.most[::2], watch.most[1::2]
    assert begins == [0, *(step + depth for step in range(1, 8))]
    assert ends == [step + depth for step in range(1, 9)]


@pytest.mark.usefixtures("prefetched")
@pytest.mark.parametrize(
    "error", [None, ValueError("a step failed"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_fit_that_stops_early_leaves_no_thread_and_no_batch(error):
    pipeline, model = Pipeline(), compiled(True)
    watch = Watch(pipeline, stop_at=2, error=error)
    try:
        model.fit(pipeline.dataset, steps_per_epoch=4, verbose=0, callbacks=[watch])
        assert error is None
    except (ValueError, KeyboardInterrupt) as raised:
        assert raised is error
    assert pipeline.read == 3, "premise: a batch was read ahead"
    assert watch.iterator.read_ahead() == []
    assert_no_reader()


@pytest.mark.usefixtures("prefetched")
def test_the_batches_of_a_validation_are_dropped_at_its_end_and_those_of_the_training_at_theirs():
    pipeline, model = Pipeline(), compiled(True)
    made: list[datasets.ShardedIterator] = []
    waiting: list[list[int]] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not made:
                made.append(datasets.epochs_of(self.model)._distributed_dataset.current)

        def on_test_batch_end(self, batch, logs=None):
            made[1:] = [datasets.epochs_of(self.model)._distributed_dataset.current]

        def on_epoch_end(self, epoch, logs=None):
            waiting.append([len(each.read_ahead()) for each in made])
            self.model.stop_training = True

    held_out = SAMPLES.batch(8).repeat()
    model.fit(
        pipeline.dataset, steps_per_epoch=2, epochs=2, validation_data=held_out, validation_steps=2, verbose=0,
        callbacks=[Look()],
    )  # fmt: skip
    assert waiting == [[1, 0]]
    assert [each.read_ahead() for each in made] == [[], []]


@pytest.mark.usefixtures("prefetched")
def test_an_error_of_the_pipeline_is_raised_at_the_step_that_takes_the_batch():
    pipeline, model = Pipeline(fails_at=3), compiled(True)
    watch = Watch(pipeline)
    watch.on_train_batch_end = lambda batch, logs=None: watch.most.append(pipeline.read)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the pipeline failed") as raised:
        model.fit(pipeline.dataset, steps_per_epoch=8, verbose=0, callbacks=[watch])
    assert len(watch.most[1::2]) == 3, "three steps have ended"
    assert "_read" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    model.fit(X, Y, verbose=0)


# --- custom loops


def test_a_loop_reads_ahead_as_its_input_options_say():
    chosen = strategy()
    for options, depth in (
        (None, 0),
        (ahead(2), 2),
        (ahead(0), 0),
        (tf.distribute.InputOptions(experimental_fetch_to_device=False), 0),
        (tf.distribute.InputOptions(), 1),
    ):
        pipeline = Pipeline()
        batches = iter(chosen.experimental_distribute_dataset(pipeline.dataset, options))
        for number in range(3):
            x, y = next(batches)
            assert len(batches.read_ahead()) == depth
            assert pipeline.read == number + 1 + depth
            np.testing.assert_array_equal(x.numpy(), X[8 * number : 8 * number + 8])
            assert transfer.is_dtensor(y.on_mesh)
    made = chosen.distribute_datasets_from_function(lambda context: SAMPLES.batch(8), ahead(1))
    assert [x.shape[0] for x, _ in made] == [8] * 8


def test_gpus_read_ahead_and_other_devices_do_not():
    class Mesh:
        def __init__(self, kind):
            self.device_type = lambda: kind

    assert [datasets.prefetch_of(None, Mesh(kind)) for kind in ("GPU", "CPU", "TPU")] == [1, 0, 0]


def test_python_iterables_are_not_read_ahead():
    """The next batch may depend on the last step."""
    results: list[float] = []

    def batches():
        for number in range(3):
            assert len(results) == number
            yield np.full((8, 2), number, "float32")

    for batch in strategy().experimental_distribute_dataset(batches(), ahead(2)):
        results.append(float(tf.reduce_sum(batch)))
    assert results == [0.0, 16.0, 32.0]


def test_an_iterator_that_is_dropped_frees_the_batches_that_it_read_ahead():
    batches = iter(strategy().experimental_distribute_dataset(SAMPLES.batch(8), ahead(2)))
    next(batches)
    held = [weakref.ref(batch.staged.leaves[0]) for batch in batches._ahead.waiting()]
    assert len(held) == 2 and all(each() is not None for each in held), "premise"
    del batches
    gc.collect()
    assert_no_reader()
    assert [each() for each in held] == [None, None]


def test_optional_values_end_with_the_data_that_are_read_ahead():
    iterator = iter(strategy().experimental_distribute_dataset(SAMPLES.take(16).batch(8), ahead(3)))
    for start in (0, 8):
        value = iterator.get_next_as_optional()
        np.testing.assert_array_equal(value.get_value()[0].numpy(), X[start : start + 8])
        assert not iterator.exhausted
    assert not iterator.get_next_as_optional().has_value() and iterator.exhausted
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


_BLOCKED = """
import threading
import numpy as np
import tensorflow as tf
import tfshard

def batches():
    yield np.ones((4, 2), "float32")
    threading.Event().wait()

tfshard.initialize(num_devices=2, device_type="CPU")
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec((4, 2)))
iterator = iter(strategy.experimental_distribute_dataset(dataset, tf.distribute.InputOptions()))
print(next(iterator).shape, [each.name for each in threading.enumerate()])
"""


@pytest.mark.slow
def test_a_program_ends_while_a_thread_waits_for_data_that_never_come():
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=120)
    assert "tfshard-input" in done.stdout, "premise"
    assert done.returncode == 0, done.stderr[-2000:]


# --- the shards of a batch


BIG = np.arange(1 << 19, dtype=np.float32).reshape(8, -1)


@pytest.mark.parametrize("axes", [{"batch": 4}, {"model": 4}, {"batch": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("on_devices", [False, True])
def test_large_and_small_batches_have_their_rows_on_each_device(axes, on_devices):
    mesh = tfshard.ShardedStrategy(tfshard.create_mesh(**axes)).mesh
    for value in (BIG, BIG[:, :4], BIG[:7], np.arange(8, dtype=np.int32), BIG.astype("bfloat16"), np.float32(3)):
        for given in (value, tf.constant(value)):
            staged = batching.stage_batch({"x": given}, mesh, on_devices=on_devices)
            on_mesh = staged.on_mesh()["x"]
            assert on_mesh.dtype == tf.as_dtype(value.dtype)
            np.testing.assert_array_equal(transfer.to_host(on_mesh), value)
            layout = tf.experimental.dtensor.fetch_layout(on_mesh)
            assert transfer.axes_of(layout) == batching.batch_axes(value.shape, mesh)


def test_rows_of_a_large_tensor_are_not_copied():
    mesh, given = strategy().mesh, tf.constant(BIG)
    shards = batching.stage(given, mesh).shards
    memory = transfer.host_view(given)
    assert all(np.shares_memory(transfer.host_view(shard), memory) for shard in shards)


def test_an_array_that_is_changed_after_it_was_staged_stays_as_it_was():
    mesh = strategy().mesh
    for value in (BIG.copy(), np.ones((8, 2), "float32")):
        before = value.copy()
        staged = batching.stage(value, mesh)
        value += 1
        np.testing.assert_array_equal(transfer.to_host(staged.on_mesh()), before)


def test_already_sharded_input_is_read_ahead():
    chosen = strategy(already_sharded=True)
    dataset = SAMPLES.batch(8)
    found = [x.numpy() for x, _ in chosen.experimental_distribute_dataset(dataset, ahead(1))]
    np.testing.assert_array_equal(np.concatenate(found), X)
    batches = iter(chosen.experimental_distribute_dataset(SAMPLES.batch(10), ahead(1)))
    with pytest.raises(tfshard.errors.StrategyError, match="must be a multiple of its 4 positions"):
        next(batches)


@pytest.mark.parametrize("depth", [-1, 1.5, True, "2"])
def test_buffer_sizes_that_are_no_counts_are_refused(depth):
    with pytest.raises(tfshard.errors.StrategyError, match="0 or more. Received"):
        strategy().experimental_distribute_dataset(SAMPLES.batch(8), ahead(depth))


def test_datasets_on_a_device_are_refused():
    options = tf.distribute.InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(tfshard.errors.StrategyError, match="read on the host"):
        strategy().experimental_distribute_dataset(SAMPLES.batch(8), options)
