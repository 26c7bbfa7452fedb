"""Tensors made from arrays keep every bit, and need no extra copy."""

import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import host_memory, transfer

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "uint8", "uint16", "int64", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [(), (slice(1, 3),), (slice(None), slice(2, 5)), (0, 0), (slice(0, 0),)], ids=str)
def test_a_tensor_has_every_bit_of_an_array_and_nothing_of_what_becomes_of_it(dtype, cut):
    dtype = tf.as_dtype(dtype)
    array = np.random.RandomState(0).randint(0, 256, (4, 6, dtype.size), np.uint8)
    array = np.ascontiguousarray(array % 2 if dtype == tf.bool else array).view(dtype.as_numpy_dtype)[..., 0]
    piece = array[cut]
    expected = piece.tobytes()
    tensor = host_memory.tensor_of(piece)
    array[:] = 0
    assert tensor.dtype == dtype and tuple(tensor.shape) == piece.shape
    assert tensor.numpy().tobytes() == expected
    assert host_memory.view(tensor).tobytes() == expected


def test_a_cut_of_an_array_is_copied_once():
    array = np.ones((512, 512), np.float32)
    piece = array[:, :128]
    host_memory.tensor_of(piece)  # Modules are imported before the measurement.
    tracemalloc.start()
    try:
        tensor = host_memory.tensor_of(piece)
        peak = tracemalloc.get_traced_memory()[1]
        _ = host_memory.view(tensor)
    finally:
        tracemalloc.stop()
    # This counts NumPy's memory. TensorFlow's memory holds the tensor.
    assert peak < piece.nbytes / 10


class AcceleratorMesh:
    """A mesh that claims to have devices other than the host's."""

    def __init__(self, mesh):
        self.mesh = mesh

    def device_type(self):
        return "GPU"

    def __getattr__(self, name):
        return getattr(self.mesh, name)


def test_pieces_go_to_their_devices_and_leave_the_scopes_of_who_takes_them():
    mesh = AcceleratorMesh(tfshard.create_mesh(batch=4))
    value = np.arange(8, dtype=np.float32)
    pieces = transfer.host_shards(value, ("batch",), mesh)
    for number, device in enumerate(mesh.local_devices()):
        with tf.device("CPU:3"):
            piece = next(pieces)
            here = tf.zeros(()).device
        assert piece.device.endswith(device.removeprefix("/job:localhost")) and here.endswith("CPU:3")
        np.testing.assert_array_equal(piece, value[2 * number : 2 * number + 2])
