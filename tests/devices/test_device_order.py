"""A mesh has its devices in TensorFlow's order of ranks, or is refused."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import clients, device_order, messages, replicas, tasks, transfer
from tfshard.errors import MeshError
from tfshard.layouts.axes import MeshAxes, mesh_name, roles_of


@pytest.mark.parametrize("count", range(1, 17))
def test_names_of_the_clients_tasks_are_in_the_order_of_the_clients(count):
    names = [f"/job:worker/replica:0/task:{tasks.of_client(client, count)}" for client in range(count)]
    assert names == sorted(names)
    assert [tasks.client_of(tasks.of_client(client, count), count) for client in range(count)] == list(range(count))
    # TensorFlow finds the task of each client at the client's place in the list of addresses.
    addresses = [f"client {client}" for client in range(count)]
    by_task = tasks.by_task(addresses, count)
    assert [by_task[tasks.of_client(client, count)] for client in range(count)] == addresses


def test_up_to_ten_clients_are_the_tasks_of_their_numbers():
    for count in range(1, 11):
        assert tasks.order(count) == tuple(range(count))
    assert tasks.order(11) == (0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9)


def permuted(places, **sizes) -> dtensor.Mesh:
    """Return a mesh with its devices in a different order than TensorFlow's."""
    axes, local = MeshAxes.of(sizes, roles_of(sizes, None)), dtensor.local_devices("CPU")
    numbers = np.arange(len(places)).reshape(list(axes.values()))
    devices = [local[place] for place in places]
    return dtensor.Mesh(list(axes), numbers, list(range(len(places))), devices, mesh_name=mesh_name(axes))


@pytest.mark.parametrize(
    ("places", "sizes", "axis", "found"),
    [
        ((0, 2, 1, 3), {"batch": 4}, "batch", (0, 1, 2, 3)),
        ((3, 2, 1, 0), {"batch": 4}, "batch", (0, 1, 2, 3)),
        ((0, 1, 3, 2), {"batch": 2, "model": 2}, "model", (2, 3)),
        ((0, 1, 3, 2), {"replica": 2, "batch": 2}, "batch", (0, 1, 2, 3)),
    ],
)
def test_a_mesh_in_another_order_is_refused_and_both_orders_are_named(places, sizes, axis, found):
    tfshard.ShardedStrategy(tfshard.create_mesh(**sizes))  # Its devices are in TensorFlow's order.
    mesh = permuted(places, **sizes)
    for _ in range(2):
        with pytest.raises(MeshError, match=f"ranks the devices of axis '{axis}' in another order") as refused:
            tfshard.ShardedStrategy(mesh)
        ours, theirs = (
            tuple(int(number) for number in re.findall(r"CPU:(\d)", part))
            for part in str(refused.value).split("Received")[1].split("which TensorFlow ranks as")
        )
        assert theirs == found
        assert sorted(ours) == sorted(found)
        assert ours in (places, places[2:])
        assert "tfshard.create_mesh" in str(refused.value)


@pytest.mark.parametrize(
    ("places", "sizes", "meet"),
    [
        ((0, 2, 1, 3), {"batch": 4}, replicas.meet),
        ((0, 2, 1, 3), {"batch": 4}, replicas.meet_to_exchange),
        ((1, 0, 3, 2), {"replica": 2, "batch": 2}, replicas.meet),
        ((2, 3, 0, 1), {"replica": 2, "batch": 2}, replicas.meet_to_exchange),
        ((0, 2, 1, 3), {"batch": 4}, transfer.meet),
    ],
)
def test_each_kind_of_group_checks_its_order(places, sizes, meet):
    meet(tfshard.create_mesh(**sizes))
    with pytest.raises(MeshError, match="in another order"):
        meet(permuted(places, **sizes))


@pytest.mark.parametrize(
    ("visible", "found", "expected"),
    [
        (None, (0, 1, 2, 3, 7, 4, 5, 6), "0,1,2,3,7,4,5,6"),
        ("7,6,5,4", (0, 2, 1, 3), "7,5,6,4"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", (0, 2, 1, 3), "GPU-a,GPU-c,GPU-b,GPU-d"),
    ],
)
def test_gpus_of_a_process_are_to_be_named_in_tensorflows_order(visible, found, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(len(found))]
    device_order.check_group("axis 'batch'", devices, np.arange(len(found)))
    with pytest.raises(MeshError, match=f"CUDA_VISIBLE_DEVICES={expected}\\."):
        device_order.check_group("axis 'batch'", devices, np.array(found, np.float32))


@pytest.mark.parametrize("visible", ["3", "3,5", None])
def test_gpus_that_are_split_are_not_named(visible, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
        parts = [tf.config.LogicalDeviceConfiguration()] * 2
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: parts)
    devices = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(4)]
    with pytest.raises(MeshError, match="parts of one GPU.* not split, named in TensorFlow's order by CUDA_VISIBLE"):
        device_order.check_group("axis 'batch'", devices, np.array([0, 2, 1, 3]))


def test_a_group_over_two_processes_names_the_gpus_of_each():
    devices = [f"/job:worker/replica:0/task:{task}/device:GPU:{number}" for task in (0, 1) for number in range(4)]
    with pytest.raises(MeshError, match="start it with CUDA_VISIBLE_DEVICES=0,2,1,3"):
        device_order.check_group("axis 'batch'", devices, np.array([0, 2, 1, 3, 4, 6, 5, 7]))
    with pytest.raises(MeshError, match="Make the mesh with"):
        device_order.check_group("axis 'batch'", devices, np.array([4, 5, 6, 7, 0, 1, 2, 3]))


def test_each_client_is_told_the_order_of_its_own_gpus(monkeypatch):
    """The launcher gives client 1 the last four GPUs of the host."""
    devices = [f"/job:worker/replica:0/task:{task}/device:GPU:{number}" for task in (0, 1) for number in range(4)]
    second = type("Second", (clients.Alone,), {"rank": 1, "count": 2, "is_launched": True})()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with clients.replaced(by=second):
        with pytest.raises(MeshError, match="start 'tfshard launch' with .* client has CUDA_VISIBLE_DEVICES=4,6,5,7"):
            device_order.check_group("axis 'batch'", devices, np.array([0, 1, 2, 3, 4, 6, 5, 7]))
        with pytest.raises(MeshError, match="GPUs of this process are in the right order. The error of another"):
            device_order.check_group("axis 'batch'", devices, np.array([0, 2, 1, 3, 4, 5, 6, 7]))
        with pytest.raises(MeshError, match="Make the mesh with"):
            device_order.check_group("axis 'batch'", devices, np.array([4, 5, 6, 7, 0, 1, 2, 3]))


def test_what_was_not_gathered_is_no_order():
    with pytest.raises(MeshError, match=r"\(not a place: 9\)"):
        device_order.check_group("axis 'batch'", ["/device:CPU:0", "/device:CPU:1"], np.array([0, 9]))


def key_groups(mesh: dtensor.Mesh, keys: np.ndarray) -> dict[int, tuple[str, ...]]:
    """Return the devices of each key."""
    names = np.array(messages.devices_of(mesh), dtype=object)
    return {int(key): tuple(names[keys.ravel() == key]) for key in np.unique(keys)}


def test_a_group_key_stands_for_one_group_of_devices_whatever_its_mesh():
    whole = tfshard.create_mesh(batch=4)
    kinds = [whole, tfshard.create_mesh(replica=2, batch=2), tfshard.create_mesh(batch=2, model=2)]
    meshes = [*kinds, permuted([2, 3], batch=2), permuted([3, 1, 2, 0], batch=2, model=2)]
    found: dict[int, tuple[str, ...]] = {}
    for mesh in meshes:
        for keys in (replicas._keys_of_all, replicas._keys_of_replicas, replicas._keys_between_replicas):
            for key, devices in key_groups(mesh, keys(mesh)).items():
                assert found.setdefault(key, devices) == devices
                assert 0x40000000 <= key < 0x80000000
    assert len(found) == len(set(found.values())) >= 11
    (key,) = key_groups(whole, replicas._keys_of_all(whole))
    assert np.all(replicas._keys_of_replicas(whole) == key)


def test_groups_with_the_same_key_are_refused(monkeypatch):
    monkeypatch.setattr(replicas.zlib, "crc32", lambda text: 5)
    monkeypatch.setattr(replicas, "_groups", {})
    replicas._key.cache_clear()
    try:
        assert replicas._key(("CPU:0", "CPU:1")) == 0x40000005
        with pytest.raises(MeshError, match=r"the same key, 0x40000005.*Received: CPU:2, CPU:3; before: CPU:0, CPU:1"):
            replicas._key(("CPU:2", "CPU:3"))
    finally:
        replicas._key.cache_clear()
