"""Train every model of keras.applications and every KerasHub backbone on one device and under a ShardedStrategy.

    python tools/every_model.py --suite=applications
    python tools/every_model.py --suite=keras_hub --keras_hub=CHECKOUT
    python tools/every_model.py --suite=keras_hub --keras_hub=CHECKOUT --only=vit,clip
    python tools/every_model.py --suite=applications --write      # and writes the table of docs/models.md
    python tools/every_model.py --suite=keras_hub --keras_hub=CHECKOUT --layout_map=auto --write
    python tools/every_model.py --suite=applications --results=FILE       # continues an interrupted run

KerasHub's wheel has no tests, but a checkout of its repository has them. Each test of a backbone contains a small
configuration and an input, which this tool uses. Each model runs in a separate process, without dropout. A head sums
each output to a few numbers, and training takes three steps of SGD. If losses differ by more than 1e-4, for example
because batch normalization of few values amplifies rounding, the model is also trained in float64.
"""

import concurrent.futures
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from absl import app, flags

_SUITE = flags.DEFINE_enum("suite", "applications", ["applications", "keras_hub"], "The suite of models to train.")
_KERAS_HUB = flags.DEFINE_string("keras_hub", None, "A checkout of KerasHub's repository.")
_ONLY = flags.DEFINE_list("only", [], "Train only models with one of these texts in the name.")
_LAYOUT_MAP = flags.DEFINE_enum(
    "layout_map", "none", ["none", "auto"], "auto: tensor parallelism over two of the four devices."
)
_STAGE = flags.DEFINE_integer("stage", 3, "ZeRO stage.")
_PROCESSES = flags.DEFINE_integer("processes", 2, "Number of models to train at the same time.")
_SECONDS = flags.DEFINE_integer("seconds", 900, "Time limit for one model, in seconds.")
_WRITE = flags.DEFINE_bool("write", False, "Write the table of docs/models.md.")
_RESULTS = flags.DEFINE_string(
    "results", None, "A file that keeps results. A model with a result is not trained again."
)
_CHILD = flags.DEFINE_string("child", None, "For internal use: the model that this process trains.")

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "models.md"
BATCH, STEPS, DEVICES = 8, 3, 4
SAME = 1e-4  # Relative tolerance of losses.

# A family of keras.applications, its smallest model, and the size of its images.
APPLICATIONS = {
    "ConvNeXtTiny": 64, "DenseNet121": 64, "EfficientNetB0": 64, "EfficientNetV2B0": 64, "InceptionResNetV2": 96,
    "InceptionV3": 96, "MobileNet": 64, "MobileNetV2": 64, "MobileNetV3Small": 64, "NASNetMobile": 64, "ResNet50": 64,
    "ResNet50V2": 64, "VGG16": 64, "Xception": 80,
}  # fmt: skip


def application(name: str):
    """Return a model, an input for it, and a description of its configuration."""
    import keras
    import numpy as np

    size = APPLICATIONS[name]
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    images = np.random.RandomState(0).uniform(0, 255, (BATCH, size, size, 3)).astype("float32")
    return model, images, f"{size} x {size} pixels"


class _Captured(Exception):
    pass


def keras_hub_test(path: str) -> dict:
    """Return the arguments with which a test of KerasHub calls `run_backbone_test`."""
    from keras_hub.src.tests.test_case import TestCase

    found: dict = {}

    def capture(self, **arguments):
        found.update(arguments)
        raise _Captured

    TestCase.run_backbone_test = capture
    TestCase.run_vision_backbone_test = capture
    module = importlib.import_module(path)
    cases = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, TestCase)]
    for case in (case for case in cases if case.__module__ == path):
        for name in sorted(name for name in dir(case) if name.startswith("test_")):
            test = case(name)
            try:
                test.setUp()
                getattr(test, name)()
            except _Captured:
                return found
            except Exception:
                continue
        if hasattr(test, "init_kwargs") and hasattr(test, "input_data"):
            backbone = next(cls for name, cls in vars(module).items() if name.endswith("Backbone"))
            return {"cls": backbone, "init_kwargs": test.init_kwargs, "input_data": test.input_data}
    raise LookupError("no test says how it is made and called")


def keras_hub_backbone(path: str):
    import keras
    import numpy as np

    found = keras_hub_test(path)
    options = found["init_kwargs"]
    model = found["cls"](**options)
    rs = np.random.RandomState(0)
    vocabulary = options.get("vocabulary_size", 0)

    def varied(name: str, value):
        """Return a batch of different samples."""
        value = np.array(keras.ops.convert_to_numpy(value))
        value = np.concatenate([value] * BATCH)[:BATCH]
        if value.dtype.kind == "f" and "mask" not in name:
            return (value + rs.uniform(-0.5, 0.5, value.shape)).astype(value.dtype)
        if "token_ids" in name and vocabulary:
            return rs.randint(1, vocabulary, value.shape).astype(value.dtype)
        return value

    data = found["input_data"]
    data = {k: varied(k, v) for k, v in data.items()} if isinstance(data, dict) else varied("", data)
    simple = {k: v for k, v in options.items() if isinstance(v, int | float | str | list | tuple) and k != "dtype"}
    return model, data, ", ".join(f"{k}={v}" for k, v in simple.items())


def head(model, data):
    """Return the model with a few numbers per sample as output, computed from all per-sample outputs."""
    import keras

    flat = []
    for output, value in zip(model.outputs, keras.tree.flatten(model(data)), strict=True):
        if not output.dtype.startswith(("float", "bfloat")) or len(value.shape) == 0 or value.shape[0] != BATCH:
            continue
        if len(output.shape) < 2 or output.shape[-1] is None:
            output = keras.ops.expand_dims(output, -1)
        numbers = keras.layers.Dense(4, activation="tanh")(output)
        if len(numbers.shape) > 2:
            numbers = keras.ops.mean(numbers, axis=tuple(range(1, len(numbers.shape) - 1)))
        flat.append(numbers)
    return keras.Model(model.input, flat[0] if len(flat) == 1 else keras.layers.Concatenate()(flat))


def still(model) -> None:
    """Turn off all random layers."""
    for layer in model._flatten_layers():
        for rate in ("rate", "drop_path_rate", "_dropout", "dropout", "dropout_rate", "attention_dropout"):
            if isinstance(getattr(layer, rate, None), int | float):
                setattr(layer, rate, 0.0)


def strategy(model, data):
    import tfshard

    if _LAYOUT_MAP.value == "auto":
        mesh = tfshard.create_mesh(batch=DEVICES // 2, model=2)
        layout_map = tfshard.auto_layout_map(model, mesh, inputs=data)
        return tfshard.ShardedStrategy(mesh, layout_map=layout_map, zero_stage=_STAGE.value)
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=DEVICES), zero_stage=_STAGE.value)


def share(model) -> float:
    """Return the share of a sharded model's parameters that the model axis shards."""
    import math

    sizes = [(math.prod(v.shape), "model" in v.value.layout.storage) for v in model.trainable_variables]
    return sum(size for size, is_sharded in sizes if is_sharded) / sum(size for size, _ in sizes)


def train(name: str, *, sharded: bool) -> dict:
    import keras
    import numpy as np

    import tfshard

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    build: Callable = application if _SUITE.value == "applications" else keras_hub_backbone
    backbone, data, configuration = build(name)
    still(backbone)
    model = head(backbone, data)
    optimizer = keras.optimizers.SGD(0.01)
    if sharded:
        tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy(model, data))
    else:
        model.compile(optimizer, "mse", jit_compile=False)
    targets = np.random.RandomState(1).normal(size=(BATCH, model.output_shape[-1])).astype("float32")
    losses, times = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(float(model.train_on_batch(data, targets)))
        times.append(time.perf_counter() - start)
    return {
        "losses": losses, "first": times[0], "step": times[-1], "parameters": model.count_params(),
        "configuration": configuration,
        "weights": {v.path: np.array(v.numpy(), dtype="float64") for v in model.weights},
        "share": share(model) if sharded else 0.0,
    }  # fmt: skip


def child(name: str) -> dict:
    """Return the result of a model, including its result in float64 if rounding is amplified."""
    import keras

    import tfshard

    tfshard.initialize(num_devices=DEVICES, device_type="CPU")
    found = compare(name)
    if found["result"] == "different":
        keras.config.set_floatx("float64")
        again = compare(name)
        found["why"] = f"in float64 {again['result']}, apart by {again.get('apart', float('nan')):.1e}"
        found["result"] = "same in float64" if again["result"] == "same" else "different"
    return found


def compare(name: str) -> dict:
    import numpy as np

    import tfshard

    try:
        plain = train(name, sharded=False)
    except Exception as error:
        return {"name": name, "result": "not tried", "why": f"plain Keras: {type(error).__name__}: {str(error)[:300]}"}
    found = {"name": name, "parameters": plain["parameters"], "configuration": plain["configuration"],
             "plain": plain["losses"], "first": plain["first"], "step": plain["step"]}  # fmt: skip
    try:
        ours = train(name, sharded=True)
    except Exception as error:
        traceback.print_exc()
        refused = isinstance(error, tfshard.errors.ShardingError)
        return found | {"result": "refused" if refused else "failed", "why": f"{type(error).__name__}: {error}"}
    if _LAYOUT_MAP.value == "auto":
        found["share"] = ours["share"]
    found |= {"sharded": ours["losses"], "sharded_first": ours["first"], "sharded_step": ours["step"]}
    # The configuration of a test may give non-finite losses.
    if not np.all(np.isfinite(plain["losses"])):
        return found | {"result": "not tried", "why": "plain Keras: the loss is not finite"}
    apart = np.abs(np.subtract(ours["losses"], plain["losses"])) / np.abs(plain["losses"])
    found["weights"] = max(float(np.abs(v - plain["weights"][k]).max(initial=0)) for k, v in ours["weights"].items())
    return found | {"result": "same" if apart.max() < SAME else "different", "apart": float(apart.max())}


def names() -> list[str]:
    if _SUITE.value == "applications":
        found = list(APPLICATIONS)
    else:
        root = pathlib.Path(_KERAS_HUB.value)
        tests = sorted(root.glob("keras_hub/src/models/*/*_backbone_test.py"))
        found = [".".join(test.relative_to(root).with_suffix("").parts) for test in tests]
    return [name for name in found if not _ONLY.value or any(part in short(name) for part in _ONLY.value)]


def short(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_backbone_test")


def run_child(name: str) -> dict:
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--nowrite", f"--child={name}"]
    paths = [_KERAS_HUB.value or "", os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=_SECONDS.value)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"name": name, "result": "failed", "why": f"not done after {_SECONDS.value} s"}
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        why = " ".join(line for line in errors.splitlines()[-3:])
        return {"name": name, "result": "failed", "why": f"exit status {process.returncode}: {why}"}
    return json.loads(lines[-1])


def row(found: dict) -> str:
    numbers = [
        short(found["name"]),
        f"{found['parameters']:,}" if "parameters" in found else "",
        f"{found['plain'][-1]:.6f}" if "plain" in found else "",
        f"{found['sharded'][-1]:.6f}" if "sharded" in found else "",
        f"{found['first']:.1f}" if "first" in found else "",
        f"{found['sharded_first']:.1f}" if "sharded_first" in found else "",
        f"{found['sharded_step'] / found['step']:.2f}" if "sharded_step" in found else "",
        found["result"] + (f": {found['why'][:160]}" if "why" in found else ""),
        *([f"{found['share']:.0%}" if "share" in found else ""] if _LAYOUT_MAP.value == "auto" else []),
        found.get("configuration", ""),
    ]
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in numbers) + " |"


def main(argv: list[str]) -> None:
    del argv
    if _CHILD.value:
        found = child(_CHILD.value)
        print(json.dumps(found))
        return
    lines = [
        "| Model | Parameters | Loss, one device | Loss, sharded | First step, s | Sharded | Step, ratio | Result "
        + ("| Over the model axis " if _LAYOUT_MAP.value == "auto" else "")
        + "| Configuration |",
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    print("\n".join(lines), flush=True)
    kept = pathlib.Path(_RESULTS.value) if _RESULTS.value else None
    known = {}
    if kept and kept.exists():
        known = {found["name"]: found for found in map(json.loads, kept.read_text().splitlines())}

    def result(name: str) -> dict:
        if name in known:
            return known[name]
        found = run_child(name)
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(found) + "\n")
        return found

    results = []
    with concurrent.futures.ThreadPoolExecutor(_PROCESSES.value) as pool:
        for found in pool.map(result, names()):
            results.append(found)
            print(row(found), flush=True)
    counts = {kind: sum(each["result"] == kind for each in results) for kind in sorted({r["result"] for r in results})}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if _WRITE.value:
        which = _SUITE.value + (" with automatic layouts" if _LAYOUT_MAP.value == "auto" else "")
        mark = f"<!-- The table of {which} is written by tools/every_model.py -->\n"
        before, _, after = DOCS.read_text().partition(mark)
        rest = after.partition("\n<!-- end -->")[2]
        table = "\n".join([*lines, *map(row, results)])
        DOCS.write_text(f"{before}{mark}\n{table}\n\n<!-- end -->{rest}")


if __name__ == "__main__":
    app.run(main)
