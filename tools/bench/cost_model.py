"""How well a step's time follows from what its graph says: fitted on some configurations, checked on others.

    python -m tools.bench.cost_model --measure=/tmp/steps.json     # half an hour: each configuration in a process
    python -m tools.bench.cost_model --fit=/tmp/steps.json

A configuration is a model, a mesh and a stage, with blocks computed again or a batch in parts. Of its step the graph
before it is expanded (`tfshard.planning.training_graph`) has on a device: operations of matrix products and of
convolutions, bytes that operations read and write, bytes that are updated, operations; and the plan has collectives and
their bytes. Devices of this machine share its cores: a step takes the sum over the devices, each of these at a price of
its own, found by least squares of relative errors, none below zero. Prices are fitted on every second configuration.
"""

import collections
import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from absl import app, flags

from tools.bench import common
from tools.report import models

_MEASURE = flags.DEFINE_string("measure", None, "Measure, into this file; what is there already is kept.")
_FIT = flags.DEFINE_string("fit", None, "Fit to what this file has.")
_ONE = flags.DEFINE_string("one", None, "Measure this configuration here, and print JSON.")

FEATURES = ("products", "convolutions", "moved", "updated", "operations", "collectives", "sent")
_STEPS, _EPOCHS = 6, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a model is trained: all of it JSON."""

    model: models.Model
    mesh: dict[str, int]
    stage: int = 3
    recompute: bool = False
    microbatches: int = 1

    @property
    def name(self) -> str:
        """A line."""
        model, mesh = self.model, " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        sizes = (
            f"{model.kind} {model.layers}x{model.width}, batch {model.batch}x{model.length}, {mesh}, stage {self.stage}"
        )
        return sizes + ", recomputed" * self.recompute + f", {self.microbatches} parts" * (self.microbatches > 1)


def _gpt(layers: int, width: int, batch: int = 8, length: int = 64, vocabulary: int = 2000) -> models.Model:
    heads = max(2, width // 64)
    return models.Model(
        kind="gpt", batch=batch, layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=length
    )


def configurations() -> list[Configuration]:
    """Models of different depth, width, batch and kind, on meshes of one to eight devices."""
    found = []
    for number, (layers, width) in enumerate(
        [(2, 128), (2, 256), (4, 128), (4, 256), (2, 512), (8, 128), (6, 256), (12, 128)]
    ):
        model = _gpt(layers, width)
        found.append(Configuration(model=model, mesh={"batch": 4}))
        found.append(Configuration(model=model, mesh={"batch": 4}, stage=number % 3))
        found.append(Configuration(model=model, mesh={"batch": (1, 2, 8)[number % 3]}))
    for layers, width in [(2, 256), (4, 256), (2, 512), (4, 128)]:
        found.append(Configuration(model=_gpt(layers, width, batch=16, length=128), mesh={"batch": 4}))
        found.append(Configuration(model=_gpt(layers, width), mesh={"batch": 2, "model": 2}))
        found.append(Configuration(model=_gpt(layers, width), mesh={"model": 4}, stage=0))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, recompute=True))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, microbatches=2))
    for kind in ("bert", "resnet50", "efficientnet", "lstm"):
        model = models.MODELS[kind]
        found += [Configuration(model=model, mesh={"batch": size}) for size in (2, 4)]
        found.append(Configuration(model=dataclasses.replace(model, batch=8), mesh={"batch": 4}, stage=0))
    return found


def measure(configuration: Configuration) -> dict[str, Any]:
    """The seconds of a step, and what its graph has, summed over the devices."""
    import keras

    import tfshard

    devices = math.prod(configuration.mesh.values())
    tfshard.initialize(num_devices=devices, device_type="CPU")
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**configuration.mesh), "auto" if "model" in configuration.mesh else None,
        configuration.stage, microbatches=configuration.microbatches,
    )  # fmt: skip
    model = tfshard.as_distributed(models.build(configuration.model))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, strategy=strategy)
    if configuration.recompute:
        strategy.recompute(model, "block_.*")
    x, y = models.data(configuration.model, _STEPS)
    found = graph_of(model, strategy, x[: configuration.model.batch], configuration.microbatches)
    plan = strategy.plan(model, inputs=x[: configuration.model.batch])
    found["collectives"] = sum(each.count for each in plan.collectives)
    found["sent"] = sum(each.count * (each.bytes or 0) for each in plan.collectives)
    times = common.fit_times(model, (x, y), batch_size=configuration.model.batch, epochs=_EPOCHS)
    return {"seconds": times["step"], **{name: devices * found[name] for name in FEATURES}}


def graph_of(model: Any, strategy: Any, x: Any, parts: int) -> dict[str, float]:
    """What one device computes in a step."""
    from tfshard.planning import peak, step_flops, training_graph
    from tfshard.planning.training_graph import Kind
    from tfshard.planning.variable_traffic import Parts

    graph = training_graph.trace(
        model,
        strategy.placement_of(model),
        gathering=strategy.gathering,
        inputs=Parts(count=parts).of(x, strategy.mesh_shape),
        needs_all_gradients=peak.needs_all_gradients(model.optimizer),
    )
    found: dict[str, float] = collections.Counter()
    for operation, inputs in graph.needed.items():
        cost = graph.costs.get(operation)
        if cost is not None:
            found["updated"] += (cost.output or 0) / parts if cost.kind is Kind.UPDATE else 0
            continue
        if operation.type in _FREE:
            continue
        share = graph.shares(operation.outputs[0]) if operation.outputs else 1
        kind = "convolutions" if "Conv" in operation.type else "products"
        found[kind] += step_flops.flops_of(operation) / share
        found["moved"] += sum(_bytes(each) / graph.shares(each) for each in [*inputs, *operation.outputs])
        found["operations"] += 1
    return {name: parts * found[name] for name in FEATURES}


_FREE = frozenset(
    "Bitcast Const ExpandDims Identity IdentityN NoOp Placeholder PreventGradient Reshape Shape Squeeze "
    "StopGradient".split()
)


def _bytes(tensor: Any) -> int:
    count = tensor.shape.num_elements() if tensor.shape.rank is not None else 0
    return (count or 0) * tensor.dtype.size if tensor.dtype.name not in ("resource", "variant") else 0


def fitted(rows: list[dict[str, float]]) -> dict[str, float]:
    """The price of each feature in seconds."""
    import numpy as np
    import scipy.optimize

    scaled = np.array([[row[name] / row["seconds"] for name in FEATURES] for row in rows])
    size = scaled.max(0) + 1e-30
    prices, _ = scipy.optimize.nnls(scaled / size, np.ones(len(rows)))
    return dict(zip(FEATURES, (prices / size).tolist(), strict=True))


def seconds_of(row: dict[str, float], prices: dict[str, float]) -> float:
    """By the prices."""
    return sum(row[name] * prices[name] for name in FEATURES)


def report(rows: dict[str, dict[str, float]]) -> None:
    """Prints the prices, and each configuration that was held out, the worst last."""
    names = list(rows)
    prices = fitted([rows[name] for name in names[::2]])
    print("ns for one of each:", {name: float(f"{1e9 * price:.3g}") for name, price in prices.items()})
    errors = {name: seconds_of(rows[name], prices) / rows[name]["seconds"] - 1 for name in names[1::2]}
    for name in sorted(errors, key=lambda name: abs(errors[name])):
        predicted, measured = 1e3 * seconds_of(rows[name], prices), 1e3 * rows[name]["seconds"]
        print(f"{name:>80}: {predicted:8.0f} ms predicted, {measured:8.0f} measured, {errors[name]:+.0%}")
    absolute = [abs(error) for error in errors.values()]
    print(f"{len(errors)} held out: {statistics.median(absolute):.0%} at the median, {max(absolute):.0%} at worst")


def main(argv: list[str]) -> None:
    del argv
    if _ONE.value:
        given = json.loads(_ONE.value)
        print(json.dumps(measure(Configuration(**{**given, "model": models.Model(**given["model"])}))))
    elif _MEASURE.value:
        file = pathlib.Path(_MEASURE.value)
        rows = json.loads(file.read_text()) if file.exists() else {}
        for configuration in configurations():
            if configuration.name in rows:
                continue
            one = json.dumps(dataclasses.asdict(configuration))
            done = subprocess.run(
                [sys.executable, "-m", "tools.bench.cost_model", f"--one={one}"], capture_output=True, text=True
            )
            if done.returncode:
                print(f"{configuration.name}: {(done.stderr.splitlines() or ['?'])[-1]}", flush=True)
                continue
            rows[configuration.name] = json.loads(done.stdout.splitlines()[-1])
            file.write_text(json.dumps(rows, indent=1))
            print(f"{configuration.name}: {1e3 * rows[configuration.name]['seconds']:.0f} ms", flush=True)
    elif _FIT.value:
        report(json.loads(pathlib.Path(_FIT.value).read_text()))
    else:
        raise app.UsageError("Say --measure=FILE or --fit=FILE.")


if __name__ == "__main__":
    app.run(main)
