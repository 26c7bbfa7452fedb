"""Compare tfshard with one device, MirroredStrategy, Keras on JAX and PyTorch's FSDP2 in a report.

    tools/report.sh                    # the full report: hours
    tools/report.sh --quick            # ten minutes: two models, fewer ways
    tools/report.sh --models="gpt 5M,lstm" --rounds=3 --parts=time
    tools/report.sh --models=bert --parts=time --ways='"one device, XLA",stage 3 compiled'
    tools/report.sh --resume           # the remaining part of an interrupted report
    tools/report.sh --out=DIR --compare=docs/benchmarks/report.json    # repeat: DIR/repeated.md lists the differences
    git archive COMMIT tfshard | tar -x -C DIR    # then compare with an earlier commit:
    tools/report.sh --before=DIR --ways="stage 3,2-D" --models="gpt 5M,lstm"

Each way of training runs in a separate process, beside a process of plain Keras on one device. The two processes
alternate epochs of a few steps, and each waits while the other trains. A drift of the machine therefore slows both, and
each ratio compares two consecutive epochs. Results go to docs/benchmarks: report.json, report.md and plots.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from tools.report import models, resident, serving, writing

_QUICK = flags.DEFINE_bool("quick", False, "Measure two models in one round.")
_MODELS = flags.DEFINE_list("models", list(models.MODELS), "Models to measure.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "How many times to start each way.", lower_bound=1)
_PARTS = flags.DEFINE_list("parts", ["time", "memory", "growth"], "Parts to measure.")
_RESUME = flags.DEFINE_bool("resume", False, "Keep the results and failures in the report, and measure the rest.")
_COMPARE = flags.DEFINE_string("compare", None, "The report.json of another day: compare with it, in repeated.md.")
_OUT = flags.DEFINE_string("out", "docs/benchmarks", "Directory of the report.")
_BEFORE = flags.DEFINE_string(
    "before", None, "A directory with another version of tfshard: only print a comparison with it."
)
_WAYS = flags.DEFINE_list("ways", None, "Time only these ways. Quote a way with a comma.")
_JAX = flags.DEFINE_string(
    "jax_python", None, "Python of the environment with JAX. By default the report has no rows of JAX."
)
_TORCH = flags.DEFINE_string(
    "torch_python", None, "Python of the environment with PyTorch. By default the report has no rows of PyTorch."
)

QUICK_MODELS = ("gpt 5M", "lstm")
# The number of epochs of a way. Each epoch is paired with an epoch of plain Keras.
PAIRS = 3
# The models for ways that only some models are trained in.
_FINER_MODELS = ("gpt 5M", "gpt narrow")
_MODELS_OF = {
    "stage 1": _FINER_MODELS,
    "stage 2": _FINER_MODELS,
    "one device, a quarter": (*_FINER_MODELS, "resnet50", "efficientnet"),
}


def runs_on(way: str) -> str:
    """Return the backend of a way: `"tensorflow"`, `"jax"` or `"torch"`."""
    return "jax" if way.startswith("JAX") else "torch" if way in ("FSDP2", "torch, one device") else "tensorflow"


def can_be(way: str, model: models.Model) -> bool:
    """Return True if a model can be trained in a way: see the notes of docs/benchmarks/report.md."""
    if way in ("tensor", "2-D", "pipeline", "JAX, tensor"):
        return model.kind in ("gpt", "bert")
    return not (runs_on(way) == "jax" and model.kind == "moe")


@contextlib.contextmanager
def process(
    model: models.Model, way: str, *, devices: int = 4, memory: bool = False, package: str | None = None
) -> Iterator[serving.Process]:
    """Yield a process that trains a model in a way.

    Args:
        model: The model.
        way: The name of the way.
        devices: The number of devices.
        memory: True to measure memory.
        package: A directory with another tfshard, used instead of ours. Needs Python 3.11.

    Raises:
        serving.FailedError: The environment or the layout map of the way is missing.
    """
    python = {"jax": _JAX.value, "torch": _TORCH.value, "tensorflow": sys.executable}[runs_on(way)]
    if python is None:
        raise serving.FailedError("no environment")
    module = "on_torch" if runs_on(way) == "torch" else "on_keras"
    environment = {**os.environ, "KERAS_BACKEND": "jax" if runs_on(way) == "jax" else "tensorflow"}
    if runs_on(way) == "jax":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={1 if 'one' in way else devices}"
    if memory:
        environment |= resident.ENVIRONMENT
    if package is not None:
        environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((package, os.getcwd()))}
    sizes = f"--model={json.dumps(dataclasses.asdict(model))}"
    command = [python, "-m", f"tools.report.{module}", sizes, f"--way={way}", f"--devices={devices}"]
    with tempfile.TemporaryDirectory() as folder:
        if way == "JAX, tensor":
            file = f"--map_file={folder}/map.pickle"
            ours = [sys.executable, "-m", "tools.report.on_keras", sizes, "--way=tensor", f"--devices={devices}", file]
            with serving.Process(ours, {**os.environ, "KERAS_BACKEND": "tensorflow"}) as planning:
                planning.ask("map")
            command.append(file)
        with serving.Process(command, environment) as started:
            yield started


def compared(training: serving.Process, base: serving.Process) -> dict[str, Any]:
    """Measure the epochs of a process, and their ratios to the epochs of the process beside it."""
    found, steps, ratios = training.ask("first"), [], []
    for number in range(PAIRS):
        # The first process alternates, which cancels a linear drift.
        order = (training, base) if number % 2 else (base, training)
        pair = {each: each.ask("epoch")["steps"] for each in order}
        steps += pair[training]
        ratios.append(statistics.median(pair[training]) / statistics.median(pair[base]))
    return {**found, "step": statistics.median(steps), "steps": steps, "ratios": ratios}


def times(report: dict[str, Any], names: list[str], rounds: int, ways: tuple[str, ...]) -> Iterator[str]:
    """Add the results of each round, model and way to a report, and yield a line about each."""
    for number in range(rounds):
        for name in names:
            model, found = models.MODELS[name], report.setdefault("time", {}).setdefault(name, {})
            possible = (way for way in ways if can_be(way, model) and name in _MODELS_OF.get(way, (name,)))
            wanted = [way for way in possible if len(found.setdefault(way, [])) <= number]
            if wanted:
                with process(model, writing.BASE) as base:
                    base.ask("first")
                    for way in wanted:
                        found[way].append(_compared(model, way, base, sent=number == 0))
                        yield f"round {number + 1}, {name}, {way}: {writing.told(found[way][-1])}"


def _compared(model: models.Model, way: str, base: serving.Process, *, sent: bool) -> dict[str, Any]:
    try:
        with process(model, way) as training:
            found = compared(training, base)
            if sent:
                found |= training.ask("sent")
    except serving.FailedError as error:
        found = {"failed": str(error)}
    return {**found, "date": _today()}


def since(names: list[str], ways: list[str], package: str) -> Iterator[str]:
    """Compare our tfshard with the tfshard in a directory. Yields a Markdown row for each model and way."""
    yield from ("| model | way | step, ms | before | now / before |", "| --- | --- | --- | --- | --- |")
    for name in names:
        for way in (way for way in ways if can_be(way, models.MODELS[name])):
            with process(models.MODELS[name], way) as now, process(models.MODELS[name], way, package=package) as before:
                before.ask("first")
                found = compared(now, before)
            ratio = statistics.median(found["ratios"])
            cells = (
                f"{1e3 * found['step']:.0f}",
                f"{1e3 * found['step'] / ratio:.0f}",
                writing.spread(found["ratios"]),
            )
            yield f"| {name} | {way} | {' | '.join(cells)} |"


def _today() -> str:
    return datetime.date.today().isoformat()


def memory(report: dict[str, Any], cases: dict[str, tuple[models.Model, int]], ways: tuple[str, ...]) -> Iterator[str]:
    """Add the bytes per device of each case and way to a report, and yield a line about each.

    Each case is a model and a number of devices.
    """
    for name, (model, devices) in cases.items():
        found = report.setdefault(name, {})
        for way in ways:
            if can_be(way, model) and way not in found:
                try:
                    with process(model, way, devices=devices, memory=True) as training:
                        found[way] = training.ask("memory")
                except serving.FailedError as error:
                    found[way] = {"failed": str(error)}
                found[way]["date"] = _today()
                yield f"memory, {name}, {way}: {found[way]}"


def grown() -> dict[str, dict[str, tuple[models.Model, int]]]:
    """Return the cases of growth: by devices, by depth and by width."""
    return {
        "devices": {str(count): (models.MODELS["gpt 5M"], count) for count in models.DEVICES},
        "depth": {str(layers): (models.deeper(layers), 4) for layers in models.DEPTHS},
        "width": {str(width): (models.wider(width), 4) for width in models.WIDTHS},
    }


def main(argv: list[str]) -> None:
    del argv
    unknown = sorted(set(_MODELS.value) - set(models.MODELS))
    if unknown:
        raise app.UsageError(f"Unknown models: {unknown}. Models: {list(models.MODELS)}")
    names = [name for name in _MODELS.value if not _QUICK.value or name in QUICK_MODELS]
    if _BEFORE.value:
        for line in since(names, _WAYS.value or ["stage 0", "stage 3", "2-D"], _BEFORE.value):
            print(line, flush=True)
        return
    rounds = 1 if _QUICK.value else _ROUNDS.value
    out = pathlib.Path(_OUT.value)
    report: dict[str, Any] = {}
    if _RESUME.value and (out / "report.json").exists():
        report = json.loads((out / "report.json").read_text())
    # Read the file first: the report may overwrite it.
    other = json.loads(pathlib.Path(_COMPARE.value).read_text()) if _COMPARE.value else None
    report |= {"machine": writing.machine(), "quick": _QUICK.value}
    for line in _measure(report, names, rounds):
        print(line, flush=True)
        writing.save(report, out)
    writing.write(report, out)
    print(f"Written: {out}/report.md")
    if other is not None:
        if not writing.changes(other, report):
            raise SystemExit(f"No ratio is in both this report and {_COMPARE.value}.")
        (out / "repeated.md").write_text(writing.repeated(other, report))
        moved = writing.moved(other, report)
        print("\n".join(moved) or "No ratio moved by more than 15%.")
        raise SystemExit(bool(moved))


def _measure(report: dict[str, Any], names: list[str], rounds: int) -> Iterator[str]:
    if "time" in _PARTS.value:
        ways = writing.QUICK_WAYS if _QUICK.value else writing.WAYS
        yield from times(report, names, rounds, tuple(_WAYS.value or ways))
    if "memory" in _PARTS.value:
        cases = {name: (models.MODELS[name], 4) for name in names}
        ways = writing.GROWING_WAYS if _QUICK.value else writing.MEMORY_WAYS
        yield from memory(report.setdefault("memory", {}), cases, ways)
    if "growth" in _PARTS.value and not _QUICK.value:
        for what, cases in grown().items():
            yield from memory(report.setdefault("growth", {}).setdefault(what, {}), cases, writing.GROWING_WAYS)


if __name__ == "__main__":
    app.run(main)
