"""Every class of keras.callbacks does in a sharded `fit` what it does on one device."""

import csv
import http.server
import importlib.util
import inspect
import json
import pathlib
import threading
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 8)).astype("float32")
DATA = {"x": X, "y": X[:, :4].copy(), "validation_data": (X[:8], X[:8, 4:]), "batch_size": 8, "shuffle": False}
HAS_ORBAX = importlib.util.find_spec("orbax") is not None


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh", name="up"), keras.layers.Dense(4, name="down")]
    return keras.Sequential(layers, name="small")


def compiled(strategy: tfshard.ShardedStrategy | None, **options) -> keras.Model:
    model = build()
    optimizer = options.pop("optimizer", None) or keras.optimizers.Adam(0.05)
    model.compile(optimizer, "mse", metrics=["mae"], **({} if strategy is None else {"strategy": strategy}), **options)
    return model


class Told(keras.callbacks.Callback):
    """Notes the hooks that Keras calls, and the numbers in their logs."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, dict[str, float]]] = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(*args, logs=None):
            logs = logs or (args[-1] if args and isinstance(args[-1], dict) else {})
            self.calls.append((name, {key: float(value) for key, value in logs.items()}))

        return note


# What a fit leaves: the history, and what its callback wrote or noted. Floats are compared within a tolerance.
Left = dict[str, object]
Fit = Callable[[tfshard.ShardedStrategy | None, pathlib.Path], Left]
FITS: dict[str, Fit] = {}


def row(fit: Fit) -> Fit:
    """Register the test of the class of keras.callbacks with the name of a function."""
    FITS[fit.__name__] = fit
    return fit


def fitted(strategy, *callbacks, epochs: int = 3, data=DATA, model=None, **options) -> tuple[keras.Model, Left]:
    model = model or compiled(strategy, **options)
    history = model.fit(**data, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return model, {"history": history, "weights": model.get_weights()}


@row
def Callback(strategy, path):
    told = Told()
    _, left = fitted(strategy, told)
    assert {name for name, _ in told.calls} >= {"on_train_batch_end", "on_test_batch_end", "on_epoch_end"}
    return {**left, "told": told.calls}


@row
def CallbackList(strategy, path):
    model = compiled(strategy)
    told = Told()
    # A user's list that replaces Keras's own.
    made = keras.callbacks.CallbackList([told], add_history=True, model=model, epochs=2, verbose=0, steps=3)
    model.fit(**DATA, epochs=2, verbose=0, callbacks=made)
    return {"history": model.history.history, "told": told.calls}


@row
def History(strategy, path):
    history = keras.callbacks.History()
    _, left = fitted(strategy, history)
    assert history.history == left["history"]
    return left


@row
def ProgbarLogger(strategy, path):
    model = compiled(strategy)
    lines: list[str] = []
    before = keras.config.is_interactive_logging_enabled()
    keras.config.disable_interactive_logging()
    try:
        progress = keras.callbacks.ProgbarLogger()
        progress.set_params({"verbose": 2, "epochs": 2, "steps": 3})
        model.fit(**DATA, epochs=2, verbose=0, callbacks=[progress])
        lines.append(f"{progress.target} {progress.seen}")
    finally:
        if before:
            keras.config.enable_interactive_logging()
    return {"lines": lines, "history": model.history.history}


@row
def LambdaCallback(strategy, path):
    told = []
    made = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: told.append((epoch, float(logs["loss"]))),
        on_train_batch_end=lambda batch, logs: told.append((batch, float(logs["mae"]))),
    )
    _, left = fitted(strategy, made)
    assert len(told) == 3 + 9
    return {**left, "told": told}


@row
def LearningRateScheduler(strategy, path):
    made = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))
    model, left = fitted(strategy, made)
    assert left["history"]["learning_rate"][-1] < left["history"]["learning_rate"][0]
    return {**left, "rate": float(model.optimizer.learning_rate)}


@row
def ReduceLROnPlateau(strategy, path):
    made = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    model, left = fitted(strategy, made, epochs=4)
    assert float(model.optimizer.learning_rate) < 0.05
    return {**left, "rate": float(model.optimizer.learning_rate)}


@row
def EarlyStopping(strategy, path):
    made = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0, restore_best_weights=True)
    model, left = fitted(strategy, made, epochs=6)
    assert made.stopped_epoch == 1 and len(left["history"]["loss"]) == 2
    return {**left, "stopped": made.stopped_epoch, "best": float(made.best), "restored": model.predict(X, verbose=0)}


@row
def TerminateOnNaN(strategy, path):
    x = X.copy()
    x[12, 3] = np.nan
    _, left = fitted(strategy, keras.callbacks.TerminateOnNaN(), data={**DATA, "x": x}, epochs=5)
    # The second batch has the NaN, so that the first epoch is the last one.
    assert len(left["history"]["loss"]) == 1 and np.isnan(left["history"]["loss"][0])
    return {"epochs": len(left["history"]["loss"])}


@row
def CSVLogger(strategy, path):
    _, left = fitted(strategy, keras.callbacks.CSVLogger(path / "log.csv"))
    with (path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {**left, "rows": [{name: float(value) for name, value in each.items()} for each in rows]}


@row
def ModelCheckpoint(strategy, path):
    best = keras.callbacks.ModelCheckpoint(path / "best.keras", monitor="loss", save_best_only=True)
    weights = keras.callbacks.ModelCheckpoint(str(path / "{epoch}.weights.h5"), save_weights_only=True, save_freq=3)
    _, left = fitted(strategy, best, weights)
    # Plain Keras reads the files.
    loaded = keras.models.load_model(path / "best.keras")
    plain = build()
    plain.load_weights(path / "2.weights.h5")
    files = sorted(file.name for file in path.iterdir())
    return {**left, "best": loaded.get_weights(), "second": plain.get_weights(), "files": files}


@row
def BackupAndRestore(strategy, path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    model = compiled(strategy)
    with pytest.raises(InterruptedError):
        fitted(strategy, keras.callbacks.BackupAndRestore(path / "backup"), Stop(), model=model)
    # A model of another process goes on with the third epoch.
    _, left = fitted(strategy, keras.callbacks.BackupAndRestore(path / "backup"))
    assert len(left["history"]["loss"]) == 1
    _, whole = fitted(strategy)
    np.testing.assert_allclose(left["history"]["loss"][-1], whole["history"]["loss"][-1], rtol=1e-5)
    return left


@row
def SwapEMAWeights(strategy, path):
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    saved = keras.callbacks.ModelCheckpoint(str(path / "{epoch}.weights.h5"), save_weights_only=True)
    made = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model, left = fitted(strategy, made, saved, optimizer=optimizer)
    averaged = build()
    averaged.load_weights(path / "3.weights.h5")
    differ = [np.abs(one - other).max() for one, other in zip(averaged.get_weights(), model.get_weights(), strict=True)]
    return {**left, "averaged": averaged.get_weights(), "differ": differ}


@row
def TensorBoard(strategy, path):
    pytest.importorskip("tensorboard")
    made = keras.callbacks.TensorBoard(path, histogram_freq=1, write_graph=False, update_freq="epoch")
    _, left = fitted(strategy, made)
    found = {}
    for file in sorted(path.glob("*/events*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name in ("", "scalars"):
                    found[f"{file.parent.name} {event.step} {value.tag}"] = float(tf.make_ndarray(value.tensor))
                else:
                    found[f"{file.parent.name} {event.step} {value.tag}"] = value.metadata.plugin_data.plugin_name
    assert "validation 2 evaluation_loss_vs_iterations" in found or any("epoch_loss" in name for name in found)
    assert "histograms" in found.values()
    return {**left, "events": found}


@row
def RemoteMonitor(strategy, path):
    pytest.importorskip("requests")
    posted: list[dict[str, float]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        root = f"http://127.0.0.1:{server.server_port}"
        _, left = fitted(strategy, keras.callbacks.RemoteMonitor(root, path="/", send_as_json=True))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [each["epoch"] for each in posted] == [0, 1, 2] and "val_loss" in posted[0]
    return {**left, "posted": posted}


@row
def OrbaxCheckpoint(strategy, path):
    if not HAS_ORBAX:
        # As in plain Keras, the callback says what is missing before training.
        with pytest.raises(ImportError, match="orbax"):
            keras.callbacks.OrbaxCheckpoint(path)
        return {}
    made = keras.callbacks.OrbaxCheckpoint(path / "orbax", save_on_background=False)
    _, left = fitted(strategy, made)
    return {**left, "files": sorted(each.name for each in (path / "orbax").iterdir())}


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from flat(each, f"{name}[{number}]")
    else:
        yield name, value


def test_every_class_of_keras_has_a_row():
    classes = {name for name, value in vars(keras.callbacks).items() if inspect.isclass(value)}
    assert classes - {"MonitorCallback"} == set(FITS)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", FITS)
def test_a_sharded_fit_with_a_callback_leaves_what_plain_keras_leaves(name, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "sharded").mkdir()
    expected = dict(flat(FITS[name](None, tmp_path / "plain")))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    found = dict(flat(FITS[name](strategy, tmp_path / "sharded")))
    if name != "OrbaxCheckpoint":
        assert expected
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, (float, np.floating, np.ndarray)):
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
        else:
            assert found[key] == value, key


def test_the_model_of_these_tests_is_sharded():
    model = compiled(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3, analyzer=None))
    assert model.layers[0].kernel.value.layout.storage == ("batch", None)
