"""Telemetry changes no training, and reports correct numbers."""

import csv
import itertools
import json
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import launched
import tfshard
from tfshard.callbacks import pace, telemetry
from tfshard.callbacks.telemetry import NAMES
from tfshard.measure import step_profile

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(30, 8).astype("float32"), RANDOM.randn(30, 4).astype("float32")


def compiled(strategy: tfshard.ShardedStrategy | None = None, **options) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)])
    if strategy is not None:
        tfshard.as_distributed(model)
        options["strategy"] = strategy
    model.compile("adam", "mse", **options)
    return model


def sharded(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


def fit(model: keras.Model, *callbacks, **options) -> dict[str, list[float]]:
    """Fit batches of 8, 8, 8 and 6 rows."""
    how = {"x": X, "y": Y, "batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False, **options}
    return model.fit(callbacks=list(callbacks), **how).history


@pytest.fixture
def ticking(monkeypatch):
    """Fake a clock on which each step takes a second.

    Telemetry reads the clock when a step begins, and at the end of an epoch.
    """
    clock = itertools.count()
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: float(next(clock)))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_fit_has_the_same_bits_with_it(microbatches):
    measured, alone = compiled(sharded(microbatches=microbatches)), compiled(sharded(microbatches=microbatches))
    history = fit(measured, tfshard.callbacks.Telemetry(profile_every=1), validation_data=(X, Y))
    expected = fit(alone, validation_data=(X, Y))
    assert expected["loss"][-1] < expected["loss"][0] and set(history) == {*expected, *NAMES}
    for name, values in expected.items():
        assert history[name] == values
    for ours, theirs in zip(measured.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(measured.optimizer.iterations) == int(alone.optimizer.iterations) == 12


def test_rates_are_those_of_steps_that_did_not_compile(ticking):
    history = fit(compiled(sharded()), tfshard.callbacks.Telemetry(profile_every=None), validation_data=(X, Y))
    # The first epoch compiles a step for 8 rows and a step for 6 rows.
    assert history["samples_per_second"] == [8.0, 7.5, 7.5]
    assert history["step_seconds_p50"] == history["step_seconds_p99"] == [1.0, 1.0, 1.0]
    assert history["tokens_per_second"] == history["restarts"] == [0.0, 0.0, 0.0]
    assert np.isnan(history["collective_seconds"]).all() and np.isnan(history["device_peak_bytes"]).all()


def test_steps_that_keras_does_at_once_share_their_time(ticking):
    model = compiled(sharded(), steps_per_execution=2)
    history = fit(model, tfshard.callbacks.Telemetry(profile_every=None), x=X[:24], y=Y[:24])
    # An execution of two steps takes a second; the third step is an execution alone.
    assert history["samples_per_second"][1:] == [12.0, 12.0]
    assert history["step_seconds_p50"][1:] == [0.75, 0.75]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_step_without_a_batch_is_none(ticking):
    """Keras does not know how many batches a generator has, and announces one too many."""
    batches = [(X[start : start + 8], Y[start : start + 8]) for start in (0, 8, 16)]
    specs = tuple(tf.TensorSpec((None, width), tf.float32) for width in (8, 4))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)
    for model in (compiled(sharded()), compiled()):
        found = tfshard.callbacks.Telemetry(profile_every=None)
        history = fit(model, found, x=data, y=None, batch_size=None, epochs=2)
        assert history["samples_per_second"] == [8.0, 8.0]
        assert history["step_seconds_p50"] == [1.0, 1.0]


def test_tokens_are_those_of_sequences_of_integers(ticking):
    ids = RANDOM.randint(0, 10, (16, 6)).astype("int32")
    layers = [keras.layers.Embedding(10, 4), keras.layers.Dense(3)]
    for given, expected in ((None, 48.0), (5, 40.0), (0, 0.0)):
        model = tfshard.Sequential([keras.Input((6,), dtype="int32"), *layers])
        model.compile("sgd", "mse", strategy=sharded())
        found = tfshard.callbacks.Telemetry(profile_every=None, tokens_per_sample=given)
        history = fit(model, found, x=ids, y=np.ones((16, 6, 3)), epochs=2)
        assert history["tokens_per_second"][1] == expected
        layers = [keras.layers.Embedding(10, 4), keras.layers.Dense(3)]


def test_what_a_step_sends_holds_and_computes_is_that_of_plan_report_and_profile():
    strategy = sharded(analyzer=None)
    model = compiled(strategy)
    history = fit(model, tfshard.callbacks.Telemetry(profile_every=1))
    planned = strategy.plan(model, inputs=X[:8]).collectives
    assert planned and history["collective_bytes"][0] == sum(each.count * each.bytes for each in planned)
    held = strategy.report(model).bytes_per_device()
    assert history["device_bytes"] == [held] * 3
    flops = tfshard.planning.training_flops(model, X[:8]) / 8
    for rate, samples in zip(history["flops_per_second"], history["samples_per_second"], strict=True):
        # Every step was profiled, so none is timed.
        assert math.isnan(rate) and math.isnan(samples)
    history = fit(model, tfshard.callbacks.Telemetry(profile_every=1000))
    for rate, samples in zip(history["flops_per_second"], history["samples_per_second"], strict=True):
        assert rate == pytest.approx(flops * samples)


def test_the_peak_is_what_rests_and_what_a_step_adds():
    model = tfshard.Sequential([keras.Input((512,)), keras.layers.Dense(512), keras.layers.Dense(512)])
    strategy = sharded(analyzer=None)
    model.compile("sgd", "mse", strategy=strategy)
    x = RANDOM.randn(16, 512).astype("float32")
    history = fit(model, tfshard.callbacks.Telemetry(), x=x, y=x)
    held = strategy.report(model).bytes_per_device()
    assert held >= 2 * 512 * 512 * 4 / 4, "premise: a quarter of two kernels rests"
    # A gathered kernel, and at most everything that a step could hold at once.
    assert all(held + 512 * 512 * 4 <= peak < 8 * 512 * 512 * 4 for peak in history["device_peak_bytes"])


def test_the_profiled_step_is_one_that_trains_and_of_those_that_are_due(monkeypatch):
    traces = []
    seconds = step_profile.collective_wall_seconds
    monkeypatch.setattr(
        step_profile, "collective_wall_seconds", lambda trace, devices: traces.append(trace) or seconds(trace, devices)
    )
    model = compiled(sharded())
    history = fit(model, tfshard.callbacks.Telemetry(profile_every=4), x=X[:24], y=Y[:24], epochs=4)
    # The first of 12 steps compiles. The first, fifth and ninth of the 11 other steps are profiled.
    assert len(traces) == 3
    for trace in traces:
        assert any(":Collective" in event.name for event in trace)
    assert all(0 < value < 1 for value in history["collective_seconds"])
    assert int(model.optimizer.iterations) == 12


def test_collectives_that_overlap_count_once():
    def event(lane: int, begin: float, end: float) -> step_profile._private.TraceEvent:
        stats = {"collective": 1, "group_key": 1, "group_size": 2}
        name = f"name{begin}:CollectiveReduceV2"
        return step_profile._private.TraceEvent(name=name, lane=lane, begin=begin, end=end, stats=stats)

    trace = [event(0, 1.0, 3.0), event(1, 2.0, 4.0), event(0, 2.5, 2.6), event(1, 6.0, 6.5)]
    assert step_profile.collective_wall_seconds(trace, 2) == pytest.approx(3.5)


def test_a_step_in_which_another_profiler_runs_is_not_profiled(tmp_path):
    class Profiling(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                tf.profiler.experimental.start(str(tmp_path))

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                tf.profiler.experimental.stop()

    history = fit(compiled(sharded()), tfshard.callbacks.Telemetry(), Profiling())
    assert math.isnan(history["collective_seconds"][0]) and history["collective_seconds"][1] > 0


def test_files_hold_what_the_history_has(tmp_path):
    log, board = tmp_path / "run.csv", tmp_path / "board"
    history: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(2):  # As in a restarted run.
        found = fit(
            compiled(sharded()), tfshard.callbacks.Telemetry(log, board), keras.callbacks.CSVLogger(tmp_path / "k")
        )
        history = {name: [*values, *found[name]] for name, values in history.items()}
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"] * 2
    written: dict[str, list[float]] = {name: [] for name in NAMES}
    for path in sorted(board.iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                written[value.tag.removeprefix("telemetry/")].append(float(tf.make_ndarray(value.tensor)))
    for name, values in history.items():
        np.testing.assert_array_equal([float(row[name]) for row in rows], values)
        np.testing.assert_allclose(written[name], values, rtol=1e-6)
    with (tmp_path / "k").open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["samples_per_second"]) == pytest.approx(history[NAMES[0]][-1])


def test_plain_keras_has_what_needs_no_mesh(ticking):
    history = fit(compiled(), tfshard.callbacks.Telemetry(tokens_per_sample=2), validation_data=(X[:8], Y[:8]))
    assert history["samples_per_second"] == [7.5, 7.5, 7.5]
    assert history["tokens_per_second"] == [15.0, 15.0, 15.0]
    assert history["flops_per_second"] == [7.5 * 2 * (2 * 8 * 16 + 3 * 16 * 4)] * 3
    assert np.isnan(history["collective_bytes"]).all() and np.isnan(history["device_bytes"]).all()


def test_evaluate_and_predict_with_it_are_as_without():
    model, found = compiled(sharded()), tfshard.callbacks.Telemetry()
    assert model.evaluate(X, Y, verbose=0, callbacks=[found]) == model.evaluate(X, Y, verbose=0)
    assert model.predict(X, verbose=0, callbacks=[found]).shape == (30, 4)


def test_a_fit_that_fails_leaves_nobody_watching():
    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise RuntimeError("as told")

    strategy = sharded()
    found = tfshard.callbacks.Telemetry(profile_every=1)
    with pytest.raises(RuntimeError, match="as told"):
        fit(compiled(strategy), found, Failing())
    assert strategy.watched._here.watchers == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile_every": 0}, "profile_every must be an integer of 1 or more, or None. Received: profile_every=0"),
        ({"profile_every": True}, "profile_every must be an integer"),
        ({"tokens_per_sample": -1}, "tokens_per_sample must be an integer of 0 or more"),
        ({"csv": 3}, "csv must be a path, or None. Received: csv=3"),
        ({"log_dir": b"x"}, "log_dir must be a path"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(tfshard.errors.TelemetryError, match=message):
        tfshard.callbacks.Telemetry(**options)


def test_a_file_with_other_columns_is_refused_before_training(tmp_path):
    (tmp_path / "other.csv").write_text("epoch,loss\n0,1.0\n")
    model = compiled(sharded())
    with pytest.raises(
        tfshard.errors.TelemetryError, match="does not have the columns .*Received: a file with the columns"
    ):
        fit(model, tfshard.callbacks.Telemetry(tmp_path / "other.csv"))
    assert int(model.optimizer.iterations) == 0


def test_scalars_are_written_without_tensorboard_and_its_callback_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError):
        import tensorboard  # noqa: F401, PLC0415  # Premise: the import fails.
    model = compiled(sharded())
    with pytest.raises(
        tfshard.errors.TelemetryError, match="needs the package tensorboard.*pip install 'tfshard.tensorboard.'"
    ):
        fit(model, keras.callbacks.TensorBoard(tmp_path))
    assert int(model.optimizer.iterations) == 0
    told = fit(model, tfshard.callbacks.Telemetry(log_dir=tmp_path, profile_every=None), epochs=2)
    written = {}
    for file in tmp_path.iterdir():
        for record in tf.data.TFRecordDataset([str(file)], buffer_size=1024):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                written[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    for epoch in range(2):
        for name in ("collective_bytes", "samples_per_second"):
            assert written[epoch, f"telemetry/{name}"] == pytest.approx(told[name][epoch])


def test_metrics_under_names_of_ones_own_are_in_history_and_files(tmp_path):
    given = {"double": lambda logs: 2 * logs["loss"], "rate": lambda logs: logs["samples_per_second"], "batch": None}
    found = tfshard.callbacks.Telemetry(tmp_path / "run.csv", tmp_path / "board", metrics={**given, "never": None})
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.record("batch", batch))
    history = fit(compiled(sharded()), record, found)
    np.testing.assert_allclose(history["double"], np.multiply(2, history["loss"]))
    assert history["rate"] == history["samples_per_second"]
    # The mean of batches 0 to 3, in each epoch.
    assert history["batch"] == [1.5] * 3 and np.isnan(history["never"]).all()
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["batch"]) for row in rows] == [1.5] * 3
    assert [float(row["double"]) for row in rows] == history["double"]
    (file,) = (tmp_path / "board").iterdir()
    tags = {value.tag for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value}
    assert {"telemetry/double", "telemetry/batch"} <= tags
    # Plain Keras has them, too.
    assert fit(compiled(), tfshard.callbacks.Telemetry(metrics={"one": lambda logs: 1}))["one"] == [1.0] * 3


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["a"], r"metrics must map names to functions.*Received: metrics=\['a'\]"),
        ({"a": 3}, "metrics must map names to functions"),
        ({"restarts": None}, "report 'restarts' themselves. Choose other names"),
        ({"val_loss": None}, "report 'val_loss' themselves"),
    ],
)
def test_wrong_metrics_are_refused(metrics, message):
    with pytest.raises(tfshard.errors.TelemetryError, match=message):
        tfshard.callbacks.Telemetry(metrics=metrics)


def test_values_that_are_no_numbers_and_names_that_are_not_declared_are_refused():
    found = tfshard.callbacks.Telemetry(metrics={"a": None, "b": lambda logs: "text"}, profile_every=None)
    with pytest.raises(tfshard.errors.TelemetryError, match=r"Declared: \['a'\]. Received: name='b'"):
        found.record("b", 1.0)
    with pytest.raises(tfshard.errors.TelemetryError, match="Metric 'a' of Telemetry must be a number. Received: None"):
        found.record("a", None)
    with pytest.raises(tfshard.errors.TelemetryError, match="Metric 'b' of Telemetry must be a number. Received: 'te"):
        fit(compiled(sharded()), found)
    found = tfshard.callbacks.Telemetry(metrics={"c": lambda logs: logs["val_loss"]}, profile_every=None)
    with pytest.raises(
        tfshard.errors.TelemetryError, match="The function of metric 'c' of Telemetry failed with KeyEr"
    ):
        fit(compiled(sharded()), found)
    found = tfshard.callbacks.Telemetry(metrics={"mae": None}, profile_every=None)
    with pytest.raises(tfshard.errors.TelemetryError, match="A metric of the model is also called 'mae'"):
        fit(compiled(sharded(), metrics=["mae"]), found)


def test_a_clock_without_steps_knows_nothing():
    empty = pace.Pace()
    empty.end(1.0)
    times = empty.times(done=0)
    assert (times.steps, times.timed_steps, times.seconds) == (0, 0, 0.0) and np.isnan(times.percentiles).all()


@pytest.mark.slow
def test_clients_tell_the_same_of_the_whole_run_and_one_writes(tmp_path):
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_telemetry.py"), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    first, second = launched.found(done, 2)
    assert json.dumps(first) == json.dumps(second)
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    for name, values in first["history"].items():
        np.testing.assert_array_equal([float(row[name]) for row in rows], values)
    assert first["history"]["collective_seconds"][0] > 0 == first["history"]["restarts"][0]
    assert all(value > 0 for value in first["history"]["samples_per_second"])
    # The mean over clients 0 and 1; only client 1 knows `second`.
    assert first["history"]["rank"] == [0.5, 0.5] and first["history"]["second"] == [7.0, 7.0]
    assert "the metrics of Telemetry" in first["refused"]
