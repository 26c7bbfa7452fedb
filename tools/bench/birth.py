"""Host memory while a model is born on the mesh, by each way: its peak above what rests on the devices.

    python tools/bench/birth.py
    python tools/bench/birth.py --allocator=tensorflow --models=gpt2 --stages=3

Each way runs in a process of its own, after the same way with a tiny model, so that code is loaded and programs are
compiled. The unit is the two largest variables, as float32: the aim is at most 1. By default memory comes from the
system, which takes back what is freed, so that what is resident is what is in use; TensorFlow's own allocator
(`--allocator=tensorflow`) keeps it, and cuts what it kept into pieces.
"""

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import common
from absl import app, flags

WAYS = {
    "scope": "built under the scope",
    "auto": "built under the scope, layout_map='auto', mesh of 2 x 2",
    "compile": "a plain model, then compile(strategy=)",
    "load_weights": "built and loaded under the scope",
    "auto load_weights": "the same, layout_map='auto', mesh of 2 x 2",
    "from_preset": "KerasHub's from_preset under the scope",
    "slots": "Adam's slots, of a model that is there",
}
_MODELS = flags.DEFINE_list("models", ["mlp", "gpt2"], "Which models.")
_STAGES = flags.DEFINE_list("stages", ["3", "0"], "Which stages.")
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Which ways.")
_ALLOCATOR = flags.DEFINE_enum("allocator", "system", ["system", "tensorflow"], "Who gives memory for tensors.")
_ONE = flags.DEFINE_list("one", None, "Measure this model, stage, way and folder here, and print JSON.")

WIDTHS = (2048, 4096, 6144, 2048, 4096, 2048, 1000)  # Of the MLP, from its input on.
PAGE = os.sysconf("SC_PAGE_SIZE")


def mlp(tiny: bool):
    import keras

    widths = [width // 128 for width in WIDTHS] if tiny else WIDTHS
    layers = [keras.layers.Dense(width, activation="relu") for width in widths[1:]]
    return keras.Sequential([keras.Input((widths[0],)), *layers])


def gpt2(tiny: bool):
    import keras_hub

    width, rows, length = (64, 64, 16) if tiny else (512, 50257, 1024)
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=rows, num_layers=2 if tiny else 8, num_heads=8, hidden_dim=width, intermediate_dim=4 * width,
        max_sequence_length=length,
    )  # fmt: skip


BUILDERS = {"mlp": mlp, "gpt2": gpt2}


class Watch:
    """Samples what is resident, in a thread, every millisecond or as often as it gets to run.

    Attributes:
        peak: The most that was resident.
        host: The most that was resident besides what had come to the devices by then, above what was resident at the
            begin: on GPUs, what the host would hold. A piece counts as on its device from when it begins to be made.
    """

    def __init__(self):
        self.peak = self.host = 0
        self._placed = Placed()
        self._begin = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._ended.is_set():
            self._sample()
            time.sleep(0.001)

    def _sample(self):
        now = resident()
        self.peak, self.host = max(self.peak, now), max(self.host, now - self._placed.bytes - self._begin)

    def __enter__(self):
        self._begin = resident()
        self._placed.begin()
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()
        self._sample()
        self._placed.end()


class Placed:
    """Counts bytes of pieces as they are made for storages, less those of storages that variables leave."""

    def __init__(self):
        self.bytes = 0

    def begin(self):
        from tfshard.devices import host_memory
        from tfshard.storage import storage

        self._kept = made, left = storage.Storage._host_shards, storage.Storage.empty
        self._tensor_of = tensor_of = host_memory.tensor_of
        new = False

        def making(place, values):
            nonlocal new
            new = place.waits
            yield from made(place, values)

        def counted(value):
            self.bytes += value.nbytes if new else 0
            return tensor_of(value)

        def emptied(place):
            if not place.waits:
                self.bytes -= sum(bytes_of(piece) for _, piece in place.local_tensors())
            left(place)

        storage.Storage._host_shards, storage.Storage.empty = making, emptied
        host_memory.tensor_of = counted

    def end(self):
        from tfshard.devices import host_memory
        from tfshard.storage import storage

        storage.Storage._host_shards, storage.Storage.empty = self._kept
        host_memory.tensor_of = self._tensor_of


def bytes_of(tensor) -> int:
    """Of a tensor on one device."""
    return math.prod(tensor.shape) * tensor.dtype.size


def resident() -> int:
    """Resident bytes of this process now, without pages of files."""
    _, pages, shared, *_ = pathlib.Path("/proc/self/statm").read_text().split()
    return (int(pages) - int(shared)) * PAGE


def born(model: str, way: str, strategy, folder: pathlib.Path, tiny: bool) -> tuple:
    """Makes a model one way; (the model, the `Watch`)."""
    import keras
    import keras_hub

    import tfshard

    build, name = BUILDERS[model], "tiny" if tiny else "whole"
    watch = Watch()
    if way == "compile":
        made = tfshard.as_distributed(build(tiny))
        trim()
        with watch:
            made.compile("adam", "mse", strategy=strategy)
        return made, watch
    if way == "slots":
        with strategy.scope():
            made = build(tiny)
        trim()
        with watch, strategy.scope():
            made.optimizer = keras.optimizers.Adam()
            made.optimizer.build(made.trainable_variables)
        return made, watch
    with watch, strategy.scope():
        if way == "from_preset":
            made = keras_hub.models.GPT2Backbone.from_preset(str(folder / f"preset_{name}"))
        else:
            made = build(tiny)
        if way.endswith("load_weights"):
            made.load_weights(folder / f"{model}_{name}.weights.h5")
    return made, watch


def trim() -> None:
    """Gives back garbage, and what malloc keeps for later."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def held(made) -> int:
    """Bytes of all variables on all devices, once for each buffer."""
    import numpy as np

    variables = [*made.variables, *(made.optimizer.variables if getattr(made, "optimizer", None) else ())]
    storages = {id(v.value.storage): v.value.storage for v in variables}.values()
    return sum(np.asarray(piece).nbytes for storage in storages for _, piece in storage.local_tensors())


def measure(model: str, stage: str, way: str, folder: str) -> dict:
    """Takes one way in this process."""
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    auto = way.startswith("auto")
    mesh = tfshard.create_mesh(batch=2, model=2) if auto else tfshard.create_mesh(batch=common.DEVICES)
    strategy = tfshard.ShardedStrategy(mesh, "auto" if auto else None, zero_stage=int(stage))
    with contextlib.suppress(tfshard.errors.LayoutError) if auto else contextlib.nullcontext():
        born(model, way, strategy, pathlib.Path(folder), tiny=True)
    trim()
    started = resident()
    begin = time.perf_counter()
    made, watch = born(model, way, strategy, pathlib.Path(folder), tiny=False)
    peak, host = watch.peak, watch.host
    seconds = time.perf_counter() - begin
    trim()
    sizes = sorted(4 * math.prod(v.shape) for v in made.variables)
    return {
        "seconds": seconds,
        "peak": peak - started,
        "host": host,
        "after": resident() - started,
        "held": held(made),
        "two_largest": sum(sizes[-2:]),
        "parameters": made.count_params(),
        "origin": common.origin(),
    }


def write(folder: str) -> dict:
    """The files that are loaded, with random weights."""
    for tiny, name in ((True, "tiny"), (False, "whole")):
        for model, build in BUILDERS.items():
            made = build(tiny)
            made.save_weights(pathlib.Path(folder) / f"{model}_{name}.weights.h5")
            if model == "gpt2":
                made.save_to_preset(f"{folder}/preset_{name}")
    return {}


def child(*arguments: str) -> dict:
    """Runs this script in a new process."""
    environment = {**os.environ, **(common.SYSTEM_ALLOCATOR if _ALLOCATOR.value == "system" else {})}
    command = [sys.executable, sys.argv[0], f"--one={','.join(arguments)}"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def main(argv):
    del argv
    if _ONE.value:
        print(json.dumps(write(_ONE.value[0]) if len(_ONE.value) == 1 else measure(*_ONE.value)))
        return
    with tempfile.TemporaryDirectory() as folder:
        child(folder)
        print(f"memory of the {_ALLOCATOR.value}'s allocator; MB, 1e6 bytes; above: the peak above what rests")
        print(
            f"{'model':>6} {'stage':>5} {'way':>18} {'rests':>7} {'peak':>7} {'above':>7} {'two largest':>12} "
            f"{'ratio':>6} {'on the host':>12} {'ratio':>6}"
        )
        origins = set()
        for model in _MODELS.value:
            for stage in _STAGES.value:
                for way in _WAYS.value:
                    if way == "from_preset" and model != "gpt2":
                        continue
                    found = child(model, stage, way, folder)
                    origins.add(found["origin"])
                    above = found["peak"] - found["held"]
                    print(
                        f"{model:>6} {stage:>5} {way:>18} {found['held'] / 1e6:7.0f} {found['peak'] / 1e6:7.0f} "
                        f"{above / 1e6:7.0f} {found['two_largest'] / 1e6:12.0f} {above / found['two_largest']:6.2f} "
                        f"{found['host'] / 1e6:12.0f} {found['host'] / found['two_largest']:6.2f}",
                        flush=True,
                    )
        print(*origins)


if __name__ == "__main__":
    app.run(main)
