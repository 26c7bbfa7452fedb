"""A device of DTensor's for each mesh that does its work beside others.

A `DTensorDevice` does one operation at a time: of threads that call functions on several meshes, all but one wait until
its function has ended (`DTensorDevice::Execute` holds a lock, seen in the stacks of threads; TensorFlow 2.21). On
several clients two functions then wait for each other for ever, if each of them meets the other's client in its
collectives. Meshes that `give_own_device` was told of have a device of their own. DTensor's functions know one device
(`api._dtensor_singleton`): here that is a `_Devices`, which asks the device of a tensor or of a mesh.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.dtensor.python import dtensor_device as _dtensor_device
from tensorflow.experimental import dtensor


def give_own_device(mesh: dtensor.Mesh) -> None:
    """Functions on this mesh run while others run on other meshes. Before the first tensor is there."""
    devices = _dtensor_api._dtensor_device()
    if not isinstance(devices, _Devices):
        devices = _dtensor_api._dtensor_singleton = _Devices(devices)
    devices.add(mesh)


class _Devices:
    """DTensor's device for most meshes, and others for some.

    Args:
        main: The device for most.
    """

    def __init__(self, main: Any):
        self._main = main
        self._by_mesh: dict[str, Any] = {}
        self._by_name = {main.name: main}
        self._here = threading.local()

    def add(self, mesh: dtensor.Mesh) -> None:
        """Makes a device for a mesh."""
        if mesh.to_string() not in self._by_mesh:
            device = _dtensor_device.DTensorDevice([mesh], is_async=False)
            self._by_mesh[mesh.to_string()] = self._by_name[device.name] = device

    def _of_mesh(self, mesh: dtensor.Mesh) -> Any:
        return self._by_mesh.get(mesh.to_string(), self._main)

    def _of_tensor(self, tensor: Any) -> Any:
        return self._by_name.get(getattr(tensor, "device", None), self._main)

    @property
    def name(self) -> str:
        """Of the device of the mesh that was chosen last."""
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
