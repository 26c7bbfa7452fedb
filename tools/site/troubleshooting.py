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

# The allocator of oneDNN records the bytes that profiles tell. TensorFlow uses it by itself on some CPUs only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import tfshard  # noqa: E402
from tfshard import errors  # noqa: E402

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
        title="Devices requested a second time, with other arguments",
        remedy="Call `tfshard.initialize` once, before TensorFlow makes its first tensor. TensorFlow fixes its "
        "devices at that time. To use other devices, start a new process; in a notebook, restart the runtime.",
        code="tfshard.initialize(num_devices=2)",
    ),
    Example(
        error="MeshError",
        title="A mesh with too many devices",
        remedy="Call `tfshard.initialize` with the number of devices of the mesh, or let one axis take all "
        "remaining devices: `create_mesh(batch=-1)`.",
        code="tfshard.create_mesh(batch=64)",
    ),
    Example(
        error="MeshError",
        title="A mesh that `create_mesh` did not make",
        remedy="Make the mesh with `tfshard.create_mesh`, which starts the devices. Without a mesh, a "
        "strategy shards over all devices.",
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
        remedy="A pattern must match the full path, which begins with the name of a Sequential model. The message "
        "lists the existing paths. `layout_map.add(pattern, axes, optional=True)` allows a pattern without a "
        "match.",
        code="""\
layout_map = tfshard.LayoutMap({"up/kernel": (None, "model")})
layout_map.replicated(".*(bias|down/kernel)")
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="LayoutError",
        title="A mesh with a model axis, and no layout map",
        remedy="Use `layout_map='auto'`, write a layout map, or leave the axis out: all devices of the axis "
        "would compute the same values.",
        code="""\
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2))
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="LayoutError",
        title="An axis that does not divide its dim",
        remedy="Shard another dim, choose another size of the axis, or pad the layer. Only the batch axis pads.",
        code="""\
layout_map = tfshard.LayoutMap({".*down/kernel": (None, "model")})
layout_map.replicated(".*")
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, model=4), layout_map)
build().compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="StrategyError",
        title="An unknown ZeRO stage",
        remedy="[Stages](stages.md) describes the four stages.",
        code="tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=4)",
    ),
    Example(
        error="StrategyError",
        title="A model of another strategy",
        remedy="`compile` moves the model: `model.compile(..., strategy=other)`. Variables that it shares with "
        "other models move, too: compile those models with the same strategy.",
        code="""\
model = compiled()
other = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map="auto")
other.report(model)""",
    ),
    Example(
        error="StrategyError",
        title="A batch that is not on the mesh, in a custom tf.function",
        remedy="Take batches from `strategy.experimental_distribute_dataset` ([custom loops](custom_loops.md)).",
        code="""\
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
step = tf.function(lambda batch: strategy.run(tf.reduce_sum, args=(batch,)))
step(x)""",
    ),
    Example(
        error="DeviceMemoryError",
        title="Nothing that fits, with `strategy='auto'`",
        remedy="The message names the nearest misses. A smaller batch, more devices or mixed precision needs less memory. "
        "`tfshard.find_batch_size` raises this error, too, if not even the smallest batch trains.",
        code="""\
tfshard.initialize(memory_per_device="1KiB")
model = build()
model.compile("sgd", "mse", strategy="auto")
model.fit(x, y, verbose=0)""",
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
        title="An operation that DTensor refuses",
        remedy="The message names the layer and the line. Write it with other operations of keras.ops ([tested "
        "operations](operations.md)), or for each sample separately.",
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
        title="A step that differs from its plan",
        remedy="A plan belongs to one mesh, stage and layout map: make the plan with `strategy.plan(model)`. If "
        "that plan differs from the step, [planning](planning.md#turns) lists the traffic that is not "
        "predicted.",
        code="""\
profile = tfshard.profile_step(compiled(zero_stage=3), (x, y))
tfshard.measure.assert_matches_plan(profile, tfshard.plan(build(), {"batch": 4}, zero_stage=0, optimizer="sgd"))""",
        lines=2,
    ),
    Example(
        error="ConsistencyError",
        title="Copies of a variable that differ",
        remedy="Something wrote to only one device: custom DTensor code, or a faulty device. Restore the last "
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
        title="A loss that is written for summed replicas",
        remedy="A step sees the full batch, and `num_replicas_in_sync` is 1: write the loss as for one device. "
        "[Verifying](verifying.md) explains the report.",
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
        title="A layout map that sends more than necessary",
        remedy="Follow the warning, or use `layout_map='auto'`. The results are correct in both cases.",
        code="""\
layout_map = tfshard.LayoutMap()
layout_map.column("mlp/(up|down)")
model = build()
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
model.compile("sgd", "mse", strategy=strategy)""",
    ),
    Example(
        error="NumericsWarning",
        title="An embedding that Keras on TensorFlow updates differently",
        remedy="To match Keras on TensorFlow, give `tables=` the embedding's path. Otherwise ignore the warning: "
        "the dense gradient is what Keras on JAX uses.",
        code="""\
words = keras.layers.Embedding(16, 4, name="words")
model = keras.Sequential([keras.Input((6,), dtype="int32"), words, keras.layers.Flatten()], name="reader")
model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
model.fit(np.zeros((8, 6), "int32"), np.zeros((8, 24)), verbose=0)""",
    ),
    Example(
        error="TelemetryError",
        title="Wrong arguments of `Telemetry`",
        remedy="None disables profiles.",
        code="tfshard.callbacks.Telemetry(profile_every=0)",
    ),
    Example(
        error="CheckpointError",
        title="A checkpoint that does not exist",
        remedy="`manager.steps()` lists the existing checkpoints.",
        code="""\
manager = tfshard.CheckpointManager("run/checkpoints")
manager.restore(compiled())""",
    ),
    Example(
        error="CheckpointCorruptError",
        title="A checkpoint that was damaged or edited",
        remedy="Nothing was changed. `manager.restore(model, step)` restores an earlier checkpoint.",
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
        error="CheckpointStorageError",
        title="A remote directory that cannot be used",
        remedy="The message says what failed: the URL, a missing package, the credentials, or the network "
        "([remote directories](checkpoints.md#remote-directories)).",
        code='tfshard.CheckpointManager("gs://")',
    ),
    Example(
        error="CheckpointMismatchError",
        title="A checkpoint of another model",
        remedy="The message lists the variables that only the checkpoint or only the model has. Mesh, stage, "
        "layout map and groups may differ.",
        code="""\
manager = tfshard.CheckpointManager("run/checkpoints")
manager.save(compiled(), 1)
other = tfshard.Sequential([keras.Input((6,)), keras.layers.Dense(10, name="down")], name="mlp")
other.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
manager.restore(other)""",
    ),
    Example(
        error="ClientError",
        title="A client that does not take part",
        remedy="All clients must do the same operations in the same order, including collectives, saves and reports "
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
        title="A value that collectives do not support",
        remedy="Collectives take numpy arrays, numbers and eager tensors. Values on the mesh are already global.",
        code='tfshard.collectives.all_reduce(np.array(["a", "b"]))',
    ),
    Example(
        error="ClusterError",
        title="Variables of a cluster that do not make a run",
        remedy="`tfshard doctor --cluster` prints what each system's variables say ([clusters](clusters.md)).",
        code="""\
from tfshard import clusters

clusters.find_run({"RANK": "0", "WORLD_SIZE": "2"})""",
    ),
    Example(
        error="LaunchError",
        title="A run that cannot be launched as requested",
        remedy="`tfshard docs launching` describes the flags.",
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

This page lists the errors that tfshard raises for wrong input, each with its meaning, an example and a remedy. All except the warnings
are a `tfshard.ShardingError`, which is a `ValueError`. Search for a part of your message. `python -m tools.site.troubleshooting --write`
writes this page; a test runs each example and compares the messages.

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
## Other errors

- A step that fails raises the error of plain Keras, with the layer and the line: `InvalidArgumentError` for an id that is not in a
  table, `ResourceExhaustedError` without enough memory. The step changes no variable, or the message names the changed variables.
  For memory: [choose a mesh](choose_a_mesh.md).
- `indices[3,0] = [99] does not index into param shape [4,4]`: an id is not a row of a table of `tables=`. The operation's name in the
  message, such as `reader/words/.../ResourceGatherNd`, begins with the path of the Embedding layer. The message shows the shape of a device's local rows.
  Ids must be at least 0 and below the layer's `input_dim`.
- `tfshard.errors.VersionWarning` at import: these versions of TensorFlow and Keras have not been tested together. Test them with
  `tools/test.sh --quick`.
- A launched run that fails names the first client that failed, and why: [launching](launching.md#when-a-client-fails).
- Results that look wrong: [verify](verifying.md) names the first layer and operation that differ from one device.
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
