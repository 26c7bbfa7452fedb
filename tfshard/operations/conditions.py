"""Conditions that several rewrite rules share (`registry.rewrite_rule`)."""

from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts.axes import axis_sizes


def batch_axis_has_devices(call: _private.Call, mesh: dtensor.Mesh) -> bool:
    """The batch axis has more than one device."""
    del call
    return axis_sizes(mesh).data_size > 1


def model_axis_has_devices(call: _private.Call, mesh: dtensor.Mesh) -> bool:
    """A model axis has more than one device."""
    del call
    axes = axis_sizes(mesh)
    return any(axes[axis] > 1 for axis in axes.tensor)
