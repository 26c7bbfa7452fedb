"""Compare the step times and the memory that `tfshard.simulate` predicts with measurements on this machine.

    python -m tools.bench.cost_model --measure=/tmp/steps.json --rounds=1 --hosts    # 40 minutes, quiet
    python -m tools.bench.cost_model --steps=/tmp/steps.json

The first command calibrates the machine (`tfshard.calibrate`) and measures configurations. A configuration is a model,
a mesh and a ZeRO stage, optionally with recomputed blocks or microbatches. The calibration uses none of these models.

The speed of a machine drifts by a fifth within an hour, and a calibration only describes the minutes in which it ran.
Two more models, the pacemakers, are therefore timed before and after the calibration and before and after each
configuration. The pace is their step time divided by their step time at the calibration. The second command predicts
with the machine at that pace (`Machine.at_pace`). It also prints the error of the machine as it was calibrated. Each
configuration is measured in several rounds, in a different order each round. The table compares the median over the
rounds, and shows the range.

The memory is the size of the variables plus `PeakMemory.device_added`. Each round profiles five steps, and takes the
second largest of them. A device needs about this much: if devices outnumber cores, the thread order varies, and one
step in dozens stands out. The measurement and the prediction leave out tensors below 256 KiB, as the trace does. Links
are measured for each number of logical devices, because their transfers use the cores of all devices.

With `--hosts` (root), some configurations and their links are measured on two hosts of two devices each, with links of
several rates between the hosts (tools/hosts.sh). The hosts share this machine: each host has half of its cores.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from absl import app, flags

from tfshard.layouts import ZeroStage
from tools.bench import common
from tools.report import models

_MEASURE = flags.DEFINE_string(
    "measure", None, "Measure and write to this file. Existing results in the file are kept."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How many times to measure each configuration.", lower_bound=1)
_STEPS_FILE = flags.DEFINE_string("steps", None, "Predict the configurations of this file.")
_MACHINE = flags.DEFINE_string(
    "machine", None, "Predict for this machine, not for the machine that was calibrated with the measurements."
)
_HOSTS = flags.DEFINE_bool("hosts", False, "Also measure the configurations on two hosts; needs root.")
_KINDS = flags.DEFINE_list("kinds", [], "Measure only models of these kinds. By default all.")
_ONE = flags.DEFINE_string("one", None, "Measure this configuration here, and print JSON.")
_CALIBRATE = flags.DEFINE_bool("calibrate", False, "Calibrate here, and print JSON.")
_LINKS = flags.DEFINE_bool("links", False, "Measure the links here, and print JSON.")
_DEVICES = flags.DEFINE_integer("devices", None, "Number of devices of the links.")

_STEPS, _EPOCHS, _PROFILES = 6, 2, 5
_LEAST_TRACED = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A model and how it is trained. All fields can be written as JSON."""

    model: models.Model
    mesh: dict[str, int]
    stage: int = 3
    recompute: bool = False
    microbatches: int = 1
    rate: str = ""

    @property
    def name(self) -> str:
        """The configuration in one line."""
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
    """Return models of different depth, width, batch and kind, on meshes of one to eight devices."""
    found = []
    for number, (layers, width) in enumerate([(7, 168), (4, 248), (2, 464), (10, 152)]):
        model = _gpt(layers, width)
        found.append(Configuration(model=model, mesh={"batch": 4}))
        found.append(Configuration(model=model, mesh={"batch": 4}, stage=number % 3))
        found.append(Configuration(model=model, mesh={"batch": (1, 2, 8)[number % 3]}))
    for layers, width in [(4, 304)]:
        found.append(Configuration(model=_gpt(layers, width, batch=16, length=128), mesh={"batch": 4}))
        found.append(Configuration(model=_gpt(layers, width), mesh={"batch": 2, "model": 2}))
        found.append(Configuration(model=_gpt(layers, width, vocabulary=4800), mesh={"model": 4}, stage=0))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, recompute=True))
        found.append(Configuration(model=_gpt(layers, width, batch=16), mesh={"batch": 4}, microbatches=2))
    for model in [_gpt(3, 328, batch=16)]:
        found.append(Configuration(model=model, mesh={"replica": 2, "batch": 2}))
        found.append(Configuration(model=model, mesh={"model": 2}, stage=0))
        found.append(Configuration(model=model, mesh={"batch": 4, "model": 2}, stage=2))
        found.append(Configuration(model=model, mesh={"batch": 2}, microbatches=4))
        found.append(Configuration(model=model, mesh={"batch": 2}, recompute=True, microbatches=2))
    for kind, sizes in (
        ("bert", {"layers": 4, "width": 192, "heads": 3, "length": 88}),
        ("resnet50", {"length": 64}),
        ("efficientnet", {"length": 116, "batch": 8}),
        ("efficientnet", {"length": 56}),
        ("lstm", {"width": 144}),
    ):
        model = dataclasses.replace(models.MODELS[kind], **sizes)
        found += [Configuration(model=model, mesh={"batch": size}) for size in (2, 4)]
        found.append(Configuration(model=dataclasses.replace(model, batch=8), mesh={"batch": 4}, stage=0))
    return found


DEVICES = (2, 4, 8)
RATES = ("1gbit", "300mbit")


def on_hosts() -> list[Configuration]:
    """Return the configurations for two hosts of two devices each."""
    return [
        Configuration(model=_gpt(layers, width), mesh=mesh, stage=stage, rate=rate)
        for rate in RATES
        for layers, width, mesh, stage in [
            (3, 264, {"batch": 4}, 3),
            (3, 264, {"replica": 2, "batch": 2}, 3),
            (3, 216, {"batch": 4}, 0),
            (3, 216, {"replica": 2, "batch": 2}, 1),
        ]
    ]


def measure(configuration: Configuration) -> dict[str, Any]:
    """Measure the seconds of a step and the peak bytes of a device."""
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
    added = sorted(each.peak.device_added for each in profiles)[-2]
    return {"seconds": seconds, "peak": max(profiles[0].variable_bytes.values()) + added}


def predicted(configuration: Configuration, machines: list[Any]) -> list[Any]:
    """Return the simulator's prediction of a configuration for each machine."""
    import keras

    from tfshard.contrib.simulate import simulation
    from tfshard.planning import peak

    model = models.build(configuration.model)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    layout_map = "auto" if "model" in configuration.mesh else None
    simulator = simulation.Simulator(model, configuration.model.batch, optimizer="adam", layout_map=layout_map)
    data = configuration.mesh.get("batch", 1) * configuration.mesh.get("replica", 1)
    own = configuration.model.batch // data
    stage = ZeroStage.from_number(configuration.stage)
    as_traced = functools.partial(peak.added_bytes, least=_LEAST_TRACED)
    with mock.patch.object(simulation, "added_bytes", as_traced):
        return [
            simulator.predictions(
                machine, configuration.mesh, stage, rows=[own // configuration.microbatches],
                recomputes=["block_.*" if configuration.recompute else None],
            )[0]
            for machine in machines
        ]  # fmt: skip


def links_file(file: pathlib.Path, rate: str) -> pathlib.Path:
    """Return the file of the links, beside the measurements. `rate` is a link rate, or a number of devices."""
    return file.with_suffix(f".{rate}.json")


def machine_file(file: pathlib.Path) -> pathlib.Path:
    """Return the file of the calibrated machine, beside the measurements."""
    return file.with_suffix(".machine.yaml")


def pace_file(file: pathlib.Path) -> pathlib.Path:
    """Return the file of the pacemakers' step times at the calibration."""
    return file.with_suffix(".pace.json")


class Pacemakers:
    """Two models that track the speed of the machine, one of matrix products and one of convolutions."""

    def __init__(self) -> None:
        import keras

        import tfshard

        tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._trained = []
        for described in (_gpt(4, 192), dataclasses.replace(models.MODELS["resnet50"], batch=4, length=32)):
            model = models.build(described)
            model.compile("adam", loss, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES)))
            self._trained.append((model, models.data(described, _STEPS), described.batch))
        self._times()

    def _times(self) -> list[float]:
        return [
            common.fit_times(model, data, batch_size=batch, epochs=1)["step"] for model, data, batch in self._trained
        ]

    def around(self, measures: Iterable[Callable[[], Any]]) -> Iterator[tuple[Any, list[float]]]:
        """Call each function in order, and time the pacemakers between the calls.

        Yields:
            The result of a call, and the pacemakers' step times: the mean of before and after the call.
        """
        before = self._times()
        for measure in measures:
            found = measure()
            after = self._times()
            yield found, [statistics.fmean(pair) for pair in zip(before, after, strict=True)]
            before = after


def reached(machine: Any, configuration: Configuration, file: pathlib.Path) -> Any:
    """Return the machine with the links of a configuration."""
    from tfshard.planning import Links

    if configuration.rate:
        there = Links.load(links_file(file, configuration.rate))
        return dataclasses.replace(machine, links=there, cores=machine.cores // 2)
    devices = math.prod(configuration.mesh.values())
    return machine if devices == 1 else dataclasses.replace(machine, links=Links.load(links_file(file, str(devices))))


def _off(rounds: list[float], predicted: float) -> float:
    """Return the relative error of a prediction, positive if the prediction is too high."""
    return predicted / statistics.median(rounds) - 1


def _pace(runs: list[dict[str, Any]], calibrated: list[float]) -> float:
    """Return the median ratio of the pacemakers' step times to their step times at the calibration."""
    pairs = [zip(run["pacemakers"], calibrated, strict=True) for run in runs]
    return statistics.median(statistics.geometric_mean(now / then for now, then in each) for each in pairs)


def report(file: pathlib.Path, machine: Any) -> None:
    """Print the table, sorted by the error of the predicted step time, and a summary."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    calibrated = json.loads(pace_file(file).read_text())
    by_name = {each.name: each for each in (*configurations(), *on_hosts())}
    found, unpaced = [], []
    for name, runs in rows.items():
        pace, there = _pace(runs, calibrated), reached(machine, by_name[name], file)
        as_calibrated, one = predicted(by_name[name], [there, there.at_pace(pace)])
        times = [1e3 * run["seconds"] for run in runs]
        time, memory = (times, 1e3 * one.seconds), ([run["peak"] / 2**20 for run in runs], one.peak_bytes / 2**20)
        found.append((name, pace, time, memory))
        unpaced.append(_off(times, 1e3 * as_calibrated.seconds))
        print(f"{name}: {_off(*time):+.0%} ({unpaced[-1]:+.0%}), memory {_off(*memory):+.0%}", flush=True)
    found.sort(key=lambda each: abs(_off(*each[2])))
    print("| configuration | pace | step, ms | predicted | | peak, MiB | predicted | |\n" + "| --- " * 8 + "|")
    for name, pace, *both in found:
        cells = [
            f"{common.spread(rounds, form)} | {of_it:{form}} | {_off(rounds, of_it):+.0%}"
            for (rounds, of_it), form in zip(both, (".0f", ".1f"), strict=True)
        ]
        print(f"| {' | '.join([name, f'{pace:.2f}', *cells])} |")
    for what, errors in (
        ("time", [_off(*time) for _, _, time, _ in found]),
        ("time, whatever the pace", unpaced),
        ("memory", [_off(*memory) for _, _, _, memory in found]),
    ):
        middle, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
        print(f"{what}: {len(errors)} configurations, {middle:.0%} at the median, {worst:.0%} at worst")


def measure_all(file: pathlib.Path, rounds: int) -> None:
    """Measure what the file does not contain yet."""
    from tfshard.planning import Machine

    rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    pacemakers = Pacemakers()
    if not machine_file(file).exists():
        [(machine, pace)] = pacemakers.around([lambda: said("", "--calibrate")])
        Machine.from_dict(machine).save(machine_file(file))
        pace_file(file).write_text(json.dumps(pace))
    for devices in DEVICES:
        if not links_file(file, str(devices)).exists():
            links_file(file, str(devices)).write_text(json.dumps(said("", "--links", f"--devices={devices}")))
    for rate in RATES if _HOSTS.value else ():
        if not links_file(file, rate).exists():
            links_file(file, rate).write_text(json.dumps(said(rate, "--links")))
    tried = configurations() + on_hosts() * _HOSTS.value
    tried = [each for each in tried if each.model.kind in (_KINDS.value or [each.model.kind])]
    # A random order keeps a drift of the machine from looking like an effect of a kind of model.
    each_round = [random.Random(number).sample(tried, len(tried)) for number in range(rounds)]
    left = [each for number, order in enumerate(each_round) for each in order if len(rows.get(each.name, [])) <= number]
    measures = [functools.partial(said, each.rate, f"--one={json.dumps(dataclasses.asdict(each))}") for each in left]
    for configuration, (run, pace) in zip(left, pacemakers.around(measures), strict=True):
        rows.setdefault(configuration.name, []).append({**run, "pacemakers": pace})
        file.write_text(json.dumps(rows, indent=1))
        print(f"{configuration.name}: {1e3 * run['seconds']:.0f} ms, pacemakers {pace}", flush=True)


def said(rate: str, *what: str) -> Any:
    """Run a measurement in a process, or on two hosts with links of this rate. Returns the result of client 0."""
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
    elif _CALIBRATE.value:
        import tfshard

        tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
        print(f"FOUND {json.dumps(tfshard.calibrate().to_dict())}", flush=True)
    elif _LINKS.value:
        import tfshard

        tfshard.initialize(num_devices=_DEVICES.value)
        print(f"FOUND {json.dumps(tfshard.profile_network().links.to_dict())}", flush=True)
    elif _MEASURE.value:
        measure_all(pathlib.Path(_MEASURE.value), _ROUNDS.value)
    elif _STEPS_FILE.value:
        from tfshard.planning import Machine

        file = pathlib.Path(_STEPS_FILE.value)
        report(file, Machine.load(_MACHINE.value or machine_file(file)))
    else:
        raise app.UsageError("Say --measure=FILE, or --steps=FILE.")


if __name__ == "__main__":
    app.run(main)
