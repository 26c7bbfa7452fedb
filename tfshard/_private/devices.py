"""A separate DTensor device for each mesh that works concurrently with other meshes.

A `DTensorDevice` executes one operation at a time. `DTensorDevice::Execute` holds a lock, as the threads' stacks show
(TensorFlow 2.21). If several threads call functions on different meshes, all but one of the threads wait until the
running function ends. With several clients, two such functions can deadlock when each waits for the other in a
collective. `give_separate_device` therefore gives a mesh a separate device. DTensor's functions know a single device
(`api._dtensor_singleton`). tfshard replaces this device by a `_Devices`, which forwards each call to the device of the
tensor or mesh.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.dtensor.python import dtensor_device as _dtensor_device
from tensorflow.experimental import dtensor

from tfshard._private import patches


def give_separate_device(mesh: dtensor.Mesh) -> None:
    """Let functions on this mesh run while others run on other meshes. Call this before the mesh has a tensor."""
    devices = _dtensor_api._dtensor_device()
    if not isinstance(devices, _Devices):
        devices = _dtensor_api._dtensor_singleton = _Devices(devices)
    devices.add(mesh)


def set_device_in(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter `context()` whenever DTensor's default mesh or layout is set, or a tensor is packed or read.

    The default mesh or layout stays set inside the context, too. Changes `DTensorDevice._experimental_default_mesh`,
    `_default_layout`, `pack` and `EagerTensor._numpy`. The context is needed because `dtensor.relayout` sets the
    default mesh, even in a graph, and all threads share the device.
    """
    cls = _dtensor_device.DTensorDevice

    def in_context(method: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        @functools.wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with context(), method(*args, **kwargs) as value:
                yield value

        return entered

    for name in ("_experimental_default_mesh", "_default_layout"):
        patches.replace(cls, name, in_context(getattr(cls, name)), "one thread at a time sets DTensor's default mesh")
    pack = cls.pack

    @functools.wraps(pack)
    def pack_in_context(*args: Any, **kwargs: Any) -> Any:
        with context():
            return pack(*args, **kwargs)

    patches.replace(cls, "pack", pack_in_context, "one thread at a time uses DTensor's device")
    tensor = next(each for each in tf.__internal__.EagerTensor.__mro__ if "_numpy" in vars(each))
    numpy = tensor._numpy

    @functools.wraps(numpy)
    def numpy_in_context(self: Any) -> Any:
        # In a graph, TensorFlow reads constants from a host tensor.
        if not tf.executing_eagerly() or not _dtensor_api.is_dtensor(self):
            return numpy(self)
        with context():
            return numpy(self)

    patches.replace(tensor, "_numpy", numpy_in_context, "one thread at a time reads a tensor of a mesh")


class _Devices:
    """Forwards DTensor's calls to a mesh's device.

    Args:
        main: The device for every mesh without a device added by `add`.
    """

    def __init__(self, main: Any):
        self._main = main
        self._by_mesh: dict[str, Any] = {}
        self._by_name = {main.name: main}
        self._here = threading.local()

    def add(self, mesh: dtensor.Mesh) -> None:
        """Create a device for a mesh."""
        if mesh.to_string() not in self._by_mesh:
            device = _dtensor_device.DTensorDevice([mesh], is_async=False)
            self._by_mesh[mesh.to_string()] = self._by_name[device.name] = device

    def _of_mesh(self, mesh: dtensor.Mesh) -> Any:
        return self._by_mesh.get(mesh.to_string(), self._main)

    def _of_tensor(self, tensor: Any) -> Any:
        return self._by_name.get(getattr(tensor, "device", None), self._main)

    @property
    def name(self) -> str:
        """The name of the device that this thread's current default mesh uses."""
        name: str = getattr(self._here, "device", self._main).name
        return name

    def pack(self, tensors: Sequence[Any], layout: dtensor.Layout) -> Any:
        return self._of_mesh(layout.mesh).pack(tensors, layout)

    def unpack(self, tensor: Any) -> Any:
        return self._of_tensor(tensor).unpack(tensor)

    def fetch_layout(self, tensor: Any) -> Any:
        return self._of_tensor(tensor).fetch_layout(tensor)

    def is_dtensor(self, tensor: Any) -> bool:
        return bool(self._of_tensor(tensor).is_dtensor(tensor))

    @contextlib.contextmanager
    def _experimental_default_mesh(self, mesh: dtensor.Mesh) -> Iterator[None]:
        device, before = self._of_mesh(mesh), getattr(self._here, "device", self._main)
        with device._experimental_default_mesh(mesh):
            self._here.device = device
            try:
                yield
            finally:
                self._here.device = before

    def _default_layout(self, layout: dtensor.Layout) -> Any:
        return self._of_mesh(layout.mesh)._default_layout(layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._main, name)
