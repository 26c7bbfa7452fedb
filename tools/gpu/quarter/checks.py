"""Run the checks of a quarter of an hour on one GPU, each with a time limit, and write each result at once.

    python tools/gpu/quarter/checks.py run --out=$OUT --only=a,b --seconds=580
    python tools/gpu/quarter/checks.py dry
    python tools/gpu/quarter/checks.py list

Writes results.jsonl (a line for each result, and for the end of each check), results.md (the same as a table) and
log.txt (the output of each check). A check that runs out of time prints the stacks of its threads. `dry` runs every
check on four CPU devices with tiny sizes. The exit status is 1 if a check failed. Needs only the standard library.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
# Seconds for stacks between the time limit and the end of the process.
_STACKS_SECONDS = 20
_LOG_BYTES = 200_000
_NOISE = re.compile(r"WARNING|oneDNN custom operations")


@dataclasses.dataclass(frozen=True)
class Check:
    """A program of the run.

    Attributes:
        name: The item of issue 49, and a number.
        what: What it shows.
        command: The program and its arguments.
        dry: The program with tiny sizes.
        seconds: The time limit on a GPU.
        environment: More environment variables.
        others: True for a program without TensorFlow, which uses the packages of the machine.
        beside: True to run beside the checks before. Such a check measures no time.
        native: True to print the native stacks, too, if the program runs out of time.
    """

    name: str
    what: str
    command: Sequence[str]
    dry: Sequence[str]
    seconds: int
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    others: bool = False
    beside: bool = False
    native: bool = False


_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "report_names", "-p", "xdist", "-q", "--tb=short", "-rf")
# The machine has plugins of its own, whose warnings would be errors.
_NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_FOUR = {"TFSHARD_GPU_MEBIBYTES": "16000"}


def _training(size: str, *variants: dict[str, Any], steps: int) -> tuple[str, ...]:
    return (str(HERE / "training.py"), f"--size={size}", f"--steps={steps}", *map(json.dumps, variants))


def _trainings(size: str, *variants: dict[str, Any], steps: int = 10) -> dict[str, tuple[str, ...]]:
    """Return the commands of variants, on a GPU and dry."""
    return {"command": _training(size, *variants, steps=steps), "dry": _training("tiny", *variants, steps=2)}


def _parts(**values: Any) -> dict[str, Any]:
    """Return a variant on four parts of the card."""
    return {"devices": 4, **values}


_KERAS = ({"way": "keras"}, {"way": "keras", "compiled": True})
_SHARDED = ({"devices": 1}, {"devices": 1, "compiled": True})
_SAVE = (str(ROOT / "tools" / "bench" / "async_save.py"),)

CHECKS = (
    Check(
        "a", "tests of storage, devices and operations that are not quick tests, by name if they fail",
        (*_PYTEST, "-n14", "--dist=worksteal", "-m", "not quick", "tests/devices", "tests/operations", "tests/storage"),
        (*_PYTEST, "-n2", "tests/devices/test_gpus.py"),
        160, {**_NO_PLUGINS, "TFSHARD_GPU_MEBIBYTES": "1000"},
    ),
    Check(
        "h1", "NCCL between four parts of the card, stage 0", (str(HERE / "nccl.py"), "--zero_stage=0"),
        (str(HERE / "nccl.py"), "--zero_stage=0"), 30,
        {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "INFO", "TFSHARD_GPU_MEBIBYTES": "3000"},
        beside=True, native=True,
    ),
    Check(
        "h2", "NCCL between four parts of the card, stage 3", (str(HERE / "nccl.py"), "--zero_stage=3"),
        (str(HERE / "nccl.py"), "--zero_stage=3"), 30,
        {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "INFO", "TFSHARD_GPU_MEBIBYTES": "3000"},
        beside=True, native=True,
    ),
    Check(
        "i", "a failing step, then ten that do not fail", (str(HERE / "failing.py"),),
        (str(HERE / "failing.py"), "--steps=2"), 25, {"TFSHARD_GPU_MEBIBYTES": "3000"}, beside=True,
    ),
    Check(
        "g", "peaks beside plans, stages 0 to 3",
        **_trainings("4 blocks", *(_parts(options={"zero_stage": stage}) for stage in range(4))),
        seconds=60, environment={"TFSHARD_GPU_MEBIBYTES": "12000"}, beside=True,
    ),
    Check("b1", "Keras and Keras with XLA, 124M", **_trainings("124M", *_KERAS), seconds=40),
    Check("b2", "tfshard on one device, 124M", **_trainings("124M", *_SHARDED), seconds=35),
    Check("b3", "Keras and Keras with XLA, 350M", **_trainings("350M", *_KERAS, steps=5), seconds=75),
    Check("b4", "tfshard on one device, 350M", **_trainings("350M", *_SHARDED, steps=5), seconds=45),
    Check(
        "b5", "JAX, 124M and 350M", (str(HERE / "on_jax.py"), "124M", "350M"), (str(HERE / "on_jax.py"), "tiny"), 30,
        others=True,
    ),
    Check(
        "b6", "torch.compile, 124M and 350M", (str(HERE / "on_torch.py"), "124M", "350M"),
        (str(HERE / "on_torch.py"), "tiny"), 35, others=True,
    ),
    Check(
        "c", "prefetch 1 and 2, by trace",
        **_trainings("4 blocks", *(_parts(options={"prefetch": each}, traced=True) for each in (1, 2))),
        seconds=35, environment=_FOUR,
    ),
    Check(
        "d1", "compiled blocks on and off",
        **_trainings("4 blocks", _parts(compiled=True, traced=True), _parts(compiled=False)),
        seconds=40, environment=_FOUR,
    ),
    Check(
        "d2", "TensorFlow's own clusters for XLA",
        **_trainings("4 blocks", _parts(label="--tf_xla_auto_jit=2")),
        seconds=25, environment={**_FOUR, "TF_XLA_FLAGS": "--tf_xla_auto_jit=2"},
    ),
    Check(
        "e", "renamed collectives on and off",
        **_trainings("4 blocks", *(_parts(renamed=each, watched=True) for each in (True, False)), steps=20),
        seconds=30, environment=_FOUR,
    ),
    Check(
        "f", "compression and slots of 8 bits, beside without",
        **_trainings(
            "4 blocks", _parts(), *(_parts(options={"compression": each}) for each in ("int8", "bfloat16")),
            _parts(options={"slot_dtype": "int8"}), steps=6,
        ),
        seconds=45, environment=_FOUR,
    ),
    Check(
        "j", "asynchronous saves of 350M, with steps meanwhile",
        (
            *_SAVE, "--layers=24", "--width=1024", "--heads=16", "--vocabulary=50257", "--sequence_length=256",
            "--batch_size=4", "--every_steps=5", "--rounds=1",
        ),
        (
            *_SAVE, "--layers=1", "--width=32", "--vocabulary=64", "--sequence_length=16", "--every_steps=2",
            "--rounds=1",
        ),
        60, _FOUR,
    ),
)  # fmt: skip
# The checks of a dry run that take seconds each.
LIGHT = ("a", "b5", "b6", "h1", "i")
_DRY_SECONDS = 400


class Results:
    """The files of results."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._lock = folder, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "results.md").exists():
            (folder / "results.md").write_text("| check | result |\n| --- | --- |\n")

    def add(self, check: Check, line: dict[str, Any]) -> None:
        text = "; ".join(
            f"{key} {json.dumps(value) if isinstance(value, list | dict) else value}" for key, value in line.items()
        )
        text = text.replace("|", "\\|").replace("\n", " ")
        with self._lock:
            with (self._folder / "results.jsonl").open("a") as file:
                file.write(json.dumps({"check": check.name, **line}) + "\n")
            with (self._folder / "results.md").open("a") as file:
                file.write(f"| {check.name} | {text} |\n")
            print(f"{check.name}: {text[:700]}", flush=True)

    def log(self, check: Check, text: str) -> None:
        with self._lock, (self._folder / "log.txt").open("a") as file:
            file.write(f"\n===== {check.name}: {check.what}\n{text[-_LOG_BYTES:]}\n")


def run(check: Check, results: Results, *, seconds: float, dry: bool) -> bool:
    """Run a check for at most `seconds`. Returns whether it ended without an error."""
    program = check.dry if dry else check.command
    environment = {**os.environ, **check.environment, "PYTHONUNBUFFERED": "1"}
    if check.others:
        for name in ("PYTHONPATH", "XLA_FLAGS"):
            environment.pop(name, None)
        if machine := environment.get("QUARTER_LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = machine
        elif machine == "":
            del environment["LD_LIBRARY_PATH"]
    else:
        environment |= {
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(HERE), environment.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "with_stacks.py"), *program]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output: list[str] = []
    found: list[dict[str, Any]] = []
    reader = threading.Thread(target=_read, args=(process, check, results, output, found))
    reader.start()
    in_time = True
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        in_time = False
        _print_stacks(process, check, output)
    _end(process)
    reader.join()
    took = round(time.monotonic() - begin, 1)
    status = process.returncode
    if not found and status == 0:
        found.append({"output": _last_lines(output)})
        results.add(check, found[0])
    ended = f"no end within {seconds:.0f} s" if not in_time else "ok" if status == 0 else f"exit {status}"
    end = {"ended": ended, "what": check.what, "seconds": took}
    results.add(check, end if ended == "ok" else {**end, "last": _last_lines(output)})
    results.log(check, "".join(output))
    return ended == "ok"


def _read(
    process: subprocess.Popen[str], check: Check, results: Results, output: list[str], found: list[dict[str, Any]]
) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            output.append(line)
            if line.startswith("{"):
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
                results.add(check, found[-1])


def _print_stacks(process: subprocess.Popen[str], check: Check, output: list[str]) -> None:
    """Print the Python stacks of a program, and its native stacks if a debugger is installed, into its output."""
    process.send_signal(signal.SIGUSR1)
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    if check.native and debugger:
        command = [debugger, "-p", str(process.pid), "-batch", "-ex", "thread apply all bt 16"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STACKS_SECONDS)
            output.append(done.stdout)
        except subprocess.TimeoutExpired:
            output.append(f"{debugger} gave no stacks within {_STACKS_SECONDS} s\n")
    else:
        time.sleep(1)


def _end(process: subprocess.Popen[str]) -> None:
    """End a program and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _last_lines(output: Iterable[str]) -> str:
    lines = [line.rstrip() for line in output if line.strip() and not _NOISE.search(line)]
    return " / ".join(lines[-8:])[-1500:]


def chosen(names: str | None) -> list[Check]:
    """Return the checks whose names begin with one of the comma-separated names, or all."""
    if not names:
        return list(CHECKS)
    wanted = names.split(",")
    unknown = [each for each in wanted if not any(check.name.startswith(each) for check in CHECKS)]
    if unknown:
        raise SystemExit(f"Unknown check. Checks: {[check.name for check in CHECKS]}. Received: {unknown}")
    return [check for check in CHECKS if check.name.startswith(tuple(wanted))]


def groups(checks: Sequence[Check]) -> list[list[Check]]:
    """Return the checks in order, with those that run beside the check before in its group."""
    found: list[list[Check]] = []
    for check in checks:
        if check.beside and found:
            found[-1].append(check)
        else:
            found.append([check])
    return found


def seconds_of(checks: Sequence[Check]) -> int:
    """Return the sum of the time limits, where a group takes as long as its first check or all others together."""
    return sum(max(first.seconds, sum(each.seconds for each in others)) for first, *others in groups(checks))


def run_all(checks: Sequence[Check], results: Results, *, seconds: float, dry: bool) -> list[str]:
    """Run the checks within `seconds`. Returns the names of the checks that failed or found no time."""
    deadline = time.monotonic() + seconds
    failed: list[str] = []

    def run_in_turn(each: Sequence[Check]) -> None:
        for check in each:
            left = deadline - time.monotonic()
            limit = min(_DRY_SECONDS if dry else check.seconds, left)
            if limit < 5:
                results.add(check, {"ended": "not run: no time left", "what": check.what})
                failed.append(check.name)
            elif not run(check, results, seconds=limit, dry=dry):
                failed.append(check.name)

    for first, *others in groups(checks):
        if dry:
            run_in_turn([first, *others])
            continue
        beside = threading.Thread(target=run_in_turn, args=(others,))
        beside.start()
        run_in_turn([first])
        beside.join()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["run", "dry", "list"])
    parser.add_argument("--only", help="Checks by the beginning of their names, separated by commas.")
    parser.add_argument("--out", default=os.environ.get("OUT", "build/quarter/results"), help="Folder of the results.")
    parser.add_argument("--seconds", type=float, default=580, help="Time limit of all checks, on a GPU.")
    arguments = parser.parse_args()
    checks, dry = chosen(arguments.only), arguments.mode == "dry"
    if arguments.mode == "list":
        for check in checks:
            print(f"{check.name:3} {check.seconds:4} s{' (beside)' if check.beside else ''}  {check.what}")
        print(f"all {seconds_of(checks)} s")
        return
    os.environ["TFSHARD_DEVICE_TYPE"] = "CPU" if dry else "GPU"
    results = Results(pathlib.Path(arguments.out))
    failed = run_all(checks, results, seconds=1e6 if dry else arguments.seconds, dry=dry)
    print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
