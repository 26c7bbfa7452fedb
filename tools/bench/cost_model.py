"""How well the time and the memory of steps are predicted: measured on this machine, beside `tfshard.simulate`.

    tfshard calibrate --num_devices=4 --save=/tmp/machine.yaml
    python -m tools.bench.cost_model --measure=/tmp/steps.json --rounds=1 --hosts    # half an hour, quiet
    python -m tools.bench.cost_model --steps=/tmp/steps.json --machine=/tmp/machine.yaml

A configuration is a model, a mesh and a stage, with blocks computed again or a batch in parts; none of them is among
the models of the calibration. Machines drift: each is measured in several rounds, in another order each, and a single
one is off by 20% at times; what is compared is the median of the rounds, and their spread is in the table. Memory is of
`PeakMemory.device_added` above what rests, in a round the median of three steps; tensors below 256 KiB are in neither,
since the trace leaves them out. Links are those of so many logical devices: what they send each other takes the cores
of all.

With `--hosts` (root), some are measured on two hosts with links of some rates between them (tools/hosts.sh), two
devices each, and the links besides. The hosts share the cores of this machine: a host has half of them.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
from typing import Any
from unittest import mock

from absl import app, flags

from tools.bench import common
from tools.report import models

_MEASURE = flags.DEFINE_string("measure", None, "Measure, into this file; what is there already is kept.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each is measured.", lower_bound=1)
_STEPS_FILE = flags.DEFINE_string("steps", None, "Predict what this file has.")
_MACHINE = flags.DEFINE_string("machine", None, "By this machine.")
_HOSTS = flags.DEFINE_bool("hosts", False, "Measure those on two hosts, too; needs root.")
_KINDS = flags.DEFINE_list("kinds", [], "Measure models of these kinds only. All, by default.")
_ONE = flags.DEFINE_string("one", None, "Measure this configuration here, and print JSON.")
_LINKS = flags.DEFINE_bool("links", False, "Measure the links here, and print JSON.")
_DEVICES = flags.DEFINE_integer("devices", None, "Between so many devices.")

_STEPS, _EPOCHS, _PROFILES = 6, 2, 3
_LEAST_TRACED = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a model is trained: all of it JSON."""

    model: models.Model
    mesh: dict[str, int]
    stage: int = 3
    recompute: bool = False
    microbatches: int = 1
    rate: str = ""

    @property
    def name(self) -> str:
        """A line."""
        model, mesh = self.model, " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        sizes = (
            f"{model.kind} {model.layers}x{model.width}, batch {model.batch}x{model.length}, {mesh}, stage {self.stage}"
        )
        more = ", recomputed" * self.recompute + f", {self.microbatches} parts" * (self.microbatches > 1)
        return sizes + more + f", two hosts at {self.rate}/s" * bool(self.rate)


def _gpt(layers: int, width: int, batch: int = 8, length: int = 96, vocabulary: int = 3000) -> models.Model:
    heads = max(2, width // 64)
    return models.Model(
        kind="gpt", batch=batch, layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=length
    )


def configurations() -> list[Configuration]:
    """Models of different depth, width, batch and kind, on meshes of one to eight devices."""
    found = []
    for number, (layers, width) in enumerate([(5, 208), (3, 304), (2, 352), (10, 144)]):
        model = _gpt(layers, width)
        found.append(Configuration(model=model, mesh={"batch": 4}))
        found.append(Configuration(model=model, mesh={"batch": 4}, stage=number % 3))
        found.append(Configuration(model=model, mesh={"batch": (1, 2, 8)[number % 3]}))
    for layers, width in [(4, 288)]:
        found.append(Configuration(model=_gpt(layers, width, batch=16, length=128), mesh={"batch": 4}))
        found.append(Configuration(model=_gpt(layers, width), mesh={"batch": 2, "model": 2}))
        found.append(Configuration(model=_gpt(layers, width, vocabulary=5200), mesh={"model": 4}, stage=0))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, recompute=True))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, microbatches=2))
    for model in [_gpt(3, 280, batch=16)]:
        found.append(Configuration(model=model, mesh={"replica": 2, "batch": 2}))
        found.append(Configuration(model=model, mesh={"model": 2}, stage=0))
        found.append(Configuration(model=model, mesh={"batch": 4, "model": 2}, stage=2))
        found.append(Configuration(model=model, mesh={"batch": 2}, microbatches=4))
        found.append(Configuration(model=model, mesh={"batch": 2}, recompute=True, microbatches=2))
    for kind, sizes in (
        ("bert", {"layers": 3, "width": 192, "heads": 2, "length": 72}),
        ("resnet50", {"length": 84}),
        ("efficientnet", {"length": 100, "batch": 8}),
        ("efficientnet", {"length": 72}),
        ("lstm", {"width": 168}),
    ):
        model = dataclasses.replace(models.MODELS[kind], **sizes)
        found += [Configuration(model=model, mesh={"batch": size}) for size in (2, 4)]
        found.append(Configuration(model=dataclasses.replace(model, batch=8), mesh={"batch": 4}, stage=0))
    return found


DEVICES = (2, 4, 8)
RATES = ("1gbit", "300mbit")


def on_hosts() -> list[Configuration]:
    """On two hosts, of two devices each."""
    return [
        Configuration(model=_gpt(layers, width), mesh=mesh, stage=stage, rate=rate)
        for rate in RATES
        for layers, width, mesh, stage in [
            (5, 176, {"batch": 4}, 3),
            (5, 176, {"replica": 2, "batch": 2}, 3),
            (4, 160, {"batch": 4}, 0),
            (4, 160, {"replica": 2, "batch": 2}, 1),
        ]
    ]


def measure(configuration: Configuration) -> dict[str, Any]:
    """The seconds of a step, its peak on a device, and what its graph has."""
    import keras

    import tfshard

    devices = math.prod(configuration.mesh.values())
    tfshard.initialize(num_devices=devices, device_type="CPU")
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**configuration.mesh), "auto" if "model" in configuration.mesh else None,
        configuration.stage, microbatches=configuration.microbatches,
    )  # fmt: skip
    model = models.build(configuration.model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, strategy=strategy)
    if configuration.recompute:
        strategy.recompute(model, "block_.*")
    x, y = models.data(configuration.model, _STEPS)
    batch = configuration.model.batch
    seconds = common.fit_times(model, (x, y), batch_size=batch, epochs=_EPOCHS)["step"]
    profiles = [tfshard.profile_step(model, (x[:batch], y[:batch])) for _ in range(_PROFILES)]
    added = statistics.median(each.peak.device_added for each in profiles)
    return {"seconds": seconds, "peak": max(profiles[0].variable_bytes.values()) + added}


def predicted(configuration: Configuration, machine: Any) -> Any:
    """What is predicted of it, on paper."""
    import keras

    from tfshard.planning import liveness
    from tfshard.planning.simulation import Simulator

    model = models.build(configuration.model)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    layout_map = "auto" if "model" in configuration.mesh else None
    simulator = Simulator(model, configuration.model.batch, optimizer="adam", layout_map=layout_map)
    data = configuration.mesh.get("batch", 1) * configuration.mesh.get("replica", 1)
    own = configuration.model.batch // data
    as_traced = functools.partial(liveness.peak_of, least=_LEAST_TRACED)
    with mock.patch.object(liveness, "peak_of", as_traced):
        found = simulator.predictions(
            machine, configuration.mesh, configuration.stage, rows=[own // configuration.microbatches],
            recomputes=["block_.*" if configuration.recompute else None],
        )  # fmt: skip
    return found[0]


def links_file(file: pathlib.Path, rate: str) -> pathlib.Path:
    """Where the links of two hosts, or of so many devices of one, are, beside what was measured."""
    return file.with_suffix(f".{rate}.json")


def reached(machine: Any, configuration: Configuration, file: pathlib.Path) -> Any:
    """The machine, with the links that a configuration has."""
    from tfshard.planning import Links

    if configuration.rate:
        there = Links.load(links_file(file, configuration.rate))
        return dataclasses.replace(machine, links=there, cores=machine.cores // 2)
    devices = math.prod(configuration.mesh.values())
    return machine if devices == 1 else dataclasses.replace(machine, links=Links.load(links_file(file, str(devices))))


def _off(rounds: list[float], predicted: float) -> float:
    """By which part of the median it is predicted too high."""
    return predicted / statistics.median(rounds) - 1


def report(file: pathlib.Path, machine: Any) -> None:
    """Prints a table, the worst last."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    by_name = {each.name: each for each in (*configurations(), *on_hosts())}
    found = []
    for name, runs in rows.items():
        one = predicted(by_name[name], reached(machine, by_name[name], file))
        time = [1e3 * run["seconds"] for run in runs], 1e3 * one.seconds
        memory = [run["peak"] / 2**20 for run in runs], one.peak_bytes / 2**20
        found.append((name, time, memory))
        print(f"{name}: {_off(*time):+.0%}, memory {_off(*memory):+.0%}", flush=True)
    found.sort(key=lambda each: abs(_off(*each[1])))
    print("| configuration | step, ms | predicted | | peak, MiB | predicted | |\n" + "| --- " * 7 + "|")
    for name, *both in found:
        cells = [
            f"{common.spread(rounds, form)} | {of_it:{form}} | {_off(rounds, of_it):+.0%}"
            for (rounds, of_it), form in zip(both, (".0f", ".1f"), strict=True)
        ]
        print(f"| {' | '.join([name, *cells])} |")
    for what, errors in (
        ("time", [abs(_off(*time)) for _, time, _ in found]),
        ("memory", [abs(_off(*memory)) for _, _, memory in found]),
    ):
        middle, worst = statistics.median(errors), max(errors)
        print(f"{what}: {len(errors)} configurations, {middle:.0%} at the median, {worst:.0%} at worst")


def measure_all(file: pathlib.Path, rounds: int) -> None:
    """Measures what a file does not have yet."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    for devices in DEVICES:
        if not links_file(file, str(devices)).exists():
            links_file(file, str(devices)).write_text(json.dumps(said("", "--links", f"--devices={devices}")))
    for rate in RATES if _HOSTS.value else ():
        if not links_file(file, rate).exists():
            links_file(file, rate).write_text(json.dumps(said(rate, "--links")))
    tried = configurations() + on_hosts() * _HOSTS.value
    tried = [each for each in tried if each.model.kind in (_KINDS.value or [each.model.kind])]
    for number in range(rounds):
        # In any order, so that what drifts is not taken for what one kind of model takes.
        for configuration in random.Random(number).sample(tried, len(tried)):
            runs = rows.setdefault(configuration.name, [])
            if len(runs) > number:
                continue
            one = json.dumps(dataclasses.asdict(configuration))
            runs.append(said(configuration.rate, f"--one={one}"))
            file.write_text(json.dumps(rows, indent=1))
            print(f"{number + 1}, {configuration.name}: {1e3 * runs[-1]['seconds']:.0f} ms", flush=True)


def said(rate: str, *what: str) -> Any:
    """What a process says that measures something; or client 0 of those on two hosts with links of this rate."""
    command = [sys.executable, "-m", "tools.bench.cost_model", *what]
    if rate:
        script = str(pathlib.Path(__file__).resolve())
        command = [sys.executable, "-m", "tools.hosts", f"--rate={rate}", script, *what]
    paths = [str(pathlib.Path.cwd()), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    found = re.findall(r"FOUND (.*)", done.stdout)
    if done.returncode or not found:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(found[0])


def main(argv: list[str]) -> None:
    del argv
    if _ONE.value:
        given = json.loads(_ONE.value)
        found = measure(Configuration(**{**given, "model": models.Model(**given["model"])}))
        print(f"FOUND {json.dumps(found)}", flush=True)
    elif _LINKS.value:
        import tfshard

        tfshard.initialize(num_devices=_DEVICES.value)
        print(f"FOUND {json.dumps(tfshard.profile_network().links.to_dict())}", flush=True)
    elif _MEASURE.value:
        measure_all(pathlib.Path(_MEASURE.value), _ROUNDS.value)
    elif _STEPS_FILE.value and _MACHINE.value:
        from tfshard.planning import Machine

        report(pathlib.Path(_STEPS_FILE.value), Machine.load(_MACHINE.value))
    else:
        raise app.UsageError("Say --measure=FILE, or --steps=FILE and --machine=FILE.")


if __name__ == "__main__":
    app.run(main)
