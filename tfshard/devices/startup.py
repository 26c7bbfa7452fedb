"""Start DTensor: set TensorFlow's devices and the environment switches of the process.

expansions.py, gathers.py, merges.py and reductions.py change further switches before DTensor compiles.
"""

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import __version__, _private, tables
from tfshard.clusters import ClusterRun, find_run, tf_config
from tfshard.devices import allocators, clients, cluster_members, compilations, expansions, gpus, tasks
from tfshard.errors import InitializationError

# In TensorFlow 2.21, DTensor's all-to-all from one dim to another gives wrong values, unless one dim is the first.
_ALL_TO_ALL = "DTENSOR_USE_ALL_TO_ALL_RELAYOUT"
# docs/design.md, "Switches", explains each value.
_SWITCHES = {
    _ALL_TO_ALL: "0",
    # Merge independent all-reduces into one. This is safe because a step is pure: see steps.py.
    "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "1",
}
# Without NCCL, a reduce-scatter on GPUs is an all-reduce and a slice.
_NCCL = "DTENSOR_GPU_USE_NCCL_COMMUNICATION"
_OFF = ("0", "false")
_FORBIDDEN = {
    "DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION": "it loses variable updates on a one-device mesh",
    "DTENSOR_DO_NOT_FUSE_REDUCE_SCATTER": "gradients would be all-reduced instead of reduce-scattered",
}
# The TensorFlow graph optimizer that removes edges: see `_keep_order`.
_EDGES = "dependency_optimization"
# TensorFlow's environment variable for the memory of a GPU that it leaves to others, in MiB.
_RESERVE = "TF_DEVICE_MIN_SYS_MEMORY_IN_MB"
# The most that TensorFlow leaves by itself, on an H100 (MinSystemMemory in gpu_device.cc), and that tfshard leaves.
_TENSORFLOWS_RESERVE, _MOST_RESERVE = 1800, 4096
# TensorFlow's environment variable for the number of threads of an operation.
_THREADS = "TF_NUM_INTRAOP_THREADS"
# TensorFlow's job name for the clients of a launched run.
JOB = "worker"

DEVICE_TYPES = ("CPU", "GPU", "TPU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """The devices that DTensor was started with.

    Attributes:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        num_devices: The devices of this type that a mesh can have. In a launched run, the devices of all clients.
        client_id: The number of this process among the clients of a launched run, from 0.
        num_clients: The number of clients. 1 in a process that was not launched.
        devices: The names that `initialize(devices=)` chose, in the order of the mesh, or None. TensorFlow numbers the
            chosen devices from 0.
        memory_per_device: The bytes of a device that `initialize(memory_per_device=)` named, or None.
    """

    device_type: str
    num_devices: int
    client_id: int = dataclasses.field(default=0, repr=False)
    num_clients: int = dataclasses.field(default=1, repr=False)
    devices: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    memory_per_device: int | None = dataclasses.field(default=None, repr=False)

    @property
    def local_devices(self) -> int:
        """The number of devices in this process."""
        return self.num_devices // self.num_clients


_runtime: Runtime | None = None
# The call of keras.distribution that started the devices, for messages.
_started_for: str | None = None
# True if a client of a launched run was started because its script made a tensor.
_started_by_tensor = False


def initialize(
    num_devices: int | None = None,
    device_type: str | None = None,
    *,
    devices: Sequence[str] | None = None,
    memory_per_device: int | str | None = None,
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
) -> Runtime:
    """Start DTensor on accelerators if the machine has any, else on logical CPU devices.

    Call this before TensorFlow creates its first tensor, because TensorFlow fixes its devices then. A second call with
    matching arguments does nothing.

    In a run started by `tfshard launch`, this waits for all clients and connects their devices. The arguments then
    describe the devices of all clients together, so a script runs both alone and launched. If the script does not call
    `initialize`, the first tensor calls it without arguments. Importing tfshard sets Keras's random seed to the same
    number on all clients, unless a seed is already set.

    In a process that a cluster started (TF_CONFIG, SLURM, torchrun, Open MPI, SageMaker, Kubernetes: `tfshard docs
    clusters`), this joins the other processes of the run in the same way. Call it at the start of the script there.

    Args:
        num_devices: The number of devices to use. Accelerators: all by default, including every partition of a GPU that
            was split with `tf.config.set_logical_device_configuration`. CPU: the number of processor cores by default,
            each as a logical device on the same processor. An operation then uses as many threads as a device has
            cores, at least one, unless the environment variable `TF_NUM_INTRAOP_THREADS` or `tf.config.threading` sets
            the number.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`. Default: TPU or GPU if TensorFlow sees one, else CPU.
        devices: The names of the GPUs to use, such as `["GPU:3", "GPU:0"]`, or of logical CPU devices, instead of
            `num_devices` and `device_type`. A mesh has the devices in this order. TensorFlow sees only these GPUs, and
            numbers them from 0: the first name is its `GPU:0`. The given numbers are CUDA's. If
            `CUDA_VISIBLE_DEVICES` is set already, they count the GPUs in its list, from 0. Not in a run started by
            `tfshard launch`, which gives each client its GPUs. Not run on GPUs.
        memory_per_device: The memory of a device for which `strategy="auto"` chooses: bytes, or a text such as
            `"16GiB"`. By default the memory that the driver reports, and on CPU an equal part of the host's available
            memory. It limits the choice, not TensorFlow. A later call may change it.
        cluster_resolver: Tells the members of the run and this member, in place of environment variables. Each task of
            its types `chief` and `worker` is a process that calls this function. Not used under `tfshard launch`.

    Returns:
        The `Runtime` in use.

    Raises:
        ClusterError: The variables of the cluster are incomplete or contradict each other.
        LaunchError: The coordinator of the cluster's run cannot be reached, or refuses this process.
        InitializationError: The device type is unknown, the machine has fewer devices than requested, a second call
            differs from the first, or TensorFlow has already fixed its devices. A name in `devices` is wrong, or
            stands twice. In a launched run: the clients differ in their devices or versions, or `devices` is given.

    Example:

    >>> import tfshard
    >>> tfshard.initialize(num_devices=4, device_type="CPU")
    Runtime(device_type='CPU', num_devices=4)
    """
    global _runtime
    if num_devices is not None and (not isinstance(num_devices, int) or num_devices < 1):
        raise InitializationError(f"num_devices must be a positive integer. Received: num_devices={num_devices!r}")
    if device_type is not None:
        if str(device_type).upper() not in DEVICE_TYPES:
            raise InitializationError(
                f"Unknown device type. Device types: {DEVICE_TYPES}. Received: device_type={device_type!r}"
            )
        device_type = device_type.upper()
    memory = _memory_of(memory_per_device)
    names = None if devices is None else _checked_names(devices, num_devices, device_type)
    if names is not None:
        num_devices, device_type = len(names), names[0].partition(":")[0]
    _private.before_first_use(None)
    if _runtime is not None:
        is_alike = num_devices in (None, _runtime.num_devices) and device_type in (None, _runtime.device_type)
        if is_alike and names in (None, _runtime.devices):
            clients.here().note_start(by_script=True)
            if memory is not None:
                _runtime = dataclasses.replace(_runtime, memory_per_device=memory)
            return _runtime
        if _started_by_tensor:
            raise InitializationError(
                f"The client was started when TensorFlow was first used, with {_runtime}, and cannot be started again. "
                "Call tfshard.initialize() before the first tensor, variable or model, or launch the run with "
                "--devices_per_process, which fixes the number of devices. "
                f"Received: num_devices={num_devices}, device_type={device_type!r}"
            )
        if _started_for is not None:
            raise InitializationError(
                f"{_started_for} has started the devices, with {_runtime}, and a process can start them only once. "
                "Call tfshard.initialize() before it, right after the import. Received: "
                f"num_devices={num_devices}, device_type={device_type!r}"
            )
        raise InitializationError(
            f"DTensor is already started with {_runtime}, and a process can start it only once. Start a new process, "
            f"or call initialize() with the same arguments. Received: num_devices={num_devices}, "
            f"device_type={device_type!r}{'' if names is None else f', devices={[*names]}'}"
        )
    _check_switches()
    settings = clients.Settings.from_environment()
    run = None if settings is not None else _find_run(cluster_resolver)
    if names is not None:
        if run is not None:
            raise InitializationError(
                f"{run.system} started this process as one of a run of {run.num_members}, so initialize(devices=) "
                f"cannot choose its devices. Set {gpus.VISIBLE} in the environment of each process. To run alone, set "
                f"TFSHARD_CLUSTER=none. Received: devices={[*names]}"
            )
        if settings is not None:
            raise InitializationError(
                "tfshard launch gives each client its devices, so initialize(devices=) cannot choose others. Leave it "
                f"out, and choose the GPUs of the run where you launch it: {gpus.VISIBLE}=0,3 tfshard launch "
                f"--devices_per_process=1 ... Received: devices={[*names]}"
            )
        if device_type == "GPU":
            _see_only(names)
    compilations.share()
    if run is not None:
        cluster_members.choose_gpus(run)
    device_type = device_type or dtensor.preferred_device_type()
    if settings is not None:
        local = _validate_local_devices(settings.num_clients, settings.devices_per_process, num_devices, device_type)
        started = _start_client(clients.join(settings), local, device_type)
        _runtime = dataclasses.replace(started, memory_per_device=memory)
        return _runtime
    if run is not None:
        local = _validate_local_devices(
            run.num_members, cluster_members.devices_per_process(), num_devices, device_type
        )
        client = cluster_members.join(run)
        cluster_members.warn_of_hash_seed(run)
        _runtime = dataclasses.replace(_start_client(client, local, device_type), memory_per_device=memory)
        return _runtime
    if os.environ.get("DTENSOR_JOBS"):
        raise InitializationError(
            "DTENSOR_JOBS is set, but the process was not started by 'tfshard launch'. Without a launcher, nothing "
            "stops the other clients when one dies. Start the run with 'tfshard launch', or unset it; see: tfshard "
            f"docs launching. Received: DTENSOR_JOBS={os.environ['DTENSOR_JOBS']}"
        )
    # A named GPU that was split counts with all its parts.
    num_devices = _validate_num_devices(None if device_type == "GPU" and names else num_devices, device_type)
    if _private.context_is_initialized() or _private.dtensor_is_initialized():
        _adopt_running_context(num_devices, device_type)
    else:
        _start(num_devices, device_type)
    _runtime = Runtime(device_type=device_type, num_devices=num_devices, devices=names, memory_per_device=memory)
    return _runtime


def shutdown() -> None:
    """Leave the run of a cluster, in a process that goes on afterwards, such as an actor of Ray.

    Waits until all clients have come to their ends. In a `finally` block, after an error, it reports the error instead,
    and the other clients end. Later steps of this process are a `ClientError`. Does nothing in a process that runs
    alone or that `tfshard launch` started, where the end of the script does the same.

    Example:

    >>> import tfshard
    >>> tfshard.shutdown()
    """
    clients.here().leave()


def start_for(caller: str, num_devices: int | None = None, device_type: str | None = None) -> Runtime:
    """Start the devices for a call of `keras.distribution`, unless they are started.

    Args:
        caller: The call, for the message of a later `initialize` with other arguments.
        num_devices: As for `initialize`.
        device_type: As for `initialize`.
    """
    global _started_for
    if _runtime is not None:
        return _runtime
    started = initialize(num_devices, device_type)
    _started_for = caller
    return started


def _memory_of(given: int | str | None) -> int | None:
    """Return the bytes of `memory_per_device`."""
    try:
        return None if given is None else tables.parse_size("memory_per_device", given)
    except ValueError as error:
        raise InitializationError(str(error)) from None


def _checked_names(devices: Sequence[str], num_devices: int | None, device_type: str | None) -> tuple[str, ...]:
    """Return the names of devices, checked without a look at the machine: all of one type, each once."""
    received = f"Received: devices={devices!r}, num_devices={num_devices}, device_type={device_type!r}"
    if num_devices is not None or device_type is not None:
        raise InitializationError(f"devices names the devices, so leave num_devices and device_type out. {received}")
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InitializationError(
            f"devices must be a list of names, such as ['GPU:0', 'GPU:3'] or ['CPU:0', 'CPU:1']. {received}"
        )
    found = [
        re.fullmatch(r"(CPU|GPU):(\d+)", each.strip().upper()) if isinstance(each, str) else None for each in devices
    ]
    wrong = [each for each, match in zip(devices, found, strict=True) if match is None]
    if wrong:
        raise InitializationError(
            f"A device is named by its type and number. {_there_are()} On TPUs use num_devices: a process cannot hide "
            f"TPUs from itself. Wrong: {wrong}. {received}"
        )
    names = tuple(f"{match[1]}:{int(match[2])}" for match in found if match is not None)
    if len({name.partition(":")[0] for name in names}) > 1:
        raise InitializationError(f"All devices of a mesh have one type. {_there_are()} {received}")
    if len(set(names)) < len(names):
        raise InitializationError(f"A device stands twice in devices. Name each once. {_there_are()} {received}")
    return names


def _there_are() -> str:
    """Say which devices a script can name."""
    found = _visible_gpus()
    named = f"GPUs here: {', '.join(f'GPU:{number}' for number in range(found))}" if found else "No GPU is here"
    return f"{named}; logical CPU devices: CPU:0, CPU:1 and so on, as many as you want."


def _visible_gpus() -> int:
    """Return the number of GPUs that this process may use, without starting CUDA."""
    if _private.devices_are_listed():
        return len(tf.config.list_physical_devices("GPU"))
    value = os.environ.get(gpus.VISIBLE)
    return (gpus.count() or 0) if value is None else len(gpus.visible(value))


def _see_only(names: Sequence[str]) -> None:
    """Make TensorFlow see only the named GPUs, in this order.

    CUDA reads CUDA_VISIBLE_DEVICES when it starts, and TensorFlow then numbers the GPUs in the order of the variable.
    Once TensorFlow has listed its devices, they can only be hidden.
    """
    numbers = [int(name.partition(":")[2]) for name in names]
    available = _visible_gpus()
    if max(numbers) >= available:
        raise InitializationError(f"A named GPU is not here. {_there_are()} Received: devices={[*names]}")
    if not _private.devices_are_listed():
        value = os.environ.get(gpus.VISIBLE)
        cards = [str(number) for number in range(available)] if value is None else gpus.visible(value)
        os.environ[gpus.VISIBLE] = ",".join(cards[number] for number in numbers)
        return
    if _private.context_is_initialized():
        raise InitializationError(
            "TensorFlow has already started its GPUs, so a part of them can no longer be chosen. Call "
            "tfshard.initialize(devices=...) at the start of the program, before the first tensor, variable or model. "
            f"Received: devices={[*names]}"
        )
    if numbers != sorted(numbers):
        raise InitializationError(
            "TensorFlow has already listed its GPUs, and keeps their order. Call tfshard.initialize(devices=...) "
            "before tf.config.list_physical_devices, or name the GPUs in ascending order. "
            f"Received: devices={[*names]}"
        )
    physical = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices([physical[number] for number in numbers], "GPU")


def current() -> Runtime | None:
    """Return the `Runtime` that `initialize` started, or None before its first call."""
    return _runtime


def switches(device_type: str) -> dict[str, str]:
    """Return a device type's environment switches and their current values, or `"not set"` before DTensor starts."""
    return {name: os.environ.get(name, "not set") for name in _switches_of(device_type)}


def _switches_of(device_type: str) -> dict[str, str]:
    """Return the switches of a device type, with their default values."""
    if device_type != "GPU":
        return _SWITCHES
    gpus = tf.config.list_physical_devices("GPU")
    # DTensor starts NCCL with one rank for each physical GPU.
    return {**_SWITCHES, _NCCL: "0" if any(_parts(gpu) > 1 for gpu in gpus) else "1"}


def scatters_what_it_reduces(device_type: str) -> bool:
    """Return whether devices have a reduce-scatter. Otherwise, DTensor all-reduces and each device keeps its shard."""
    return device_type == "TPU" or uses_nccl(device_type)


def uses_nccl(device_type: str) -> bool:
    """Return whether devices communicate by NCCL."""
    return device_type == "GPU" and os.environ.get(_NCCL, "0") != "0"


def _parts(physical: tf.config.PhysicalDevice) -> int:
    """Return the number of logical devices that TensorFlow makes of a physical device."""
    return len(tf.config.get_logical_device_configuration(physical) or (physical,))


def _check_switches() -> None:
    for name, reason in _FORBIDDEN.items():
        # DTensor treats any value of these two variables as set.
        if name in os.environ:
            raise InitializationError(
                f"The environment variable {name} must not be set: {reason}. Received: {os.environ[name]!r}"
            )
    if os.environ.get(_ALL_TO_ALL, "0") not in _OFF:
        raise InitializationError(
            f"The environment variable {_ALL_TO_ALL} must be 0 or not set: DTensor would move an axis from one dim to "
            f"another by an all-to-all, which gives wrong values. Received: {os.environ[_ALL_TO_ALL]!r}"
        )


def _set_switches(device_type: str) -> None:
    for name, value in {**_switches_of(device_type), **expansions.switches()}.items():
        # A user may set a switch to debug a problem.
        os.environ.setdefault(name, value)
    if device_type == "GPU":
        _private.shapes_in_int32()


def _keep_order(*, of_bodies: bool = False) -> None:
    """Preserve the order in which DTensor's compiler has put the collectives of a step.

    TensorFlow removes a graph edge that a longer path makes redundant, and may later remove a node of that path, such
    as the IdentityN of a custom gradient. NCCL matches the collectives of several processes by their order.

    Args:
        of_bodies: If True, also preserve the order of collectives inside and around loops and branches.
    """
    if _EDGES not in tf.config.optimizer.get_experimental_options():
        tf.config.optimizer.set_experimental_options({_EDGES: False})
    if of_bodies:
        _private.run_bodies_apart()


def _validate_num_devices(num_devices: int | None, device_type: str) -> int:
    if device_type == "CPU":
        return num_devices or os.cpu_count() or 1
    available = sum(map(_parts, _seen(device_type)))
    if available == 0 or (num_devices or 1) > available:
        raise InitializationError(
            f"Not enough {device_type} devices: this process sees {available}. {_how_to_split(available, device_type)}"
            f"Received: num_devices={num_devices}, device_type={device_type!r}"
        )
    return num_devices or available


def _seen(device_type: str) -> list[tf.config.PhysicalDevice]:
    """Return the physical devices that TensorFlow uses, without those that the script has hidden."""
    visible = tf.config.get_visible_devices(device_type)
    return [each for each in tf.config.list_physical_devices(device_type) if each in visible]


def _how_to_split(available: int, device_type: str) -> str:
    if device_type != "GPU" or not available:
        return ""
    return (
        "To try more on the same GPU, split it before: tf.config.set_logical_device_configuration("
        "tf.config.list_physical_devices('GPU')[0], [tf.config.LogicalDeviceConfiguration(memory_limit=4096)] * 4). "
    )


def place_in_run() -> tuple[int, int] | None:
    """Return the number of this client and the number of clients, also before they have met. None outside of a run."""
    settings = clients.Settings.from_environment()
    if settings is not None:
        return settings.client_id, settings.num_clients
    if clients.here().is_launched:
        return clients.here().rank, clients.here().count
    run = _find_run(None)
    return None if run is None else (run.index, run.num_members)


def _find_run(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> ClusterRun | None:
    """Return the run that a cluster started this process for, or None."""
    if clients.here().is_launched:
        raise InitializationError(
            "This process has joined a run, and DTensor did not start then: see the first error. A process can join "
            f"once. Start a new process. Received: client {clients.here().rank} of {clients.here().count}"
        )
    if clients.PID_VARIABLE in os.environ:
        return None  # A process that a client started is no member of the client's run.
    if resolver is None:
        return find_run()
    # SlurmClusterResolver knows its task only after this call.
    cluster = resolver.cluster_spec().as_dict()
    if not cluster:
        return None
    name = "cluster_resolver"
    run = tf_config.of_cluster(cluster, resolver.task_type, resolver.task_id, name, (name,))
    return run if run.num_members > 1 else None


def _validate_local_devices(num_clients: int, local: int | None, num_devices: int | None, device_type: str) -> int:
    """Return the number of devices of each client, before any of them waits for the others."""
    total = None if local is None else local * num_clients
    if num_devices is not None and (num_devices % num_clients or total not in (None, num_devices)):
        raise InitializationError(
            f"In a launched run num_devices is the number of devices of all {num_clients} clients"
            f"{'' if local is None else f' with {local} devices each'}. Leave it out to take the launcher's settings. "
            f"Received: num_devices={num_devices}"
        )
    local = local or (num_devices // num_clients if num_devices else None)
    local = _validate_num_devices(local, device_type)
    if _private.context_is_initialized():
        raise InitializationError(
            "TensorFlow has already fixed its devices, so this process can no longer become a client. Import "
            "tfshard before the first tensor, variable or model, which then starts the client. In a process that a "
            "cluster started, call tfshard.initialize() before them. To run alone there, set TFSHARD_CLUSTER=none."
        )
    return local


def _start_client(client: clients.Launched, local: int, device_type: str) -> Runtime:
    """Start DTensor in one client of a run, once all clients have registered."""
    settings = client.settings
    versions = {name: _private.package_version(name) for name in ("tensorflow", "keras", "numpy")}
    jobs = client.register({"device type": device_type, "devices": local, "tfshard": __version__, **versions})
    if not _private.random_seed_is_set():
        keras.utils.set_random_seed(client.seed)
    os.environ.update(
        DTENSOR_CLIENT_ID=str(tasks.of_client(settings.client_id, settings.num_clients)),
        DTENSOR_NUM_CLIENTS=str(settings.num_clients),
        DTENSOR_JOB_NAME=JOB,
        DTENSOR_JOBS=",".join(tasks.by_task(jobs, settings.num_clients)),
    )
    with client.operation("the start of DTensor"):
        _start(local, device_type, neighbours=settings.num_local)
    if settings.num_clients > 1 and uses_nccl(device_type):
        # A failed operation cancels collectives, and a cancelled NCCL collective aborts every communicator of the
        # process (read in TensorFlow's source, not observed).
        client.ends_communication = lambda error: isinstance(error, tf.errors.OpError)
    # All servers are up from here on.
    client.barrier("the start of DTensor")
    client.note_start(by_script=not _started_by_tensor)
    return Runtime(
        device_type=device_type,
        num_devices=local * settings.num_clients,
        client_id=settings.client_id,
        num_clients=settings.num_clients,
    )


def _prepare_client() -> None:
    """Prepare a process that a launcher started, when tfshard is imported.

    Layers that the script makes before `initialize` get the same seeds on all clients. The first tensor starts the
    client, because it fixes TensorFlow's devices.
    """
    if not clients.is_to_join():
        return
    settings = clients.Settings.from_environment()
    assert settings is not None
    if not _private.random_seed_is_set():
        keras.utils.set_random_seed(settings.seed)
    _private.before_first_use(_start_by_tensor)


def _start_by_tensor() -> None:
    global _started_by_tensor
    # Only the main thread has an order that all clients share.
    if clients.is_to_join() and threading.current_thread() is threading.main_thread():
        _started_by_tensor = True
        initialize()


def _start(num_devices: int, device_type: str, *, neighbours: int = 1) -> None:
    """Start DTensor in this process.

    Args:
        num_devices: The number of devices of this process.
        device_type: The type of the devices.
        neighbours: The number of the run's processes on this machine, each with as many devices.
    """
    _set_switches(device_type)
    _private.quiet_native_log()
    # Rings match collectives by their keys. Within one process, NCCL does so too.
    _keep_order(of_bodies=device_type == "GPU" and clients.here().count > 1)
    if device_type == "CPU":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
        _share_cores(num_devices * neighbours)
        allocators.return_freed_blocks()
    if uses_nccl(device_type) and num_devices * clients.here().count > 1:
        _leave_room_for_nccl()
    # TensorFlow's coordination service did not end a run after a peer had died, and made the run ignore SIGTERM. The
    # launcher watches the clients instead.
    with _private.without_log():
        dtensor.initialize_accelerator_system(device_type, enable_coordination_service=False)
    _private.make_dtensor_synchronous()
    if device_type == "GPU" and clients.here().local_index == 0:
        _print_gpus()


def _leave_room_for_nccl() -> None:
    """Leave memory of each GPU to NCCL, unless the user has chosen how much.

    TensorFlow takes all memory but 1.5 to 1.8 GiB, where the CUDA context and its libraries need room, too. Each group
    of devices has a communicator, and a mesh with two axes has three groups. On four A100s with NVLink, a communicator
    took 0.5 to 0.7 GiB (github.com/NVIDIA/nccl/issues/964). With fewer links, NCCL has fewer channels and takes less.
    """
    smallest = min(gpus.memories(), default=0) >> 20
    reserve = min(_MOST_RESERVE, smallest // 20)
    if reserve > _TENSORFLOWS_RESERVE:
        os.environ.setdefault(_RESERVE, str(reserve))


def reserved_bytes() -> int:
    """Return the most bytes of a GPU that TensorFlow leaves to others, by its default or by an environment variable."""
    chosen = os.environ.get(_RESERVE, "")
    return (int(chosen) if chosen.isdigit() else _TENSORFLOWS_RESERVE) << 20


def _print_gpus() -> None:
    """Print the GPUs of this machine once, and the choices about their memory."""
    devices = tf.config.list_physical_devices("GPU")
    # None without a choice of the script.
    growth = {str(bool(tf.config.experimental.get_memory_growth(gpu))) for gpu in devices}
    found = [*gpus.facts(), ("memory growth", "/".join(sorted(growth)))]
    found.append(("MiB left to others", os.environ.get(_RESERVE, "chosen by TensorFlow")))
    print(f"tfshard: {'; '.join(f'{name}: {text}' for name, text in found)}", file=sys.stderr, flush=True)


def _share_cores(devices: int) -> None:
    """Give an operation as many threads as a logical device has cores, unless the user has set the number.

    TensorFlow's default is one thread for each core. The operations of all devices then compete for the cores and wait
    for each other (docs/measurements.md, "Threads").
    """
    chosen = tf.config.threading.get_intra_op_parallelism_threads() or os.environ.get(_THREADS)
    if devices > 1 and not chosen:
        tf.config.threading.set_intra_op_parallelism_threads(max(1, _cores() // devices))


def _cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _adopt_running_context(num_devices: int, device_type: str) -> None:
    """Accept TensorFlow devices that the user has already fixed, if they match the request."""
    logical = len(tf.config.list_logical_devices(device_type))
    if not _private.dtensor_is_initialized() or logical != num_devices:
        raise InitializationError(
            f"TensorFlow has already fixed its devices ({logical} logical {device_type}), so {num_devices} can no "
            "longer be set up. Call tfshard.initialize() at the start of the program, before the first tensor, "
            f"variable or model. Received: num_devices={num_devices}, device_type={device_type!r}"
        )
    if _private.dtensor_has_device():
        raise InitializationError(
            "DTensor has run operations in this process already, on a device that does not report failures. Call "
            "tfshard.initialize() before the first DTensor operation, right after (or instead of) "
            f"dtensor.initialize_accelerator_system(). Received: num_devices={num_devices}, "
            f"device_type={device_type!r}"
        )
    _set_switches(device_type)
    _keep_order()
    _private.make_dtensor_synchronous()


_prepare_client()
