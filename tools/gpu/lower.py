"""Compile steps for GPUs that do not exist, and write what the GPUs would run."""

import collections
import dataclasses
import pathlib
import time

import keras
import tensorflow as tf

import tfshard
from tfshard.layouts import variable_layout
from tfshard.planning.variable_traffic import Collective
from tools.gpu import absent_gpus, configurations, lowered
from tools.gpu.configurations import CONFIGURATIONS, Configuration

TABLE = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_lowering.md"

# Variables of at least this size are in no group.
_GROUPED_BYTES = 1 << 10
# Gradients of at least this size are compressed, or reduced within each replica first.
_LARGE_BYTES = 200

# Why nodes without a GPU kernel are no fault. TensorFlow runs these nodes on the host.
WITHOUT_KERNEL = {
    ("MatMul", ("int32",)): "the place of a device on the mesh: a product of a few numbers, by DTensor",
}
# Plain Keras has copies to the host, too. A step has at most this many more for each layer with weights.
COPIES_A_LAYER = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The lowered step of a configuration.

    Attributes:
        step: What the step runs on each device.
        plain: What plain Keras runs for the same model on one GPU.
        layers: The number of layers with weights.
        planned: The collectives of the plan. Empty where `strategy.plan` has none.
    """

    step: lowered.Step
    plain: lowered.Step
    layers: int
    planned: tuple[Collective, ...]


def lower(configuration: Configuration) -> Result:
    """Compile a step. Call `absent_gpus.start` before."""
    keras.backend.clear_session()
    variable_layout.LEAST_BY_REPLICAS_BYTES = _LARGE_BYTES
    analyzer = tfshard.ParameterAnalyzer(group_threshold_bytes=_GROUPED_BYTES)
    strategy = tfshard.ShardedStrategy(
        absent_gpus.create_mesh(**configuration.mesh), **{"analyzer": analyzer, **configuration.strategy}
    )
    model = configurations.build(configuration)
    if configuration.pipeline:
        model = tfshard.pipeline(model, 2, microbatches=2)
    else:
        model = tfshard.as_distributed(model)
    model.compile(configuration.optimizer(), configurations.families.LOSS, strategy=strategy, **configuration.compile)
    if configuration.recompute:
        strategy.recompute(model)
    before = lowered.functions()
    _run(model, configuration)
    known = lowered.functions()
    names = [name for name in lowered.device_functions(known, before) if len(known[name].node_def) > 1]
    planned = (
        ()
        if configuration.pipeline or configuration.run != "fit"
        else strategy.plan(model, inputs=configurations.batch(configuration)[0]).collectives
    )
    return Result(
        step=lowered.read(names, known),
        plain=_plain(configuration),
        layers=len({id(layer) for layer in model._flatten_layers() if layer.weights and not layer._layers}),
        planned=planned,
    )


def _run(model: keras.Model, configuration: Configuration) -> None:
    x, y = configurations.batch(configuration)
    arguments = {"x": x, "batch_size": configurations.SAMPLES, "verbose": 0}
    getattr(model, configuration.run)(**arguments, **({} if configuration.run == "predict" else {"y": y}))


def _plain(configuration: Configuration) -> lowered.Step:
    """Trace the step of plain Keras, without running it."""
    keras.backend.clear_session()
    model = configurations.build(configuration)
    model.compile(configuration.optimizer(), configurations.families.LOSS, jit_compile=False)
    x, y = configurations.batch(configuration)
    if configuration.run == "fit":
        model.optimizer.build(model.trainable_variables)
    step = {"fit": model.train_step, "evaluate": model.test_step, "predict": model.predict_step}[configuration.run]
    data = tf.nest.map_structure(tf.convert_to_tensor, (x,) if configuration.run == "predict" else (x, y))
    traced = tf.function(step, autograph=False).get_concrete_function(data)
    return lowered.read([traced.function_def.signature.name], lowered.functions())


# --- the table ----------------------------------------------------------------------------------------------


def faults(result: Result) -> list[str]:
    """Return what a GPU would not run, or not in one order, or would copy to the host too often."""
    step = result.step
    found = [f"{op}{dtypes} has no GPU kernel" for op, dtypes in step.without_kernel - _named(result)]
    found += [f"NCCL has no {dtype} for an {kind}" for kind, dtype in sorted(step.not_of_nccl)]
    found += [f"{step.unordered} pairs of collectives have no order"] * bool(step.unordered)
    more = step.to_host.total() - result.plain.to_host.total()
    if more > COPIES_A_LAYER * result.layers:
        found.append(f"{more} copies to the host more than plain Keras, in {result.layers} layers")
    return found


def _named(result: Result) -> collections.Counter:
    """Return the nodes without a kernel that are no fault: named ones, and those of plain Keras."""
    named = {key: count for key, count in result.step.without_kernel.items() if key in WITHOUT_KERNEL}
    return collections.Counter(named) + result.plain.without_kernel


def _row(name: str, result: Result) -> str:
    step, plain = result.step, result.plain
    counts = collections.Counter((kind, dtype) for kind, dtype, _ in step.collectives)
    collectives = ", ".join(f"{count} {kind} {dtype}" for (kind, dtype), count in sorted(counts.items()))
    missing = ", ".join(f"{count} {op}({', '.join(types)})" for (op, types), count in step.without_kernel.items())
    cells = [
        name,
        collectives,
        _kibibytes(_sent(step)),
        _kibibytes(_planned(result.planned)) if result.planned else "-",
        step.unordered,
        f"{step.launches} ({plain.launches})",
        missing or 0,
        f"{step.to_host.total()} ({plain.to_host.total()})",
        f"{step.to_device.total()} ({plain.to_device.total()})",
        result.layers,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _sent(step: lowered.Step) -> dict[str, int]:
    """Return the bytes of the full tensors of collectives, by kind."""
    found: dict[str, int] = collections.defaultdict(int)
    for kind, dtype, elements in step.collectives:
        found[kind] += elements * tf.as_dtype(dtype).size
    return found


def _planned(collectives: tuple[Collective, ...]) -> dict[str, int]:
    found: dict[str, int] = collections.defaultdict(int)
    for each in collectives:
        found[each.kind] += each.count * (each.bytes or 0)
    return found


def _kibibytes(found: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count / 1024:.1f}" for kind, count in sorted(found.items()))


def table(results: dict[str, Result]) -> str:
    """Return the table in Markdown, with totals."""
    lines = [
        "| configuration | collectives | KiB | KiB of the plan | pairs without an order | kernels (plain Keras) | "
        "nodes without a kernel | copies to the host (plain Keras) | copies to the device (plain Keras) | layers |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(name, result) for name, result in results.items()),
    ]
    return "\n".join(lines)


def main(only: list[str], *, write: bool) -> int:
    """Compile the configurations with a text of `only` in their names, or all. Returns the exit code."""
    absent_gpus.start()
    results: dict[str, Result] = {}
    found = 0
    for name, configuration in CONFIGURATIONS.items():
        if not only or any(text in name for text in only):
            results[name] = lower(configuration)
            print(_row(name, results[name]), flush=True)
            for fault in faults(results[name]):
                found += 1
                print(f"  FAULT: {fault}", flush=True)
            if only:
                print(f"  to the host: {dict(results[name].step.to_host)}")
                print(f"  to the device: {dict(results[name].step.to_device)}")
    print(f"{len(results)} configurations, {found} faults")
    if write:
        versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {time.strftime('%Y-%m-%d')}"
        TABLE.write_text(_INTRODUCTION.format(versions=versions) + table(results) + "\n")
    return min(found, 1)


_INTRODUCTION = """# Steps compiled for GPUs, without GPUs

`python -m tools.gpu lower --write` made this table ({versions}). DTensor compiled each step for four GPUs that do not
exist (eight for replicas x model), and nothing ran. Models are tiny. A group takes variables below 1 KiB. Gradients
from 200 bytes on are compressed, or reduced within replicas. Numbers are of one step on one device.

- *Kernels* are the nodes that compute on the GPU, before TensorFlow's graph optimizer, beside those of plain Keras.
- *Nodes without a kernel* run on the host: `MatMul` of int32 is the place of a device on its mesh, a few numbers.
- *Copies to the host* make the host wait for the device. Both columns are before the graph optimizer.
- *KiB* counts the full tensor of each collective: the result of a gather, the input of a reduction.

"""
