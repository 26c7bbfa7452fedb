"""Send tensors between devices of different clients, and values between clients.

Between clients, a message is a broadcast in a group of two (`CollectiveBcastSendV2`, `CollectiveBcastRecvV2`), so
messages use the transport of all collectives. Messages from one device to another arrive in the order in which they
were sent: both clients must reach the messages of such a pair in the same order. Each pair has a sender thread, so
sending does not block the caller.

Messages of GPUs go through the memory of both hosts. Over NCCL, two devices that each send and receive could
deadlock: NCCL has one stream for all communicators of a device (NcclManager::GetCommunicator in nccl_manager.cc). A
group of CPU devices never uses NCCL: TensorFlow 2.21 asks for DEVICE_GPU (AssignCollectiveType in
collective_param_resolver_local.cc; also read in its machine code). TensorFlow matches messages of hosts by their keys,
in a thread for each message
(UnboundedWorkQueue), so a message only waits for the same message on the other client.

DTensor has meshes without local devices ("remote"). On these meshes, tensors have a layout, a shape and no value, and
an operation does nothing. Therefore all clients trace and compile the same functions in the same order, which
determines DTensor's collective numbers.
"""

import collections
from collections.abc import Sequence
from concurrent import futures

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, startup, tasks
from tfshard.devices.words import from_words, to_words

# Group keys, between DTensor's keys and the keys in replicas.py.
_FIRST_GROUP, _PLACES = 0x20000000, 1 << 13
# The dtypes that a broadcast supports, and the dtypes sent as another dtype of equal size.
_TAKEN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_AS = {tf.bfloat16: tf.float16}

# The prefix of an endpoint that is a client's host, not a device.
_HOST = "host:"

# An instance key for each shape and dtype sent between two endpoints, in the order in which both endpoints meet them.
# TensorFlow records each key forever, and asks client 0 for each key once.
_instances: dict[tuple[str, str], dict[tuple[tuple[int, ...], tf.DType], int]] = collections.defaultdict(dict)
_senders: dict[tuple[str, str], futures.ThreadPoolExecutor] = {}
_placeholders: dict[tuple[tuple[int, ...], tf.DType, str], tf.Tensor] = {}
_pending_sends: list[futures.Future[None]] = []


def clients_of(mesh: dtensor.Mesh) -> tuple[int, ...]:
    """Return the clients with devices in a mesh, in order. The result is equal on all clients."""
    names = mesh.global_devices()  # Empty if the mesh has devices of every client.
    return tuple(sorted({client_of(name) for name in names})) if names else tuple(range(clients.here().count))


def is_everywhere(mesh: dtensor.Mesh) -> bool:
    """Return whether every client has devices in a mesh. The result is equal on all clients."""
    return clients.here().count == 1 or len(clients_of(mesh)) == clients.here().count


def devices_of(mesh: dtensor.Mesh) -> list[str]:
    """Return the names of all devices of a mesh, in mesh order. The result is equal on all clients."""
    if mesh.global_devices():
        return [str(name) for name in mesh.global_devices()]
    local, here = [str(name) for name in mesh.local_devices()], clients.here()
    if here.count == 1:
        return local
    # Equally many devices of each client, client 0's first.
    task = f"/task:{tasks.of_client(here.rank, here.count)}/"
    return [name.replace(task, f"/task:{each}/") for each in tasks.order(here.count) for name in local]


def client_of(device: object) -> int:
    """Return the client of a device."""
    return tasks.client_of(int(tf.DeviceSpec.from_string(str(device)).task or 0), clients.here().count)


def is_here(device: str) -> bool:
    """Return whether a device belongs to this client."""
    return clients.here().count == 1 or client_of(device) == clients.here().rank


# --- from device to device


def send(tensor: tf.Tensor, source: str, target: str) -> None:
    """Send a tensor from a local device to another client's device. The other client must call `received`."""
    key, pair = _instance(tensor.shape, tensor.dtype, source, target), (source, target)
    if pair not in _senders:
        _senders[pair] = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="tfshard_send")
    _pending_sends.append(_senders[pair].submit(_send, tensor, key, source, target))


def _send(tensor: tf.Tensor, instance: int, source: str, target: str) -> None:
    with tf.device(_device(source)):
        if _goes_through_host(source):
            tensor = tf.identity(tensor)
        if tensor.dtype in _AS:
            tensor = tf.bitcast(tensor, _AS[tensor.dtype])
        elif tensor.dtype not in _TAKEN:
            tensor = tf.constant(to_words(tensor.numpy()))
        tf.raw_ops.CollectiveBcastSendV2(input=tensor, **_keys(instance, source, target))


def wait_until_sent() -> None:
    """Wait for all sends. Raises the first error of a send."""
    while _pending_sends:
        _pending_sends.pop(0).result()


def received(shape: Sequence[int], dtype: tf.DType, source: str, target: str) -> tf.Tensor:
    """Wait for a tensor that another client's device sends to a local device, and return it on that device."""
    tensor = _received(tuple(shape), dtype, source, target)
    if not _goes_through_host(target):
        return tensor
    with tf.device(target):
        return tf.identity(tensor)


def _received(shape: tuple[int, ...], dtype: tf.DType, source: str, target: str) -> tf.Tensor:
    instance = _instance(shape, dtype, source, target)
    sent, as_words = _AS.get(dtype, dtype), dtype not in _AS and dtype not in _TAKEN
    words = to_words(np.zeros(shape, dtype.as_numpy_dtype)).shape if as_words else ()
    with tf.device(_device(target)):
        tensor = tf.raw_ops.CollectiveBcastRecvV2(
            T=tf.int32 if as_words else sent, shape=words if as_words else shape, **_keys(instance, source, target)
        )
        if as_words:
            return tf.constant(from_words(tensor.numpy(), shape, dtype.as_numpy_dtype))
        return tensor if sent == dtype else tf.bitcast(tensor, dtype)


def _instance(shape: Sequence[int], dtype: tf.DType, source: str, target: str) -> int:
    known = _instances[source, target]
    return known.setdefault((tuple(shape), dtype), len(known) + 1)


def _keys(instance: int, source: str, target: str) -> dict[str, object]:
    group = _FIRST_GROUP + _place(source) * _PLACES + _place(target)
    return {"group_size": 2, "group_key": group, "instance_key": instance, "communication_hint": "auto"}


def _place(end: str) -> int:
    """Return the number of a device in the run, or of a client's host."""
    runtime = startup.current()
    assert runtime is not None
    if end.startswith(_HOST):
        return runtime.num_devices + int(end.removeprefix(_HOST))
    return client_of(end) * runtime.local_devices + int(tf.DeviceSpec.from_string(end).device_index or 0)


def _device(end: str) -> str:
    """Return the device that runs an endpoint's broadcasts."""
    if end.startswith(_HOST):
        client = int(end.removeprefix(_HOST))
    elif _goes_through_host(end):
        client = client_of(end)
    else:
        return end
    return f"/job:{startup.JOB}/task:{tasks.of_client(client, clients.here().count)}/device:CPU:0"


def _goes_through_host(end: str) -> bool:
    """Return whether an endpoint is a device whose messages go through its client's host."""
    return not end.startswith(_HOST) and tf.DeviceSpec.from_string(end).device_type == "GPU"


# --- from client to client


def from_first(value: np.ndarray | None, shape: Sequence[int], dtype: tf.DType, mesh: dtensor.Mesh) -> np.ndarray:
    """Send a host value from the first client with devices in a mesh to the clients without. All clients call this.

    Args:
        value: The value. None on clients without devices in the mesh.
        shape: The value's shape.
        dtype: The value's dtype.
        mesh: The mesh.

    Returns:
        The value, on all clients.
    """
    here, knowing = clients.here(), clients_of(mesh)
    others = [client for client in range(here.count) if client not in knowing]
    with here.operation(f"the broadcast from client {knowing[0]} to clients {others}", first=True):
        source = f"{_HOST}{knowing[0]}"
        if here.rank == knowing[0]:
            assert value is not None
            for other in others:
                send(tf.constant(value), source, f"{_HOST}{other}")
            wait_until_sent()
        if here.rank in others:
            value = received(shape, dtype, source, f"{_HOST}{here.rank}").numpy()
    assert value is not None
    return value


def of_all(number: int) -> list[int]:
    """All-gather a number from each client. All clients call this."""
    here, shape = clients.here(), ()
    with here.operation("a number of each client", first=True):
        for other in range(here.count):
            if other != here.rank:
                send(tf.constant(number, tf.int64), f"{_HOST}{here.rank}", f"{_HOST}{other}")
        found = [
            number
            if other == here.rank
            else int(received(shape, tf.int64, f"{_HOST}{other}", f"{_HOST}{here.rank}").numpy())
            for other in range(here.count)
        ]
        wait_until_sent()
    return found


# --- meshes without local devices


def packed(shards: Sequence[tf.Tensor], shape: Sequence[int], dtype: tf.DType, layout: dtensor.Layout) -> tf.Tensor:
    """Pack the local shards of this client into a tensor on a mesh. Returns a `placeholder` without local devices.

    Args:
        shards: The local shards, in device order.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        layout: The tensor's layout.
    """
    return dtensor.pack(list(shards), layout) if shards else placeholder(shape, dtype, layout)


def placeholder(shape: Sequence[int], dtype: tf.DType, layout: dtensor.Layout) -> tf.Tensor:
    """Return a placeholder tensor without a value on a mesh without local devices. Each call returns the same object.

    Make the first call from the main thread, because all threads share DTensor's default layout.
    """
    key = tuple(shape), dtype, layout.to_string()
    if key not in _placeholders:
        with _private.default_mesh(layout.mesh):
            _placeholders[key] = dtensor.call_with_layout(tf.zeros, layout, key[0], dtype)
    return _placeholders[key]


def unpacked(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return this client's local shards of a tensor, possibly none."""
    layout = dtensor.fetch_layout(tensor)
    return [] if layout.mesh.num_local_devices() == 0 else list(dtensor.unpack(tensor))
