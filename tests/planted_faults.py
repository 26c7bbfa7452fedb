"""Faults for the checks of `tfshard doctor`: each plants one in the current process, for one check."""

import json
import os
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import messages, transfer

SLOW_PAIR = {1, 3}
WRONG_DEVICE = 1


def permute_ranks(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Exchange the last two local devices in each mesh."""
    create_mesh, local_devices = dtensor.create_mesh, dtensor.local_devices

    def exchanged(devices: list) -> list:
        return [*devices[:-2], *devices[:-3:-1]]

    def permuted_mesh(*arguments, devices, device_type, **options) -> dtensor.Mesh:
        made = create_mesh(*arguments, devices=devices, device_type=device_type, **options)
        local = exchanged(local_devices(device_type)[: len(devices)])
        numbers = np.arange(len(devices))
        return dtensor.Mesh(made.dim_names, numbers.reshape(made.shape()), list(numbers), local, **options)

    replace(dtensor, "create_mesh", permuted_mesh)
    replace(dtensor, "local_devices", lambda *arguments: exchanged(local_devices(*arguments)))


def slow_a_link(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Slow messages between two devices."""
    send = messages._send

    def slow_send(tensor: tf.Tensor, instance: int, source: str, target: str) -> None:
        if {messages._place(source), messages._place(target)} == SLOW_PAIR:
            time.sleep(0.1)
        send(tensor, instance, source, target)

    replace(messages, "_send", slow_send)


def damage_a_result(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Change the results of collectives on one local device of the first client."""
    unpacked = messages.unpacked

    def damaged(tensor: tf.Tensor) -> list[tf.Tensor]:
        shards = unpacked(tensor)
        # The checks of the order of devices unpack few elements.
        if shards[0].shape.num_elements() >= 256 and os.environ.get("TFSHARD_CLIENT_ID", "0") == "0":
            shards[WRONG_DEVICE] += 1
        return shards

    replace(messages, "unpacked", damaged)


def sum_wrongly(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Make the sums of gradients too large, where each device keeps its shard."""
    scatter = transfer.scatter
    replace(transfer, "scatter", lambda tensor, axes, mesh: 1.5 * scatter(tensor, axes, mesh) + 0.01)


def hang(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Hang in the third training step of the last client."""
    train_on_batch, count = keras.Model.train_on_batch, []

    def planted_hang(model: keras.Model, *arguments: object) -> object:
        count.append(1)
        last = str(int(os.environ.get("TFSHARD_NUM_CLIENTS", "1")) - 1)
        if len(count) == 3 and os.environ.get("TFSHARD_CLIENT_ID", "0") == last:
            time.sleep(3600)
        return train_on_batch(model, *arguments)

    replace(keras.Model, "train_on_batch", planted_hang)


# The fault of each check, by the function of the check.
FAULTS: dict[str, Callable[..., None]] = {
    "rank-order": permute_ranks,
    "device-pairs": slow_a_link,
    "collective-values": damage_a_result,
    "parity": sum_wrongly,
    "scaling": hang,
}


def plant(request: str) -> None:
    """Plant the fault of a check's request, if it has one."""
    assert tfshard.__version__
    FAULTS.get(json.loads(request)["function"], lambda: None)()
