"""Compile steps for a mesh of GPUs of a client that never comes.

This process is client 0 of two, without devices in the mesh. DTensor compiles a step for such a mesh and runs nothing
(tfshard/devices/messages.py), so `fit` traces, compiles and ends. Values that the other client would send are zeros.
"""

import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, instances, mesh, messages, startup
from tfshard.layouts.axes import MeshAxes, roles_of

# More devices than any mesh of the configurations has.
_DEVICES = 8
# The task of the client that never comes.
_ABSENT = "/job:worker/replica:0/task:1"


class _First(clients.Alone):
    """Client 0 of two that waits for nobody."""

    count = 2


def start() -> None:
    """Start DTensor as client 0 of two. All GPUs are the other client's."""
    os.environ.update(
        DTENSOR_CLIENT_ID="0",
        DTENSOR_NUM_CLIENTS="2",
        DTENSOR_JOB_NAME=startup.JOB,
        DTENSOR_JOBS=",".join(_free_addresses(2)),
        DTENSOR_GPU_USE_NCCL_COMMUNICATION="1",
    )
    startup._set_switches("CPU")
    startup._keep_order(of_bodies=True)
    _private.shapes_in_int32()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _DEVICES)
    with _private.without_log():
        dtensor.initialize_accelerator_system("CPU", enable_coordination_service=False)
    _private.make_dtensor_synchronous()
    clients._here = _First()
    startup._runtime = startup.Runtime(device_type="GPU", num_devices=2 * _DEVICES, client_id=0, num_clients=2)
    messages.from_first = _zeros
    instances.count_alike = lambda: None
    trainer.pythonify_logs = _no_logs


def create_mesh(**sizes: int) -> dtensor.Mesh:
    """Return a mesh of the absent client's GPUs."""
    axes = MeshAxes.of(sizes, roles_of(sizes, None))
    return mesh._mesh_of(axes, [f"{_ABSENT}/device:GPU:{number}" for number in range(math.prod(axes.values()))], set())


def _zeros(value: np.ndarray | None, shape: Sequence[int], dtype: tf.DType, over: dtensor.Mesh) -> np.ndarray:
    del value, over
    return np.zeros(tuple(shape), dtype.as_numpy_dtype)


def _no_logs(logs: Any) -> dict[str, float]:
    """Replace the logs of an epoch: without devices, they have no values."""
    del logs
    return {"loss": 0.0}


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [f"localhost:{port}" for port in ports]
