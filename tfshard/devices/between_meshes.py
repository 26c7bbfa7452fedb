"""Copy tensors to another mesh that has the same axes and other devices."""

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import messages, transfer


def handed_over(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Copy each local shard of a tensor to the device at the same position of another mesh. Eager only.

    In a launched run, all clients call this. A client without devices in either mesh does nothing. A client waits for
    shards from other clients, but does not wait for the shards it sends.

    Args:
        tensor: A DTensor.
        mesh: A mesh with the same axis names and sizes as the tensor's mesh.

    Returns:
        The same values in the same layout, on `mesh`.
    """
    before = dtensor.fetch_layout(tensor)
    if before.mesh == mesh:
        return tensor
    layout = dtensor.Layout(before.sharding_specs, mesh)
    local_shards = iter(messages.unpacked(tensor))
    shape = transfer.shard_shape(tuple(tensor.shape), before)
    received_shards = []
    for source, target in zip(messages.devices_of(before.mesh), messages.devices_of(mesh), strict=True):
        shard = next(local_shards) if messages.is_here(source) else None
        if not messages.is_here(target):
            if shard is not None:
                messages.send(shard, source, target)
        elif shard is None:
            received_shards.append(messages.received(shape, tensor.dtype, source, target))
        else:
            with tf.device(target):
                received_shards.append(tf.identity(shard))
    return messages.packed(received_shards, tensor.shape, tensor.dtype, layout)
