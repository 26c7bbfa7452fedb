"""Measure whether memory or step time grows in long runs: a small model at stage 3 on four devices, and plain Keras.

    python tools/bench/long_runs.py
    python tools/bench/long_runs.py --only=compiles,checkpoints --scale=0.05
    python tools/bench/long_runs.py --only=steps --seconds=1500 --write

Each run repeats one unit many times:

- *steps*: 100,000 training steps in one epoch of `fit`.
- *shapes*: 10,000 calls of `train_on_batch`, with batches of 50 shapes in turn.
- *epochs*: 200 epochs of `fit` with validation, in one call.
- *compiles*: 500 models, each built, compiled, trained for two steps, and dropped.
- *checkpoints*: 200 steps of `fit`, with a checkpoint after each.

Each run is measured in two processes, one at stage 3 and one with plain Keras on one device, so that a leak of
TensorFlow or Keras shows in both. After each twentieth of a run, the process collects garbage and counts. The first
tenth of a run warms up and does not count. The columns are:

- *resident*: the resident memory without pages of files at the end of the warm-up, and its growth until the end.
- *heap*: the bytes that glibc's allocator has given out, likewise. Fragmentation changes the resident memory, but not
  the heap.
- *growth a unit*: the slope of the heap by least squares, over the samples after the warm-up.
- *objects*, *graphs*, *functions*, *tensors*: how many Python objects that the garbage collector tracks, `FuncGraph`s,
  functions of TensorFlow's context and eager tensors were added after the warm-up.
- *processor time*: the median processor time of a unit in the last fifth of the samples over that in the first fifth
  after the warm-up. Other processes of the machine disturb it less than they disturb the wall time.
"""

import contextlib
import ctypes
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import common
from absl import app, flags

UNITS = {"steps": 100_000, "shapes": 10_000, "epochs": 200, "compiles": 500, "checkpoints": 200}
WAYS = ("stage 3", "one device")
SAMPLES = 20
# Samples of the warm-up: a tenth of the run.
WARM_UP = 2
# The least number of samples of a run that ends early.
LEAST = 6
BATCH_SIZE = 8
TABLE = pathlib.Path(__file__).parents[2] / "benchmarks" / "long_runs.md"

_ONLY = flags.DEFINE_list("only", list(UNITS), "The runs to measure.")
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Ways to measure.")
_SCALE = flags.DEFINE_float("scale", 1.0, "Measure this part of each run.", lower_bound=0.0, upper_bound=1.0)
_SECONDS = flags.DEFINE_integer("seconds", 3600, "End each run after this many seconds. The table says where it ended.")
_WRITE = flags.DEFINE_bool("write", False, "Replace the rows of these runs in benchmarks/long_runs.md.")
_TYPES = flags.DEFINE_bool("types", False, "Print the types of the objects that were added.")
_WAY = flags.DEFINE_string("way", None, "Measure run:way here, and print JSON.")


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usm fsm uord ford keep".split()]


def heap_bytes() -> int:
    """Return the bytes that glibc's allocator has given out."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Heap
    heap = library.mallinfo2()
    return int(heap.uord + heap.hblkhd)


class Recorder:
    """Counts units of a run, and takes a sample after each twentieth of them.

    Attributes:
        samples: The samples, each a dict of numbers.
        settle: Called before each sample. It waits for threads: `gc.get_objects` refers to objects that a thread is
            making, and TensorFlow cannot finish a shape to which another object refers.

    Args:
        units: The units of the run.
        seconds: The run is over after this many seconds.
    """

    def __init__(self, units: int, seconds: float):
        self.samples: list[dict] = []
        self.settle: Callable[[], object] = lambda: None
        self._every = max(1, units // SAMPLES)
        self._units = self._every * SAMPLES
        self._done = 0
        self._end = time.monotonic() + seconds
        self._types: Counter[str] | None = None
        self._begin()

    def _begin(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def unit(self) -> None:
        """Count a unit."""
        self._done += 1
        if self._done % self._every == 0:
            self._sample()

    @property
    def is_over(self) -> bool:
        """True after the last unit, or when the time is over."""
        return self._done >= self._units or time.monotonic() > self._end

    def _sample(self) -> None:
        wall = (time.perf_counter() - self._wall) / self._every
        processor = (time.process_time() - self._processor) / self._every
        from tfshard import _private

        self.settle()
        for _ in range(2):  # The first frees graphs, and the second what their functions held.
            gc.collect()
        objects = gc.get_objects()
        types = Counter(type(each).__name__ for each in objects)
        self.samples.append(
            {
                "units": self._done,
                "wall": wall,
                "processor": processor,
                "resident": common.resident_bytes("RssAnon"),
                "heap": heap_bytes(),
                "objects": len(objects),
                "graphs": types["FuncGraph"],
                "tensors": types["EagerTensor"],
                "functions": _private.function_count(),
            }
        )
        if _TYPES.value:
            if len(self.samples) == WARM_UP:
                self._types = types
            elif self.is_over and self._types is not None:
                print((types - self._types).most_common(40), file=sys.stderr)
        del objects
        self._begin()


def _model(scope: Callable, shape: tuple = (8,)):
    """Return a compiled model."""
    import keras

    with scope():
        layers = [keras.Input(shape), keras.layers.Dense(16, activation="relu")]
        if len(shape) > 1:
            layers.append(keras.layers.GlobalAveragePooling1D())
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
    return model


def _arrays(*shape: int):
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=shape).astype("float32"), random.normal(size=(shape[0], 1)).astype("float32")


def _callback(recorder: Recorder, method: str):
    """Return a callback that counts a unit in `method`, and stops the training when the run is over."""
    import keras

    callback = keras.callbacks.Callback()

    def count(*args, **kwargs):
        recorder.unit()
        if recorder.is_over:
            callback.model.stop_training = True

    setattr(callback, method, count)
    return callback


def steps(way: str, scope: Callable, recorder: Recorder) -> None:
    """Train in one epoch of `fit`."""
    import tensorflow as tf

    model = _model(scope)
    data = tf.data.Dataset.from_tensor_slices(_arrays(64, 8)).batch(BATCH_SIZE, drop_remainder=True).repeat()
    model.fit(
        data, steps_per_epoch=UNITS["steps"], verbose=0, callbacks=[_callback(recorder, "on_train_batch_end")],
    )  # fmt: skip


def shapes(way: str, scope: Callable, recorder: Recorder) -> None:
    """Train on batches of 50 shapes."""
    model = _model(scope, (None, 8))
    batches = [_arrays(size, length, 8) for size in range(1, 11) for length in (3, 5, 8, 13, 21)]
    while True:
        for batch in batches:
            model.train_on_batch(*batch)
            recorder.unit()
            if recorder.is_over:
                return


def epochs(way: str, scope: Callable, recorder: Recorder) -> None:
    """Train in epochs with validation."""
    model = _model(scope)
    x, y = _arrays(64, 8)
    model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=UNITS["epochs"], validation_data=(x[:32], y[:32]), verbose=0,
        callbacks=[_callback(recorder, "on_epoch_end")],
    )  # fmt: skip


def compiles(way: str, scope: Callable, recorder: Recorder) -> None:
    """Train fresh models."""
    x, y = _arrays(16, 8)
    while not recorder.is_over:
        model = _model(scope)
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
        del model
        recorder.unit()


def checkpoints(way: str, scope: Callable, recorder: Recorder) -> None:
    """Save after each step. Plain Keras saves with `BackupAndRestore`."""
    import keras

    x, y = _arrays(64, 8)
    model = _model(scope)
    with tempfile.TemporaryDirectory() as directory:
        if way == "one device":
            saving = keras.callbacks.BackupAndRestore(directory, save_freq=1)
        else:
            import tfshard

            saving = tfshard.CheckpointCallback(directory, every_steps=1)
            recorder.settle = saving.manager.wait
        model.fit(
            x, y, batch_size=BATCH_SIZE, epochs=UNITS["checkpoints"], verbose=0,
            callbacks=[saving, _callback(recorder, "on_train_batch_end")],
        )  # fmt: skip


RUNS = {"steps": steps, "shapes": shapes, "epochs": epochs, "compiles": compiles, "checkpoints": checkpoints}


def measure(run: str, way: str) -> dict:
    """Measure a run in this process."""
    warnings.simplefilter("ignore")
    scopes: Callable = contextlib.nullcontext
    if way != "one device":
        import tfshard

        common.start()
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES), zero_stage=int(way[6]))
        scopes = strategy.scope
    recorder = Recorder(round(UNITS[run] * _SCALE.value), _SECONDS.value)
    RUNS[run](way, scopes, recorder)
    if len(recorder.samples) < LEAST:
        raise RuntimeError(
            f"{_SECONDS.value} s gave {len(recorder.samples)} samples of '{run}'. Use a smaller --scale."
        )
    return {"samples": recorder.samples, "origin": common.origin()}


def _slope(samples: list[dict], key: str) -> float:
    units, values = [sample["units"] for sample in samples], [sample[key] for sample in samples]
    return statistics.linear_regression(units, values).slope


def _growth(samples: list[dict], key: str, form: Callable[[float], str]) -> str:
    first, last = samples[0][key], samples[-1][key]
    return f"{form(first)} {last - first:+,.0f}" if form is _count else f"{form(first)} ({last / first - 1:+.1%})"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.1f}"


COLUMNS = (
    "run", "way", "units", "resident, MiB", "heap, MiB", "growth a unit, bytes", "objects", "graphs", "functions",
    "tensors", "unit, ms", "processor time", "date",
)  # fmt: skip


def row(run: str, way: str, result: dict) -> list[str]:
    """Return the cells of a run."""
    done = result["samples"][-1]["units"]
    samples = result["samples"][WARM_UP - 1 :]
    fifth = max(1, len(samples) // 5)
    early, late = (
        statistics.median(each["processor"] for each in part) for part in (samples[1 : 1 + fifth], samples[-fifth:])
    )
    wall = statistics.median(each["wall"] for each in samples[1:])
    return [
        run,
        way,
        f"{done:,}" + ("" if done == UNITS[run] else f" of {UNITS[run]:,}"),
        _growth(samples, "resident", _mebibytes),
        _growth(samples, "heap", _mebibytes),
        f"{_slope(samples, 'heap'):,.0f}",
        *(_growth(samples, key, _count) for key in ("objects", "graphs", "functions", "tensors")),
        f"{wall * 1e3:.1f}",
        f"{late / early:.3f}",
        time.strftime("%Y-%m-%d"),
    ]


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| run "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def write(rows: list[list[str]], origin: str) -> None:
    """Replace the rows of the measured runs in the table."""
    new = {(cells[0], cells[1]): cells for cells in rows}
    old = {(cells[0], cells[1]): cells for cells in _rows(TABLE.read_text())} if TABLE.exists() else {}
    found = old | new
    order = [(run, way) for run in UNITS for way in WAYS if (run, way) in found]
    lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *(found[key] for key in order))]
    head = TABLE.read_text().partition("| run ")[0] if TABLE.exists() else f"# Long runs\n\n{origin}\n\n"
    TABLE.write_text(head + "\n".join(lines) + "\n")


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(*_WAY.value.split(":"))))
        return
    rows = []
    for run in _ONLY.value:
        for way in _WAYS.value:
            result = common.run_child(f"--way={run}:{way}")
            rows.append(row(run, way, result))
            print(" | ".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, rows[-1], strict=True)), flush=True)
            if _WRITE.value:
                write(rows, result["origin"])


if __name__ == "__main__":
    app.run(main)
