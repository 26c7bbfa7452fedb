"""A stand-in for the module `jax`, with the names that Keras's tests of its JAX distribution use, on TensorFlow.

A sharding is a DTensor layout, and a mesh a DTensor mesh. `jit` traces a function as a step of a strategy.
"""

import functools
import pathlib
import sys
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import keras_devices
from tfshard.devices.mesh_tensors import MeshTensor
from tfshard.storage import ShardedVariable


class PartitionSpec(tuple):
    """The axis of each dim. Dims at the end that are not sharded do not matter."""

    def __new__(cls, *axes: str | None):
        return super().__new__(cls, axes)


class _OfType(type):
    """The type of a class that stands for a class of TensorFlow."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.stands_for)


class Device(metaclass=_OfType):
    """A device. Arrays of these have a dim less than arrays of TensorFlow's devices, which are tuples."""

    stands_for = tf.config.LogicalDevice

    def __init__(self, device: tf.config.LogicalDevice):
        self.device = device

    def __eq__(self, other: object) -> bool:
        return self.device == getattr(other, "device", other)

    def __str__(self) -> str:
        return f"{self.device.device_type.lower()}:{self.device.name.rpartition(':')[2]}"


class Mesh(metaclass=_OfType):
    stands_for = dtensor.Mesh

    def __new__(cls, devices: np.ndarray, axis_names: tuple[str, ...]) -> dtensor.Mesh:
        names = np.vectorize(str, otypes=[object])(devices)
        return keras_devices.mesh_of(keras.distribution.DeviceMesh(devices.shape, list(axis_names), names))


class NamedSharding(metaclass=_OfType):
    stands_for = dtensor.Layout

    def __new__(cls, mesh: dtensor.Mesh, spec: PartitionSpec) -> dtensor.Layout:
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in spec], mesh)


class Sharding:
    """The `sharding` of a value."""

    def __init__(self, axes: tuple[str | None, ...], layout: dtensor.Layout | None = None):
        self.spec = PartitionSpec(*axes)
        self.is_fully_replicated = not any(axes)
        self._layout = layout

    def is_equivalent_to(self, other: dtensor.Layout, ndim: int) -> bool:
        return self._layout == other and len(other.sharding_specs) == ndim


def jit(function, static_argnames: str = ""):
    """Run a function as a step of a strategy, traced. Its second argument is not a tensor."""
    del static_argnames

    def run(inputs: tf.Tensor, layout: dtensor.Layout):
        strategy = tfshard.ShardedStrategy(layout.mesh, {}, zero_stage=0)
        with strategy.extended.results_stay_sharded():
            found = strategy.run(tf.function(lambda x: function(x, layout)), args=(inputs,))
        return MeshTensor(found)

    return run


def inspect_array_sharding(tensor: tf.Tensor, callback) -> None:
    """Pass the sharding of a value to `callback`, if the value exists."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        layout = dtensor.fetch_layout(tensor)
        callback(Sharding(tuple(None if s == dtensor.UNSHARDED else s for s in layout.sharding_specs), layout))


def _of_variable(variable: ShardedVariable) -> Sharding:
    # Without the dims that the padded form of a group adds.
    layout = variable.layout
    return Sharding(layout.compute if layout.flat is not None or layout.sharded is None else layout.storage)


def _of_tensor(tensor: MeshTensor) -> Sharding:
    specs = tensor.layout.sharding_specs
    return Sharding(tuple(None if s == dtensor.UNSHARDED else s for s in specs), tensor.layout)


def _shards(tensor: MeshTensor) -> list[Any]:
    return [types.SimpleNamespace(data=shard) for shard in dtensor.unpack(tensor.on_mesh)]


def install() -> None:
    """Put the stand-in into `sys.modules`, and give TensorFlow's classes the properties that the tests read."""
    ShardedVariable.sharding = property(_of_variable)
    MeshTensor.sharding = property(_of_tensor)
    MeshTensor.addressable_shards = property(_shards)
    dtensor.Layout.sharding = property(lambda self: self)
    dtensor.Mesh.axis_names = property(lambda self: tuple(self.dim_names))
    dtensor.Mesh.devices = property(lambda self: np.empty(self.shape()))

    def devices(backend: str | None = None) -> list[Device]:
        return [Device(device) for device in tf.config.list_logical_devices((backend or "cpu").upper())]

    sharding = types.ModuleType("jax.sharding")
    vars(sharding).update(Mesh=Mesh, NamedSharding=NamedSharding, PartitionSpec=PartitionSpec)
    numpy = types.ModuleType("jax.numpy")
    vars(numpy).update(array=tf.convert_to_tensor, arange=np.arange)
    experimental, layout = types.ModuleType("jax.experimental"), types.ModuleType("jax.experimental.layout")
    experimental.layout = layout
    jax = types.ModuleType("jax")
    vars(jax).update(
        Device=Device, devices=devices, device_count=lambda: len(devices()), default_backend=lambda: "cpu", jit=jit,
        sharding=sharding, numpy=numpy, experimental=experimental,
        distributed=types.SimpleNamespace(initialize=functools.partial(keras.distribution.initialize)),
        debug=types.SimpleNamespace(inspect_array_sharding=inspect_array_sharding),
    )  # fmt: skip
    # pytest imports the package of a test, which would import the JAX backend.
    package = types.ModuleType("keras.src.backend.jax")
    package.__path__ = [str(pathlib.Path(keras.__file__).parent / "src" / "backend" / "jax")]
    for module in (jax, sharding, numpy, experimental, layout, package):
        sys.modules[module.__name__] = module
