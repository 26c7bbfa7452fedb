"""Meshes of several clients: the pipeline ranks that DTensor accepts."""

import math

import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import mesh, transfer
from tfshard.layouts.axes import MeshAxes


def test_many_meshes_do_not_make_tensorflow_warn_of_retracing(caplog, monkeypatch):
    tfshard.initialize(num_devices=4, device_type="CPU")
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    for number in range(8):
        transfer.meet(tfshard.create_mesh(**{"batch": 4, f"axis_{number}": 1}))
    assert "retracing" not in caplog.text


@pytest.mark.parametrize(
    "axes", [{"pipeline": 2, "batch": 4}, {"batch": 3, "pipeline": 2}, {"pipeline": 6}, {"pipeline": 3, "batch": 2}]
)
def test_places_with_as_many_devices_of_each_of_their_clients_can_be(axes):
    """Each client has two devices."""
    mesh.check_ranks(MeshAxes.of(axes), num_clients=math.prod(axes.values()) // 2)


def test_a_place_with_more_devices_of_one_client_is_refused_with_what_would_do():
    expected = r"{0: 2, 1: 1} devices by client.*Give the axis 3 ranks"
    with pytest.raises(tfshard.errors.MeshError, match=expected) as error:
        mesh.check_ranks(MeshAxes.of({"pipeline": 2, "batch": 3}), num_clients=3)
    assert "name the axis last" in str(error.value)
    mesh.check_ranks(MeshAxes.of({"batch": 3, "pipeline": 2}), num_clients=3)
