"""How long `fit` on arrays is between its steps: from the last of an epoch to the first of the next, and to its return.

    python tools/bench/epoch_ends.py

With iterators that tune themselves, as Keras makes them, and without, as tfshard has them; several processes beside
each other, since those that tune themselves sleep at their ends where cores are busy.
"""

import concurrent.futures
import contextlib
import json
import time
from unittest import mock

import common
from absl import app, flags

_WAY = flags.DEFINE_enum("way", None, ["tuned", "not tuned"], "Measure this one here, and print JSON.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each way, in turn.", 1)
_BESIDE = flags.DEFINE_integer("beside", 2, "Processes that run at the same time.", 1)
_SECONDS = flags.DEFINE_float("seconds", 8.0, "About how long an epoch takes.", 0.1)
_EPOCHS = 3


def ends() -> dict[str, list[float]]:
    """Seconds of each end of an epoch, and of `fit`."""
    import keras
    import numpy as np

    import tfshard
    from tfshard.training import datasets

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES))
    model = tfshard.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", strategy=strategy)
    begins: list[float] = []
    last: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(0.0),
        on_train_batch_begin=lambda step, logs: begins.__setitem__(-1, begins[-1] or time.perf_counter()),
        on_train_batch_end=lambda step, logs: last.append(time.perf_counter()),
    )

    def fit(steps: int, epochs: int) -> None:
        x = np.zeros((16 * steps, 64), "float32")
        model.fit(x, x[:, :1], batch_size=16, epochs=epochs, verbose=0, callbacks=[note])

    fit(20, 2)
    begin = time.perf_counter()
    fit(100, 1)
    steps = max(100, int(100 * _SECONDS.value / (time.perf_counter() - begin)))
    begins.clear()
    last.clear()
    tuned = mock.patch.object(datasets, "without_tuning", lambda dataset: dataset)
    with tuned if _WAY.value == "tuned" else contextlib.nullcontext():
        begin = time.perf_counter()
        fit(steps, _EPOCHS)
    returned = time.perf_counter()
    of_epochs = last[steps - 1 :: steps]
    return {
        "ends": [after - before for before, after in zip(of_epochs, [*begins[1:], returned], strict=True)],
        "all": [returned - begin],
    }


def main(argv):
    del argv
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    if _WAY.value:
        print(json.dumps(ends()))
        return
    print(f"{common.origin()}, {_BESIDE.value} processes at once, {_EPOCHS} epochs, {_ROUNDS.value} rounds")
    found: dict[str, list[dict]] = {"tuned": [], "not tuned": []}
    for _ in range(_ROUNDS.value):
        for way, runs in found.items():
            with concurrent.futures.ThreadPoolExecutor(_BESIDE.value) as pool:
                runs += pool.map(common.run_child, [f"--way={way}"] * _BESIDE.value)
    for way, runs in found.items():
        each = sorted(end for run in runs for end in run["ends"])
        share = sum(each) / sum(run["all"][0] for run in runs)
        late = sum(end > 0.5 for end in each)
        print(
            f"{way}: {len(each)} ends, {late} of them above 0.5 s, the longest {each[-1]:.2f} s, the median "
            f"{1e3 * each[len(each) // 2]:.0f} ms; {share:.1%} of all time"
        )


if __name__ == "__main__":
    app.run(main)
