"""Commands, flags and help. Does not import TensorFlow or Keras, because that takes seconds.

`parse` also checks everything that needs neither library, so tfshard refuses a wrong command line at once.
"""

import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from tfshard import tables

HELP = ("--help", "-h", "-help", "--helpfull", "help")

# The time limits of a launched run in seconds, by the name of the flag and of the attribute of `launch.options.Launch`.
TIMEOUTS = {
    "startup_timeout": 300.0,
    "registration_timeout": 60.0,
    "step_timeout": 60.0,
    "first_step_timeout": 600.0,
    "grace": 3.0,
}
# The allocators of a client's CPU tensors. The first is the default.
ALLOCATORS = ("system", "tensorflow")
# The port of host 0.
DEFAULT_PORT = 29870
# The message sizes, in bytes, that `profile-network` measures.
SIZES = tuple(1 << power for power in range(10, 25, 2))
# The numbers of `layouts.config.ZeroStage`, which imports TensorFlow. tests/test_cli.py compares both.
ZERO_STAGES = {0: "nothing sharded over the batch axis", 1: "optimizer slots", 2: "and gradients", 3: "and parameters"}
# Selects the compiled model's optimizer, or Adam.
AUTO = "auto"
# The flag with which `doctor` only says which run a cluster's variables describe.
CLUSTER = "cluster"
# The flag with which `doctor` takes all other flags.
ALL_DEVICES = "all-devices"

_STAGES_TEXT = ", ".join(f"{stage} ({adds})" for stage, adds in ZERO_STAGES.items())
_LAYOUT_MAP_HELP = "MODULE:NAME of a layout map or of a function that returns one, or auto."
_ZERO_STAGE_HELP = f"ZeRO stage: {_STAGES_TEXT}."

# absl has no types.
_no_flags: Callable[[], flags.FlagValues] = flags.FlagValues


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand.

    Attributes:
        arguments: The names of the positional arguments.
        options: Creates the flags. Each command has separate flags, so they do not clash with the flags of a user's
            module.
        program: True if the first positional argument is a program that receives all later arguments.
        summary: A one-line description.
        example: A working command line, without `tfshard`.
    """

    arguments: tuple[str, ...] = ()
    options: Callable[[], flags.FlagValues] = _no_flags
    program: bool = False
    summary: str
    example: str


def _layout_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_string("mesh", None, "The axes of the mesh, such as batch:8,model:4.", flag_values=values)
    flags.DEFINE_string("layout_map", None, _LAYOUT_MAP_HELP, flag_values=values)
    return values


def _plan_flags() -> flags.FlagValues:
    values = _layout_flags()
    flags.DEFINE_integer("zero_stage", 3, _ZERO_STAGE_HELP, flag_values=values)
    flags.DEFINE_string(
        "optimizer",
        None,
        "Name of a Keras optimizer, to plan its slots. Default: the compiled model's.",
        flag_values=values,
    )
    flags.DEFINE_string("links", None, "A file that profile-network --save wrote: adds the time of collectives.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_boolean("detail", False, "Print a row for each variable and collective.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print JSON instead of tables, with sizes in bytes.", flag_values=values)
    return values


def _advise_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_integer("devices", None, "Number of devices.", flag_values=values)
    flags.DEFINE_string("memory_per_device", None, "Memory of a device, such as 16GiB or 80GB.", flag_values=values)
    flags.DEFINE_integer("batch", None, "Samples of a step, over all devices.", flag_values=values)
    flags.DEFINE_integer("length", None, "Length of the model's open input dims, such as tokens.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("layout_map", None, _LAYOUT_MAP_HELP, flag_values=values)
    flags.DEFINE_string(
        "optimizer", AUTO, "Name of a Keras optimizer, for its slots; auto: the compiled model's, or adam.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("links", None, "A file that profile-network --save wrote.", flag_values=values)
    flags.DEFINE_string(
        "machine", None, "A file that calibrate --save wrote, or a100, cpu, h100 or v5p.", flag_values=values
    )
    return values


def _verify_flags() -> flags.FlagValues:
    values = _layout_flags()
    flags.DEFINE_integer("zero_stage", 3, _ZERO_STAGE_HELP, flag_values=values)
    flags.DEFINE_string(
        "batch", None, "MODULE:FUNCTION that returns a batch, such as (x, y). Default: FUNCTION batch in the "
                       "model's MODULE.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "optimizer", None, "Name of a Keras optimizer, for a model that is not compiled.", flag_values=values
    )
    flags.DEFINE_string("loss", None, "Name of a Keras loss, for a model that is not compiled.", flag_values=values)
    flags.DEFINE_float(
        "tolerance", None, "Largest accepted difference. By default it depends on the dtype.", flag_values=values
    )
    return values


def _launch_flags() -> flags.FlagValues:
    values = _no_flags()

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, flag_values=values)

    def seconds(name: str, text: str) -> None:
        flags.DEFINE_float(name, TIMEOUTS[name], text, flag_values=values)

    integer("num_processes", 1, "Number of clients on each host.")
    integer("devices_per_process", None, "Number of devices of each client. By default the script chooses.")
    seconds("step_timeout", "Longest time of a step, and of a client without a heartbeat, in seconds.")
    seconds("first_step_timeout", "Longest time of the first step of a kind, which includes compilation, in seconds.")
    seconds("startup_timeout", "Seconds from the start until every client has called tfshard.initialize().")
    seconds("registration_timeout", "Seconds from the first client's tfshard.initialize() until the last one's.")
    seconds("grace", "Seconds from SIGTERM to SIGKILL, when the launcher stops the clients.")
    integer("max_restarts", 0, "How many times to restart all clients after one dies or hangs.")
    integer("elastic_min", None, "Smallest number of clients to continue with when a client cannot restart.")
    flags.DEFINE_enum(
        "allocator",
        ALLOCATORS[0],
        ALLOCATORS,
        "Allocator of the clients' CPU tensors: system returns freed memory; tensorflow keeps it and lets "
        "profile_step measure the allocations of a step.",
        flag_values=values,
    )
    flags.DEFINE_boolean("module", False, "SCRIPT is a module, as in python -m.", flag_values=values)
    _define_hosts(values)
    return values


def _define_hosts(values: flags.FlagValues) -> None:
    """Add the flags that say where launchers and clients run and meet."""
    flags.DEFINE_list("hosts", None, "Names of all hosts, the same list on each.", flag_values=values)
    flags.DEFINE_integer("host_index", None, "Index of this host in --hosts, from 0.", flag_values=values)
    flags.DEFINE_string(
        "address", None, "Address on which host 0 listens. Default: its name in --hosts.", flag_values=values
    )
    flags.DEFINE_integer(
        "port", 0, f"Port on which host 0 listens. By default a free port; with several hosts {DEFAULT_PORT}.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "client_port",
        0,
        "Port of the first client on each host; the other clients use the next ports. By default free ports.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "secret_file", None, "A file (mode 600) with the secret that the hosts share.", flag_values=values
    )
    flags.DEFINE_boolean("allow_public_address", False, "Listen on a public address.", flag_values=values)


def _doctor_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_boolean(
        CLUSTER, False, "Print which run the cluster's variables describe, and whether its address can be reached. "
                        "Starts no device.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_boolean(
        ALL_DEVICES, False, "Run all checks on all devices, each in processes of its own, and write a report.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("num_devices", None, "Number of devices, in one process. By default all.", flag_values=values)
    flags.DEFINE_integer(
        "num_processes", None, "Number of processes on each host, for launched runs. By default one process runs each "
                               "check.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("devices_per_process", None, "Number of devices of each process.", flag_values=values)
    flags.DEFINE_list("checks", None, "Names of the checks to run. By default all.", flag_values=values)
    flags.DEFINE_float("check_timeout", 120.0, "Longest time of a check, in seconds.", flag_values=values)
    flags.DEFINE_string(
        "report_dir", None, "Folder for the report. By default a new folder with the date.", flag_values=values
    )
    flags.DEFINE_string(
        "links", None, "A file that profile-network --save wrote: the bandwidths to expect.", flag_values=values
    )
    _define_hosts(values)
    return values


def _network_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_integer("num_devices", None, "Number of devices of the run. By default all.", flag_values=values)
    flags.DEFINE_list("sizes", [str(size) for size in SIZES], "Sizes of the messages, in bytes.", flag_values=values)
    flags.DEFINE_integer("repeats", 10, "How many times to measure each size.", flag_values=values)
    flags.DEFINE_integer(
        "devices_per_host", None, "Number of devices to treat as one host. By default the devices of one launcher.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("save", None, "Write the links to this file, for plan --links and advise.", flag_values=values)
    flags.DEFINE_string("plot", None, "Draw a picture to this file. Needs matplotlib.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print JSON instead of a table.", flag_values=values)
    return values


def _calibrate_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_integer("num_devices", None, "Number of devices of the run. By default all.", flag_values=values)
    flags.DEFINE_string("save", None, "Write the machine to this file, for simulate and advise.", flag_values=values)
    return values


def _simulate_flags() -> flags.FlagValues:
    values = _no_flags()
    flags.DEFINE_string(
        "cluster",
        None,
        "The file that describes a device, and the links (tfshard docs simulating); or a100, cpu, h100 or v5p.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "devices",
        ["8", "16", "32", "64", "128", "256", "512", "1024", "2048", "4096"],
        "Numbers of devices to simulate.",
        flag_values=values,
    )
    flags.DEFINE_integer("batch", None, "Samples of a step, over all devices.", flag_values=values)
    flags.DEFINE_integer("length", None, "Length of the model's open input dims, such as tokens.", flag_values=values)
    flags.DEFINE_string("layout_map", None, _LAYOUT_MAP_HELP, flag_values=values)
    flags.DEFINE_list("zero_stages", ["3"], "The ZeRO stages to consider.", flag_values=values)
    flags.DEFINE_string(
        "optimizer", AUTO, "Name of a Keras optimizer, for its slots; auto: the compiled model's, or adam",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("plot", None, "Draw a picture to this file. Needs matplotlib.", flag_values=values)
    flags.DEFINE_boolean("json", False, "Print JSON instead of a table.", flag_values=values)
    return values


_FUNCTION = ("MODULE:FUNCTION",)

COMMANDS: Mapping[str, Command] = {
    "plan": Command(
        arguments=_FUNCTION,
        options=_plan_flags,
        summary="Print the plan of the Keras model that FUNCTION builds, for a mesh of any size; exits with 1 if "
        "compile would refuse the model.",
        example="plan models.py:build --mesh=batch:8 --optimizer=adam",
    ),
    "advise": Command(
        arguments=_FUNCTION,
        options=_advise_flags,
        summary="Recommend a mesh and a ZeRO stage for the Keras model that FUNCTION builds; exits with 1 if nothing "
        "fits.",
        example="advise models.py:build --devices=8 --memory_per_device=16GiB --batch=64",
    ),
    "lint": Command(
        arguments=_FUNCTION,
        options=_layout_flags,
        summary="Check a layout map against the Keras model that FUNCTION builds, and the model; exits with 1 for "
        "errors.",
        example="lint models.py:build --mesh=batch:2,model:4 --layout_map=models.py:LAYOUT",
    ),
    "verify": Command(
        arguments=_FUNCTION,
        options=_verify_flags,
        summary="Run a training step of the Keras model that FUNCTION builds sharded and on one device, and compare "
        "them; exits with 1 if they differ.",
        example="verify models.py:build --mesh=batch:4 --optimizer=adam --loss=mse",
    ),
    "launch": Command(
        arguments=("SCRIPT",),
        options=_launch_flags,
        program=True,
        summary="Run a script in several processes that train together, here or on several hosts. Arguments after "
        "SCRIPT go to the script.",
        example="launch --num_processes=2 --devices_per_process=2 train.py --epochs=3",
    ),
    "docs": Command(
        arguments=("[PAGE]",),
        summary="Print a page of the documentation, or the names of all pages.",
        example="docs layers",
    ),
    "doctor": Command(
        options=_doctor_flags,
        summary="Check versions, devices and switches, and train a tiny model sharded; with --cluster explain which "
        "run the cluster's variables describe; with --all-devices check everything that a bug report needs.",
        example="doctor",
    ),
    "profile-network": Command(
        options=_network_flags,
        summary="Measure latency and bandwidth of each collective; for several processes run it with tfshard "
        "launch --module tfshard.",
        example="profile-network --num_devices=4 --save=network.json",
    ),
    "calibrate": Command(
        options=_calibrate_flags,
        summary="Measure the speed of the devices and their links, for simulate and advise. Needs SciPy.",
        example="calibrate --num_devices=4 --save=machine.yaml",
    ),
    "simulate": Command(
        arguments=_FUNCTION,
        options=_simulate_flags,
        summary="Predict steps of the Keras model that FUNCTION builds on clusters of many sizes, and the best mesh of "
        "each; exits with 1 if nothing fits.",
        example="simulate models.py:build --cluster=a100 --batch=1024",
    ),
}


def overview() -> str:
    """Return the output of `tfshard --help`: a line for each command."""
    width = max(map(len, COMMANDS)) + 4
    lines = ["tfshard: train Keras models sharded over a DTensor mesh.", "", "Usage: tfshard COMMAND [flags]", ""]
    lines += [_wrapped(f"  {name}".ljust(width), command.summary) for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "tfshard COMMAND --help: the flags of a command. tfshard --version: the version."])


def _wrapped(begin: str, text: str) -> str:
    """Return `begin` and `text`, wrapped to lines of at most 100 characters."""
    return textwrap.fill(text, width=100, initial_indent=begin, subsequent_indent=" " * len(begin))


def command_help(name: str) -> str:
    """Return the output of `tfshard COMMAND --help`: its arguments and flags."""
    command = COMMANDS[name]
    usage = ("tfshard", name, "[flags]", *command.arguments) if command.program else (
        "tfshard", name, *command.arguments, "[flags]"
    )  # fmt: skip
    lines = [f"Usage: {' '.join(usage)}", "", _wrapped("", command.summary), "", f"Example: tfshard {command.example}"]
    options = command.options()
    if len(options):
        lines += ["", "Flags:"]
    for flag in (options[flag_name] for flag_name in options):
        default = "" if flag.default in (None, False) else f" Default: {flag.default}."
        lines.append(_wrapped(f"  --{flag.name}".ljust(24) + " ", f"{flag.help}{default}"))
    return "\n".join(lines)


def pages() -> Mapping[str, pathlib.Path]:
    """Return the documentation pages by name, from the repository or from the installed wheel."""
    folder = pathlib.Path(__file__).parents[1] / "docs"
    # Another installed package may have a folder with this name.
    found = sorted(folder.glob("*.md")) if (folder / "troubleshooting.md").exists() else []
    if not found:
        installed = importlib.metadata.files("tfshard") or ()
        found = sorted(pathlib.Path(file.locate()) for file in installed if file.match("share/doc/tfshard/*.md"))
    return {page.stem: page for page in found}


def _docs(names: Sequence[str]) -> str:
    """Return the output of `tfshard docs [PAGE]`."""
    found = pages()
    if len(names) == 1 and names[0].removesuffix(".md") in found:
        return found[names[0].removesuffix(".md")].read_text(encoding="utf-8")
    listed = f"tfshard docs PAGE prints a page. Pages: {', '.join(found)}"
    return f"{NO_PAGE} {' '.join(names)!r}. {listed}" if names else listed


# The beginning of an answer that is an error.
NO_PAGE = "Unknown page"


def version() -> str:
    """Return the output of `tfshard --version`."""
    return f"tfshard {importlib.import_module('tfshard').__version__}"


def answer(arguments: Sequence[str]) -> str | None:
    """Return help, the version or a documentation page, or None if the command line needs TensorFlow.

    Args:
        arguments: The command line without the program's name.

    Example:

    >>> from tfshard import command_line
    >>> print(command_line.answer(["docs", "--help"]))
    Usage: tfshard docs [PAGE] [flags]
    <BLANKLINE>
    Print a page of the documentation, or the names of all pages.
    <BLANKLINE>
    Example: tfshard docs layers
    >>> command_line.answer(["doctor"]) is None
    True
    """
    if not arguments:
        return overview()
    name, *rest = arguments
    if name in ("--version", "version"):
        return version()
    if name in HELP:
        return command_help(rest[0]) if rest and rest[0] in COMMANDS else overview()
    if name not in COMMANDS:
        return overview() if set(HELP) & set(rest) else None
    if name == "docs" and not set(HELP) & set(rest):
        return _docs(rest)
    if COMMANDS[name].program:  # All arguments after the program belong to the program.
        rest = rest[: next((i for i, each in enumerate(rest) if not each.startswith("-")), len(rest))]
    return command_help(name) if set(HELP) & set(rest) else None


class UsageError(ValueError):
    """Raised for a command line that tfshard does not understand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """A parsed and checked command line.

    Attributes:
        name: The name of the command.
        values: The flags.
        arguments: The positional arguments.
    """

    name: str
    values: flags.FlagValues
    arguments: list[str]


def parse(arguments: Sequence[str]) -> Parsed:
    """Parse a command line and check everything that works without TensorFlow and Keras.

    Args:
        arguments: The command line without the program's name.

    Raises:
        UsageError: The command line is wrong. absl raises `flags.Error` for wrong flags.
    """
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(unknown(name))
    command = COMMANDS[name]
    values = command.options()
    # Flags may follow the positional arguments, unless these are a program and its flags.
    values.set_gnu_getopt(not command.program)
    _, *positional = values([name, *rest])
    if len(positional) != len(command.arguments) and not (command.program and positional):
        raise UsageError(
            f"'tfshard {name}' takes {len(command.arguments)} positional arguments {command.arguments}. "
            f"Received: {positional}"
        )
    parsed = Parsed(name=name, values=values, arguments=positional)
    _check(parsed)
    return parsed


def _check(parsed: Parsed) -> None:
    """Raise `UsageError` for flags and arguments that are wrong for any model."""
    given: dict[str, Any] = {
        flag: parsed.values[flag].value for flag in parsed.values if parsed.values[flag].value is not None
    }
    for flag, value in given.items():
        # absl's types: string, integer, float, boolean, list.
        if flag in TIMEOUTS and not value > 0:
            raise UsageError(f"{flag} must be positive. Received: {flag}={value}")
        if flag in _LEAST and isinstance(value, int) and value < _LEAST[flag]:
            raise UsageError(f"{flag} must be at least {_LEAST[flag]}. Received: {flag}={value}")
        if isinstance(value, list) and flag not in ("hosts", "checks"):
            numbers(flag, value)
    stages = [given.get("zero_stage", 0), *map(int, given.get("zero_stages", ()))]
    if unknown := set(stages) - set(ZERO_STAGES):
        raise UsageError(f"Unknown ZeRO stage. Stages: {_STAGES_TEXT}. Received: zero_stage={max(unknown)}")
    if "mesh" in parsed.values:
        parse_mesh(given.get("mesh"))
    _check_needed(parsed.name, given)
    if "memory_per_device" in given:
        memory(given["memory_per_device"])
    _check_files(given)
    if COMMANDS[parsed.name].arguments == _FUNCTION:
        check_target(parsed.arguments[0])
    for flag in ("layout_map", "batch"):
        if isinstance(given.get(flag), str) and given[flag] and given[flag] != AUTO:
            check_target(given[flag])
    if parsed.name == "doctor":
        _check_doctor(given)
    if parsed.name == "launch" and not given["module"] and not os.path.isfile(parsed.arguments[0]):
        raise UsageError(f"The file does not exist. (Launch a module with --module.) Received: {parsed.arguments[0]}")


def _check_doctor(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for flags of `doctor` that do not fit together."""
    others = {flag: value for flag, value in given.items() if flag != ALL_DEVICES and value not in (False, [], 0)}
    others.pop("check_timeout", None)
    if others.pop(CLUSTER, False) and (others or given[ALL_DEVICES]):
        raise UsageError(f"--{CLUSTER} takes no other flags. Received: {others}")
    if others and not given[ALL_DEVICES]:
        raise UsageError(f"These flags need --{ALL_DEVICES}. Received: {others}")
    is_launched = "num_processes" in given or "hosts" in given
    if is_launched and "devices_per_process" not in given:
        raise UsageError(f"Several processes need --devices_per_process. Received: {others}")
    if is_launched and "num_devices" in given:
        raise UsageError(
            "num_devices is for one process. With several, give --num_processes and --devices_per_process. Received: "
            f"{others}"
        )
    if not is_launched and "devices_per_process" in given:
        raise UsageError(f"devices_per_process needs --num_processes. Received: {others}")
    if not given["check_timeout"] > 0:
        raise UsageError(f"check_timeout must be positive. Received: check_timeout={given['check_timeout']}")


# The minimum values of integer flags.
_LEAST = dict.fromkeys(
    ("devices", "batch", "length", "num_devices", "repeats", "devices_per_host", "num_processes",
     "devices_per_process", "elastic_min"), 1,
) | dict.fromkeys(("max_restarts", "host_index", "port", "client_port"), 0)  # fmt: skip

_NEEDED = {
    "advise": (
        ("devices", "memory_per_device", "batch"),
        "Give --devices, --memory_per_device and --batch, the samples of a step over all devices.",
    ),
    "simulate": (
        ("cluster", "batch"),
        "Give --cluster=FILE, which describes the devices, and --batch, the samples of a step.",
    ),
}


def _check_needed(name: str, given: Mapping[str, object]) -> None:
    needed, message = _NEEDED.get(name, ((), ""))
    missing = [flag for flag in needed if flag not in given]
    if missing:
        raise UsageError(f"{message} Missing: {', '.join(f'--{flag}' for flag in missing)}")


def _check_files(given: Mapping[str, str]) -> None:
    """Raise `UsageError` for unreadable input files, and for output files that could not be written after the work."""
    clusters = {path.stem for path in (pathlib.Path(__file__).parent / "planning" / "clusters").iterdir()}
    for flag in ("links", "machine", "cluster"):
        names = () if flag == "links" else sorted(clusters)
        # `doctor` has a boolean flag of this name.
        if isinstance(given.get(flag), str) and given[flag] not in names and not os.path.isfile(given[flag]):
            others = f", or one of {names}" if names else ""
            raise UsageError(f"--{flag} must be an existing file{others}. Received: {flag}={given[flag]!r}")
    for flag in ("save", "plot"):
        if flag in given and not pathlib.Path(given[flag]).absolute().parent.is_dir():
            raise UsageError(f"--{flag} must be a file in an existing folder. Received: {flag}={given[flag]!r}")
    if "plot" in given and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: pip install matplotlib. Received: plot={given['plot']!r}")


def check_target(target: str) -> tuple[str, str]:
    """Return the module and the name of `MODULE:NAME`. MODULE is importable, or the path of a .py file.

    Raises:
        UsageError: The target has another form, or its module does not exist.
    """
    module, colon, name = target.rpartition(":")
    if not colon or not module or not name:
        raise UsageError(f"Write MODULE:NAME, such as models.py:build or package.models:build. Received: {target}")
    first = module.partition(".")[0]
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise UsageError(f"The file does not exist. Received: {module}")
    elif first not in (*sys.modules, *sys.builtin_module_names):
        if importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"Cannot import '{module}': No module named '{first}'. Received: {target}")
    return module, name


def parse_mesh(text: str | None) -> dict[str, int]:
    """Return the sizes of a mesh's axes from a text such as `"batch:8,model:4"`.

    >>> parse_mesh("batch:8,model:4")
    {'batch': 8, 'model': 4}
    """
    axes: dict[str, int] = {}
    for part in (text or "").split(","):
        name, _, size = part.strip().partition(":")
        if not name or not size.isdecimal() or name in axes:
            raise UsageError(f"--mesh must be axes with sizes, such as --mesh=batch:8,model:4. Received: mesh={text!r}")
        if not int(size):
            raise UsageError(f"The size of mesh axis '{name}' must be a positive integer. Received: mesh={text!r}")
        axes[name] = int(size)
    return axes


def memory(text: str) -> int:
    """Return the value of `--memory_per_device` in bytes."""
    try:
        return tables.parse_size("memory_per_device", text)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def numbers(name: str, texts: Sequence[str]) -> list[int]:
    """Return the integers of a list flag."""
    if not all(text.isdecimal() for text in texts):
        raise UsageError(f"--{name} must be numbers. Received: {name}={texts}")
    return [int(text) for text in texts]


def refusal(arguments: Sequence[str]) -> str | None:
    """Return the error line of a wrong command line, or None. Checks everything that needs no TensorFlow."""
    try:
        parse(arguments)
    except (UsageError, flags.Error) as error:
        return error_line(error)
    return None


def error_line(error: Exception) -> str:
    """Format an error that the user can fix."""
    return f"tfshard: error: {' '.join(str(error).split())}"


def is_answered_alone() -> bool:
    """Return whether this process is `tfshard` or `python -m tfshard` and can answer without TensorFlow."""
    program, *arguments = sys.argv or [""]
    is_module = program == "-m" and sys.orig_argv[-len(arguments) - 2 :][:2] == ["-m", "tfshard"]
    is_script = pathlib.Path(program).stem == "tfshard" and pathlib.Path(program).suffix in ("", ".exe")
    if not (is_module or is_script):
        return False
    return answer(arguments) is not None or refusal(arguments) is not None


def unknown(name: str) -> str:
    """Return the error message for an unknown command."""
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown command. Commands: {tuple(COMMANDS)}.{meant} Received: {name}"


def main() -> None:
    """Run the command line and exit: 0 for success, 1 for a failed check, 2 for a wrong command line."""
    text = answer(sys.argv[1:])
    refused = refusal(sys.argv[1:]) if text is None else None
    if refused is not None:
        print(refused, file=sys.stderr)
        sys.exit(2)
    if text is None:
        importlib.import_module("tfshard.cli").main()
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:  # From `head`, for example. Python would report it again on close.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    is_wrong = len(sys.argv) == 1 or text.startswith(NO_PAGE)
    sys.exit(2 if is_wrong else 0)
