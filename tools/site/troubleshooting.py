"""Write docs/troubleshooting.md: each error of tfshard, with examples that raise it and their messages.

    python -m tools.site.troubleshooting --write     # without the flag: prints the differences from the file

Every example is run, and the page shows the actual messages.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping

import tfshard
from tfshard import errors

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "troubleshooting.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Code that raises an error.

    Attributes:
        error: The name of the error's class.
        title: The mistake in a few words.
        remedy: The advice.
        code: The code. It runs after `SETUP`, and its last line raises.
        launched: True to run the example in two clients.
        lines: The number of message lines on the page.
    """

    error: str
    title: str
    remedy: str
    code: str
    launched: bool = False
    lines: int = 8


SETUP = """\
import keras
import numpy as np
import tensorflow as tf
import tfshard

tfshard.initialize(num_devices=4, device_type="CPU")
keras.utils.set_random_seed(0)
x, y = np.ones((8, 6), "float32"), np.ones((8, 10), "float32")


def build():
    layers = [keras.Input((6,)), keras.layers.Dense(12, name="up"), keras.layers.Dense(10, name="down")]
    return tfshard.as_distributed(keras.Sequential(layers, name="mlp"))


def compiled(**options):
    model = build()
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options))
    return model
"""

EXAMPLES = (
    Example(
        error="InitializationError",
        title="Devices are asked for a second time, and differently",
        remedy="Call `tfshard.initialize` once, before TensorFlow makes its first tensor. TensorFlow fixes its devices then: for "
        "other devices start the process anew. In a notebook, restart the runtime.",
        code="tfshard.initialize(num_devices=2)",
    ),
    Example(
        error="MeshError",
        title="A mesh of more devices than there are",
        remedy="Give `tfshard.initialize` as many logical devices, or let one axis take the rest: `create_mesh(batch=-1)`.",
        code="tfshard.create_mesh(batch=64)",
    ),
    Example(
        error="MeshError",
        title="A strategy without a mesh",
        remedy="Make the mesh with `tfshard.create_mesh`, which starts the devices.",
        code='tfshard.ShardedStrategy({"batch": 4})',
    ),
    Example(
        error="LayoutError",
        title="An axis that the mesh does not have",
        remedy="Write the axis as in `create_mesh`.",
        code="""\
mesh = tfshard.create_mesh(batch=2, model=2)
tfshard.ShardedStrategy(mesh, {".*up/kernel": (None, "modle")})""",
    ),
    Example(
        error="LayoutError",
        title="A pattern that matches nothing",
        remedy="A pattern has to match the whole path, which begins with the name of a Sequential model. The message has the "
        "paths that there are. `layout_map.add(pattern, axes, optional=True)` allows it.",
        code="""\
layout_map = tfshard.LayoutMap({"up/kernel": (None, "model")})
layout_map.replicated(".*(bias|down/kernel)")
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="LayoutError",
        title="A mesh with a model axis, and no layout map",
        remedy="Use `layout_map='auto'`, write a layout map, or leave the axis out: its devices would all compute the same.",
        code="""\
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2))
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="LayoutError",
        title="An axis that does not divide its dim",
        remedy="Shard another dim, take another size of the axis, or pad the layer. Only the batch axis pads.",
        code="""\
layout_map = tfshard.LayoutMap({".*down/kernel": (None, "model")})
layout_map.replicated(".*")
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, model=4), layout_map)
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="StrategyError",
        title="A stage that there is not",
        remedy="[Stages](stages.md) has the four.",
        code="tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=4)",
    ),
    Example(
        error="StrategyError",
        title="XLA",
        remedy="Leave `jit_compile` out. DTensor compiles the step.",
        code="""\
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
build().compile("sgd", "mse", strategy=strategy, jit_compile=True)""",
    ),
    Example(
        error="StrategyError",
        title="A model that another strategy has",
        remedy="`compile` takes it over: `model.compile(..., strategy=other)`. What it has in common with other models goes "
        "with it; they are compiled with that strategy, too.",
        code="""\
model = compiled()
other = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map="auto")
other.report(model)""",
    ),
    Example(
        error="StrategyError",
        title="A batch that is not on the mesh, in a function of your own",
        remedy="Take batches from `strategy.experimental_distribute_dataset` ([custom loops](custom_loops.md)).",
        code="""\
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
step = tf.function(lambda batch: strategy.run(tf.reduce_sum, args=(batch,)))
step(x)""",
    ),
    Example(
        error="UnsupportedLayerError",
        title="A layer that no mesh computes",
        remedy="[Layers](layers.md) lists them with what to do instead; preprocessing belongs in the input pipeline.",
        code="""\
layers = [keras.Input((8, 8, 3)), keras.layers.RandomElasticTransform(name="elastic")]
model = tfshard.as_distributed(keras.Sequential(layers, name="images"))
model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))""",
    ),
    Example(
        error="UnsupportedOperationError",
        title="An operation of your own code that DTensor refuses",
        remedy="The message names the layer and the line. Write it with other operations of keras.ops "
        "([which are tried](operations.md)), or over the samples one by one.",
        code="""\
def by_time(t):
    return t * tf.cast(tf.timestamp(), tf.float32)


layers = [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Lambda(by_time, name="mine")]
model = tfshard.Sequential(layers, name="mlp")
model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
model.train_on_batch(x[:, :4], y[:, :4])""",
    ),
    Example(
        error="PlanMismatchError",
        title="A step that sends something else than its plan",
        remedy="A plan is of the mesh, stage and layout map that it was made with: make it by `strategy.plan(model)`. Where it "
        "is that and differs, [planning](planning.md#turns) says what is not predicted.",
        code="""\
profile = tfshard.profile_step(compiled(zero_stage=3), (x, y))
tfshard.measure.assert_matches_plan(profile, tfshard.plan(build(), {"batch": 4}, zero_stage=0, optimizer="sgd"))""",
        lines=2,
    ),
    Example(
        error="ConsistencyError",
        title="Copies of a variable that differ",
        remedy="Something wrote to one device only: a DTensor operation of your own, or a device with a fault. Restore the last "
        "checkpoint.",
        code="""\
from tensorflow.experimental import dtensor

strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), {".*": ()}, analyzer=None)
model = build()
model.compile("sgd", "mse", strategy=strategy)
model.train_on_batch(x, y)
bias = model.get_layer("down").bias.value.buffer
pieces = dtensor.unpack(bias.value())
pieces[3] += 1.0
bias.assign(dtensor.pack(pieces, dtensor.Layout.batch_sharded(strategy.mesh, "batch", 1)))
strategy.check_consistency(model)""",
    ),
    Example(
        error="VerificationError",
        title="A loss for replicas that are added up",
        remedy="A step has the whole batch, and `num_replicas_in_sync` is 1: write the loss as for one device. "
        "[Verifying](verifying.md) says how to read the rest.",
        code="""\
def summed(y_true, y_pred):
    error = tf.reduce_mean(tf.square(y_true - y_pred), -1)
    return tf.reduce_sum(error) if tf.distribute.has_strategy() else tf.reduce_mean(error)


model = build()
model.compile("sgd", summed, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
tfshard.verify(model, (x, y)).raise_if_different()""",
        lines=1,
    ),
    Example(
        error="LayoutWarning",
        title="A layout map that works, and sends more than it has to",
        remedy="Do what the warning says, or use `layout_map='auto'`. The numbers are right either way.",
        code="""\
layout_map = tfshard.LayoutMap()
layout_map.column("mlp/(up|down)")
model = build()
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
model.compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="NumericsWarning",
        title="An embedding that Keras on TensorFlow would update otherwise",
        remedy="Give `tables=` the embedding's path for the numbers of Keras on TensorFlow, or ignore the warning: the dense gradient "
        "is what Keras on JAX uses.",
        code="""\
words = keras.layers.Embedding(16, 4, name="words")
model = keras.Sequential([keras.Input((6,), dtype="int32"), words, keras.layers.Flatten()], name="reader")
model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
model.fit(np.zeros((8, 6), "int32"), np.zeros((8, 24)), verbose=0)""",
    ),
    Example(
        error="TelemetryError",
        title="Wrong arguments of `Telemetry`",
        remedy="None turns profiles off.",
        code="tfshard.callbacks.Telemetry(profile_every=0)",
    ),
    Example(
        error="CheckpointError",
        title="A checkpoint that is not there",
        remedy="`manager.steps()` has those that are.",
        code="""\
manager = tfshard.CheckpointManager("run/checkpoints")
manager.restore(compiled())""",
    ),
    Example(
        error="CheckpointCorruptError",
        title="A checkpoint that was damaged or edited",
        remedy="`manager.restore(model, step)` takes an earlier one. Nothing was changed.",
        code="""\
import pathlib

model = compiled()
manager = tfshard.CheckpointManager("run/checkpoints")
manager.save(model, 1)
manifest = pathlib.Path("run/checkpoints/step-00000001/manifest.json")
manifest.write_text(manifest.read_text().replace('"step":1', '"step":2'))
manager.restore(model)""",
    ),
    Example(
        error="CheckpointMismatchError",
        title="A checkpoint of another model",
        remedy="The message has what each of the two has and the other has not. Mesh, stage, layout map and groups may differ.",
        code="""\
manager = tfshard.CheckpointManager("run/checkpoints")
manager.save(compiled(), 1)
other = tfshard.Sequential([keras.Input((6,)), keras.layers.Dense(10, name="down")], name="mlp")
other.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
manager.restore(other)""",
    ),
    Example(
        error="ClientError",
        title="A client that does not come",
        remedy="All clients have to do the same things in the same order: collectives, saves and reports too "
        "([launching](launching.md#what-all-clients-do-together)).",
        code="""\
import time

# Under tfshard launch --num_processes=2.
if tfshard.collectives.rank() == 0:
    tfshard.collectives.barrier(timeout=1)
else:
    time.sleep(60)""",
        launched=True,
    ),
    Example(
        error="CollectiveError",
        title="A value that collectives do not take",
        remedy="They take numpy arrays, numbers and eager tensors; what is on the mesh is global already.",
        code='tfshard.collectives.all_reduce(np.array(["a", "b"]))',
    ),
    Example(
        error="LaunchError",
        title="A run that cannot be launched as asked",
        remedy="`tfshard --help` has the flags.",
        code="""\
from tfshard.launch import Launch

Launch(command=("train.py",), num_processes=0)""",
    ),
)


def raised(example: Example) -> str:
    """Run an example in an empty folder, and return its message with the class name in front."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = pathlib.Path(folder, "example.py")
        path.write_text(f"{SETUP}\n\n{example.code}\n")
        os.chdir(folder)
        try:
            if example.launched:
                return launched(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", category=errors.LayoutWarning)
                warnings.filterwarnings("error", category=errors.NumericsWarning)
                runpy.run_path(str(path), run_name="example")
        except (errors.ShardingError, errors.LayoutWarning, errors.NumericsWarning) as error:
            return alike(f"{type(error).__name__}: {error}".replace(f"{folder}/", ""))
        finally:
            os.chdir(here)
    raise AssertionError(f"Nothing was raised by: {example.code}")


def launched(path: pathlib.Path) -> str:
    """Run a program in two clients, and return the last error message of client 0."""
    command = [sys.executable, "-m", "tfshard", "launch", "--num_processes=2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = re.findall(r"^\[client 0\] tfshard\.errors\.(\w+Error: .*)$", done.stdout + done.stderr, re.MULTILINE)
    assert said, done.stdout + done.stderr
    return str(said[-1])


def alike(message: str) -> str:
    """Remove what differs between processes: call lines, addresses, and DTensor's location of an operation."""
    # AutoGraph adds these lines before the message.
    message = re.sub(r"in user code:\n.*?\n    \w+Error: ", "", message, flags=re.DOTALL)
    message = re.sub(r" at 0x[0-9a-f]+", "", message)
    return re.sub(r"(?<=Received from DTensor: )\S.*?: error: ", "", message)


def shown(example: Example) -> str:
    """Return the first lines of an example's message, wrapped to the width of the page."""
    message, count = raised(example), example.lines
    lines = [part for line in message.splitlines() for part in textwrap.wrap(line, 118, break_on_hyphens=False) or [""]]
    return "\n".join(lines[:count] + ["..."] * (len(lines) > count))


def classes() -> list[type]:
    """Return the errors and warnings in the order of their definition, the base class first."""
    found = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
    return sorted(found, key=lambda each: inspect.getsourcelines(each)[1])


BEFORE = """\
# Troubleshooting

Every error that tfshard raises for wrong input, what it means, an example that raises it, and what to do. All but the warnings are a
`tfshard.ShardingError`, which is a `ValueError`. Look for a part of your message. `python -m tools.site.troubleshooting --write` wrote
this page; a test runs each example and compares.

The examples begin with:
"""


def page(messages: Mapping[str, str]) -> str:
    """Return the text of docs/troubleshooting.md.

    Args:
        messages: The message of each example as shown, by the example's title.
    """
    parts = [f"{BEFORE}\n```py\n{SETUP}```\n"]
    for cls in classes():
        parts.append(f"## {cls.__name__}\n\n{inspect.getdoc(cls)}\n")
        for example in EXAMPLES:
            if example.error == cls.__name__:
                parts.append(f"### {example.title}\n\n```py\n{example.code}\n```\n")
                parts.append(f"```text\n{messages[example.title]}\n```\n")
                parts.append(f"{example.remedy}\n")
    parts.append(AFTERWARDS)
    return "\n".join(parts)


AFTERWARDS = """\
## What is not an error of tfshard

- A step that fails raises what plain Keras raises, with the layer and the line: `InvalidArgumentError` of an id that a table does
  not have, `ResourceExhaustedError` when memory ends. Variables are as before the step, or the message names those that are not.
  For memory: [choose a mesh](choose_a_mesh.md).
- `tfshard.errors.VersionWarning` at import: these versions of TensorFlow and Keras were not tried together. `tools/test.sh --quick`
  tells whether they do.
- A launched run that ends says which client did so first, and why: [launching](launching.md#when-a-client-fails).
- Numbers that look wrong: [verify](verifying.md) names the first layer and operation that differ from one device.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Write the page.")
    write = parser.parse_args().write
    tfshard.initialize(num_devices=4, device_type="CPU")
    text = page({example.title: shown(example) for example in EXAMPLES})
    if write:
        PAGE.write_text(text)
        return
    sys.stdout.writelines(difflib.unified_diff(PAGE.read_text().splitlines(True), text.splitlines(True)))


if __name__ == "__main__":
    main()
