"""Write the report: tables, plots, and a comparison of its ratios with an earlier report."""

import json
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

WAYS = (
    "one device", "one device, XLA", "one device, a quarter", "mirrored", "stage 0", "stage 1", "stage 2", "stage 3",
    "stage 3 alone", "stage 0 compiled", "stage 3 compiled", "tensor", "2-D", "pipeline", "JAX, one device",
    "JAX, data", "JAX, tensor", "torch, one device", "FSDP2",
)  # fmt: skip
QUICK_WAYS = ("one device", "mirrored", "stage 0", "stage 3", "tensor", "JAX, tensor", "FSDP2")
MEMORY_WAYS = ("mirrored", "stage 0", "stage 3", "JAX, data", "FSDP2")
GROWING_WAYS = ("stage 3", "FSDP2")

# The way that each ratio divides by: plain Keras without sharding.
BASE = "one device"
# The largest relative difference of a ratio between two reports.
TOLERANCE = 0.15
_MIB = 1 << 20

NOTES = (pathlib.Path(__file__).parent / "notes.md").read_text()

Runs: TypeAlias = list[dict[str, Any]]


def machine() -> dict[str, str]:
    """Return the Python version and the size of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
    }


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Format the median, the minimum and the maximum."""
    found = sorted(values)
    if len(found) == 1:
        return f"{found[0]:{form}}"
    return f"{statistics.median(found):{form}} ({found[0]:{form}} to {found[-1]:{form}})"


def told(run: Mapping[str, Any]) -> str:
    """Format the result of a way in short."""
    return run["failed"] if "failed" in run else f"{1e3 * run['step']:.0f} ms, {spread(run['ratios'])} of one device"


def ratios(runs: Runs) -> list[float]:
    """Return the ratios of a way's epochs to the paired epochs of one device."""
    return [ratio for run in runs for ratio in run.get("ratios", ())]


def all_ratios(report: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return the median ratio to one device of each model and way."""
    found = {}
    for name, ways in report.get("time", {}).items():
        for way, runs in ways.items():
            if values := ratios(runs):
                found[name, way] = statistics.median(values)
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the ratios in both reports, before and now, by model and way. The largest change comes first."""
    old, new = all_ratios(before), all_ratios(now)
    common = sorted(old.keys() & new.keys(), key=lambda each: (-_off(old[each], new[each]), each))
    return {each: (old[each], new[each]) for each in common}


def _off(then: float, now: float) -> float:
    return abs(now / then - 1)


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each ratio that differs by more than 15% between the reports."""
    return [
        f"{name}, {way}: {then:.2f} then, {found:.2f} now"
        for (name, way), (then, found) in changes(before, now).items()
        if _off(then, found) > TOLERANCE
    ]


def repeated(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Compare two reports that share ratios, as Markdown."""
    found = changes(before, now)
    rows = [
        [name, way, f"{first:.2f}", f"{second:.2f}", f"{second / first:.2f}"]
        for (name, way), (first, second) in found.items()
    ]
    near = len(found) - len(moved(before, now))
    off = statistics.median(_off(*each) for each in found.values())
    lines = [
        "# The report on another day", "",
        "`tools/report.sh --out=DIR --compare=OTHER/report.json`: step times over those of one device, as in "
        f"[the report](report.md), of {_days({'time': before['time']})} and of {_days({'time': now['time']})}. "
        f"{len(found)} ratios are in both; {near} of them are within {TOLERANCE:.0%} of each other, and at the median "
        f"they are {off:.0%} apart.", "",
        *_table(["model", "way", "first", "second", "second / first"], rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _time_table(ways: Mapping[str, Runs]) -> list[str]:
    rows, failed = [], []
    for way, runs in ways.items():
        if not runs:  # Not measured yet.
            continue
        done = [run for run in runs if "step" in run]
        if not done:
            rows.append([f"*{way}*", "-", "-", "-", "-", "-"])
            failed.append(f"{way}: {runs[0]['failed']}")
            continue
        rows.append([
            way,
            spread((1e3 * step for run in done for step in run["steps"]), ".0f"),
            spread(ratios(done)),
            spread((run["first"] for run in done), ".1f"),
            str(done[0].get("collectives", "-")),
            f"{done[0]['bytes'] / _MIB:.1f}" if "bytes" in done[0] else "-",
        ])  # fmt: skip
    head = ["way", "step, ms", "/ one device", "first step, s", "collectives", "sent, MiB"]
    return [*_table(head, rows), "", *(f"*{line}*" for line in failed)]


def _memory_table(cases: Mapping[str, Mapping[str, Mapping[str, Any]]], what: str) -> list[str]:
    ways = list(dict.fromkeys(way for found in cases.values() for way in found))
    rows = []
    for name, found in cases.items():
        cells = []
        for way in ways:
            said = found.get(way, {})
            cells.append(f"{said['rests'] / _MIB:,.0f} / {said['peak'] / _MIB:,.0f}" if "rests" in said else "-")
        rows.append([name, *cells])
    return _table([what, *ways], rows)


def text(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    where = report["machine"]
    versions = sorted({
        run["versions"] for ways in report.get("time", {}).values() for runs in ways.values() for run in runs
        if "versions" in run
    })  # fmt: skip
    command = "tools/report.sh --quick" if report["quick"] else "tools/report.sh"
    lines = [
        "# The report", "",
        f"`{command}`, {_days(report)}: Python {where['python']}, "
        f"{'; '.join(versions)}; {where['machine']}. Medians, with the least and the most.", "", NOTES,
    ]  # fmt: skip
    for name, ways in report.get("time", {}).items():
        parameters = next((run["parameters"] for runs in ways.values() for run in runs if "parameters" in run), 0)
        lines += [f"## Time of {name}", "", f"{parameters:,} parameters.", "", *_time_table(ways), ""]
    if "time" in report:
        lines += ["![Step time over that of one device](time.svg)", ""]
    if "memory" in report:
        lines += ["## Memory", "", "MiB on a device: between two steps / at the peak of one.", ""]
        lines += [*_memory_table(report["memory"], "model"), ""]
    for what, cases in report.get("growth", {}).items():
        lines += [f"## Memory by {what}", "", *_memory_table(cases, what), "", f"![Memory by {what}]({what}.svg)", ""]
    return "\n".join(lines)


def _days(report: Mapping[str, Any]) -> str:
    """Return the first and the last day of the measurements."""
    dates = sorted(_dates(report))
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def _dates(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the day of each measurement."""
    for ways in report.get("time", {}).values():
        yield from (run["date"] for runs in ways.values() for run in runs)
    for cases in (report.get("memory", {}), *report.get("growth", {}).values()):
        yield from (said["date"] for found in cases.values() for said in found.values())


def save(report: Mapping[str, Any], out: pathlib.Path) -> None:
    """Write report.json into a directory, even if the report is incomplete."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def write(report: Mapping[str, Any], out: pathlib.Path) -> None:
    """Write report.json, report.md and the plots into a directory."""
    save(report, out)
    (out / "report.md").write_text(text(report).rstrip() + "\n")
    if "time" in report:
        _plot_times(report, out / "time.svg")
    for what, cases in report.get("growth", {}).items():
        _plot_growth(what, cases, out / f"{what}.svg")


def _plot_times(report: Mapping[str, Any], file: pathlib.Path) -> None:
    import matplotlib.figure

    found = all_ratios(report)
    names, ways = list(report["time"]), [way for way in WAYS if way != BASE and any(way == each for _, each in found)]
    figure = matplotlib.figure.Figure(figsize=(9, 1 + 0.9 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(ways))
    for number, way in enumerate(ways):
        at = [(row + number * height, found[name, way]) for row, name in enumerate(names) if (name, way) in found]
        axes.barh([place for place, _ in at], [value for _, value in at], height, label=way)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.4 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step over that of plain Keras on one device")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.savefig(file)


def _plot_growth(what: str, cases: Mapping[str, Mapping[str, Mapping[str, Any]]], file: pathlib.Path) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for way in GROWING_WAYS:
        for key, line in (("rests", "--"), ("peak", "-")):
            points = [(int(name), found[way][key] / _MIB) for name, found in cases.items() if key in found.get(way, {})]
            axes.plot(*zip(*points, strict=True), line, marker="o", label=f"{way}, {key}") if points else None
    axes.set_xscale("log", base=2)
    axes.set_xlabel(what)
    axes.set_ylabel("MiB on a device")
    axes.legend(fontsize="small")
    figure.savefig(file)
