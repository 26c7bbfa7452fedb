"""Implement the commands of `command_line`: `tfshard plan`, `advise`, `lint` and others, or `python -m tfshard`."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import app, flags

import tfshard
from tfshard import _private, command_line
from tfshard.clusters import cluster_report, run_secret
from tfshard.clusters.finding import outside_clusters
from tfshard.devices import gpus, startup
from tfshard.doctor import all_devices, check_runs, environment, parity_check
from tfshard.errors import ShardingError
from tfshard.graph import auto_layout, model_graph, model_specs
from tfshard.launch import hosts, launcher, options
from tfshard.planning import linter


class ModelUsageError(ShardingError):
    """Raised for a wrong argument that only the user's module or the model reveals."""


# --- tfshard plan ------------------------------------------------------------------------------------


def _plan(values: flags.FlagValues, arguments: list[str]) -> int:
    mesh = command_line.parse_mesh(values.mesh)
    plan = tfshard.plan(
        _built(arguments[0]),
        mesh,
        layout_map=_layout_map(values.layout_map),
        zero_stage=values.zero_stage,
        optimizer=values.optimizer,
        links=values.links,
    )
    print(plan.to_json(indent=2) if values.json else plan.text(detail=values.detail))
    return int(bool(plan.refused))


def _built(target: str) -> keras.Model:
    """Return the model that `MODULE:FUNCTION` builds, without values."""
    return model_specs.abstract_model(_load_function(target))


def _load_function(target: str) -> Callable[[], Any]:
    """Load the function `MODULE:FUNCTION`."""
    function: Callable[[], Any] = _load(target)
    if not callable(function):
        raise ModelUsageError(f"MODULE:FUNCTION must name a function. Received: {target}")
    return function


def _load(target: str) -> Any:
    """Load the object `MODULE:NAME`. MODULE is importable, or the path of a .py file."""
    module_name, name = command_line.check_target(target)
    module = _module(module_name)
    if not hasattr(module, name):
        raise ModelUsageError(f"Module '{module_name}' has no '{name}'. Received: {target}")
    return getattr(module, name)


@functools.cache
def _module(name: str) -> types.ModuleType:
    if not name.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            raise ModelUsageError(f"Cannot import '{name}': {e}. Received: {name}") from None
    path = pathlib.Path(name)
    # A unique name, because the file may have the name of a library.
    spec = importlib.util.spec_from_file_location(f"_tfshard_cli_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs: its classes may look for their module, and it may import its neighbours.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _layout_map(target: str | None) -> Any:
    """Return the layout map that a flag names: None, `auto`, or an object of a module. Call a function for its map."""
    if not target or target == auto_layout.AUTO:
        return target
    found = _load(target)
    if not inspect.isroutine(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError:
        raise ModelUsageError(
            "layout_map must name a LayoutMap, not a function that takes arguments. Received: "
            f"layout_map={target}{inspect.signature(found)}"
        ) from None
    return found()


# --- tfshard advise ----------------------------------------------------------------------------------


def _advise(values: flags.FlagValues, arguments: list[str]) -> int:
    model = _built(arguments[0])
    advice = tfshard.advise(
        model,
        values.devices,
        command_line.memory(values.memory_per_device),
        values.batch,
        optimizer=values.optimizer,
        layout_map=_layout_map(values.layout_map),
        inputs=model_graph.batch_of(model, values.batch, values.length),
        links=values.links,
        machine=values.machine,
    )
    print(advice)
    return int(advice.recommended is None)


# --- tfshard lint ------------------------------------------------------------------------------------


def _lint(values: flags.FlagValues, arguments: list[str]) -> int:
    mesh = command_line.parse_mesh(values.mesh)
    findings = linter.lint(_built(arguments[0]), mesh, _layout_map(values.layout_map))
    for finding in findings:
        print(finding)
    if not findings:
        print("No findings.")
    return int(any(finding.is_error for finding in findings))


# --- tfshard verify ----------------------------------------------------------------------------------


@outside_clusters()
def _verify(values: flags.FlagValues, arguments: list[str]) -> int:
    axes = command_line.parse_mesh(values.mesh)
    build = _load_function(arguments[0])
    batch = _load_function(values.batch or f"{arguments[0].rpartition(':')[0]}:batch")
    devices = math.prod(axes.values())
    gpus = len(tf.config.list_physical_devices("GPU"))
    tfshard.initialize(num_devices=devices, device_type="GPU" if gpus >= devices else "CPU")
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**axes), layout_map=_layout_map(values.layout_map), zero_stage=values.zero_stage
    )
    model = tfshard.as_distributed(build())
    named = {name: values[name].value for name in ("optimizer", "loss") if values[name].value is not None}
    if not model.compiled and not named:
        raise ModelUsageError(
            f"{arguments[0]} returns a model that is not compiled. Compile it there, or give --optimizer and --loss."
        )
    compiled: dict[str, Any] = _private.compile_arguments(model) if model.compiled else {}
    model.compile(**(compiled | named), strategy=strategy)
    result = tfshard.verify(model, batch(), tolerance=values.tolerance)
    print(result)
    return 0 if result.ok else 1


# --- tfshard launch ----------------------------------------------------------------------------------


def _launch(values: flags.FlagValues, arguments: list[str]) -> int:
    script, *rest = arguments
    command = (sys.executable, *(["-m"] if values.module else []), script, *rest)
    return launcher.launch(_launch_options(values, command))


def _launch_options(values: flags.FlagValues, command: tuple[str, ...]) -> options.Launch:
    """Return the options of a launch: those flags that have a value, and the hosts and their secret."""
    found = hosts.find_hosts(values.hosts, values.host_index)
    values["port"].value = values.port or found.port
    names = {field.name for field in dataclasses.fields(options.Launch)} & set(values)
    given: dict[str, Any] = {name: values[name].value for name in names - {"hosts", "host_index"}}
    return options.Launch(
        command=command,
        hosts=found.names,
        host_index=found.index,
        identity=found.identity,
        secret=run_secret.read_secret(values.secret_file),
        **given,
    )


# --- tfshard doctor ----------------------------------------------------------------------------------


def _doctor(values: flags.FlagValues, arguments: list[str]) -> int:
    del arguments
    if values[command_line.CLUSTER].value:
        lines, code = cluster_report.report()
        print("\n".join(lines))
        return code
    if values[command_line.ALL_DEVICES].value:
        options_of_doctor = _doctor_options(values)
        # The doctor launches the clients itself. Checks in one process run alone.
        with outside_clusters():
            return all_devices.check_all_devices(options_of_doctor)
    return _check_this_process()


@outside_clusters()
def _check_this_process() -> int:
    """Print versions, devices, settings and patches, and compare a training with one device. Returns the exit code."""
    for package, version in environment.versions().items():
        print(f"{package:12} {version}")
    # All accelerators, or two logical CPU devices.
    is_cpu = startup.current() is None and not tf.config.list_physical_devices("GPU")
    started = tfshard.initialize(num_devices=2 if is_cpu else None)
    print(f"devices      {started.num_devices} x {started.device_type}")
    threads = tf.config.threading.get_intra_op_parallelism_threads() or "chosen by TensorFlow"
    print(f"threads      {threads}, for one operation")
    for name, value in gpus.facts():
        print(f"{name:12} {value}")
    for name, value in startup.switches(started.device_type).items():
        print(f"switch       {name}={value}")
    difference = parity_check.parity()
    # After a training: some are made by the first mesh, or the first step.
    for patch in _private.patches.made():
        print(f"patch        {patch.target}: {patch.reason}")
    same = difference <= parity_check.TOLERANCE
    on = f"on {started.num_devices} devices"
    print(
        f"parity       {'ok' if same else 'FAILED'}: weights {on} differ from those on one device by at most "
        f"{difference:.1e}"
    )
    return 0 if same else 1


def _doctor_options(values: flags.FlagValues) -> check_runs.DoctorOptions:
    launch = None
    if values.num_processes is not None or values.hosts is not None:
        values["num_processes"].value = values.num_processes or 1
        launch = _launch_options(values, command=())
    folder = pathlib.Path(values.report_dir or time.strftime("tfshard-doctor-%Y%m%d-%H%M%S"))
    # Hosts may share the folder.
    folder = folder / f"host-{launch.host_index}" if launch is not None and launch.host_index else folder
    return check_runs.DoctorOptions(
        folder=folder,
        names=tuple(values.checks or ()),
        seconds=values.check_timeout,
        num_devices=values.num_devices,
        launch=launch,
        expected=None if values.links is None else os.path.abspath(values.links),
    )


# --- tfshard profile-network -------------------------------------------------------------------------


def _profile_network(values: flags.FlagValues, arguments: list[str]) -> int:
    del arguments
    sizes = command_line.numbers("sizes", values.sizes)
    started = tfshard.initialize(num_devices=values.num_devices)
    profile = tfshard.profile_network(sizes, values.repeats, values.devices_per_host)
    if started.client_id == 0:
        print(json.dumps(profile.to_dict(), indent=2) if values.json else profile)
        if values.save:
            profile.links.save(values.save)
        if values.plot:
            profile.plot(values.plot)
    return 0


# --- tfshard calibrate -------------------------------------------------------------------------------


def _calibrate(values: flags.FlagValues, arguments: list[str]) -> int:
    del arguments
    started = tfshard.initialize(num_devices=values.num_devices)
    machine = tfshard.calibrate(lambda line: print(line, file=sys.stderr, flush=True))
    if started.client_id == 0:
        print(machine)
        if values.save:
            machine.save(values.save)
    return 0


# --- tfshard simulate --------------------------------------------------------------------------------


def _simulate(values: flags.FlagValues, arguments: list[str]) -> int:
    simulation = tfshard.simulate(
        _built(arguments[0]),
        values.cluster,
        command_line.numbers("devices", values.devices),
        values.batch,
        length=values.length,
        layout_map=_layout_map(values.layout_map),
        zero_stages=command_line.numbers("zero_stages", values.zero_stages),
        optimizer=values.optimizer,
    )
    print(simulation.to_json(indent=2) if values.json else simulation)
    if values.plot:
        simulation.plot(values.plot)
    return int(all(each is None for each in simulation.best.values()))


# --- the command line --------------------------------------------------------------------------------

# The function of each command. It takes the parsed flags and the positional arguments, and returns the exit code.
_RUN: Mapping[str, Callable[[flags.FlagValues, list[str]], int]] = {
    "plan": _plan,
    "advise": _advise,
    "lint": _lint,
    "verify": _verify,
    "launch": _launch,
    "doctor": _doctor,
    "profile-network": _profile_network,
    "calibrate": _calibrate,
    "simulate": _simulate,
}


def _run(argv: list[str]) -> int:
    """Run a command line without the program's name. Returns the exit code."""
    text = command_line.answer(argv)
    if text is not None:
        print(text)
        return 0 if argv and not text.startswith(command_line.NO_PAGE) else 2
    parsed = command_line.parse(argv)
    return _RUN[parsed.name](parsed.values, parsed.arguments)


def _main(argv: list[str]) -> None:
    try:
        code = _run(argv[1:])
    except (ShardingError, command_line.UsageError, flags.Error) as e:
        print(command_line.error_line(e), file=sys.stderr)
        code = 2
    sys.exit(code)


def _leave_flags(argv: list[str]) -> list[str]:
    """Give absl's flags their defaults. Each command parses its flags itself."""
    flags.FLAGS(argv[:1])
    return argv


def main() -> None:
    """Run the command line and exit: 0 for success, 1 for a failed check, 2 for a wrong command line."""
    app.run(_main, flags_parser=_leave_flags)
