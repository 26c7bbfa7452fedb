"""A client that trains with Telemetry; run by test_telemetry.py."""

import json
import pathlib
import sys

import keras
import numpy as np

import tfshard
from tfshard.callbacks.telemetry import NAMES


def main(directory: pathlib.Path) -> None:
    tfshard.initialize(device_type="CPU")
    model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    rank = tfshard.collectives.rank()
    metrics = {"rank": None, "second": lambda logs: 7.0 if rank == 1 else float("nan")}
    telemetry = tfshard.callbacks.Telemetry(directory / "run.csv", metrics=metrics)
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: telemetry.record("rank", rank))
    x = np.random.RandomState(0).randn(40, 8).astype("float32")
    history = model.fit(x, x[:, :4], batch_size=8, epochs=2, verbose=0, callbacks=[record, telemetry]).history
    print(f"FOUND {json.dumps(['history', {name: history[name] for name in (*NAMES, *metrics)}])}", flush=True)
    differing = tfshard.callbacks.Telemetry(metrics={f"of_{rank}": None})
    try:
        model.fit(x, x[:, :4], batch_size=8, verbose=0, callbacks=[differing])
    except tfshard.errors.TelemetryError as error:
        print(f"FOUND {json.dumps(['refused', str(error)])}", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
