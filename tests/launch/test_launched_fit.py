"""Clients train with the numbers of plain Keras on one device (launched_fit.py). A launched run serves many tests."""

import dataclasses
import functools
import json
import pathlib
import re

import keras
import numpy as np
import pytest

import launched
import launched_fit
import sweeps
import tfshard
from launched_fit import MESHES, WAYS

# The tolerance of losses, metrics, weights and predictions.
TOLERANCE = 2e-5
# The fixture trains all cases of the run, so an ordinary run takes one of each table.
MESH_CASES = {"always": ["model within a client, stage 3"]}
WAY_CASES = {"always": ["averaged weights"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """A run: the results of its clients, and the directory with its files."""

    clients: list[dict]
    directory: pathlib.Path


def launch(directory: pathlib.Path, num_clients: int, **options) -> Launched:
    done = launched.launch(
        f"--num_processes={num_clients}", f"--devices_per_process={4 // num_clients}",
        str(launched.HERE / "launched_fit.py"), json.dumps({**options, "directory": str(directory)}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Launched(clients=launched.found(done, num_clients), directory=directory)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Launched:
    """Two clients of two devices."""
    meshes = sweeps.taken("launched meshes", MESHES, **MESH_CASES)
    ways = sweeps.taken("launched ways", WAYS, **WAY_CASES)
    return launch(tmp_path_factory.mktemp("two"), 2, meshes=meshes, ways=ways, files=True)


@functools.cache
def plain(name: str) -> dict:
    """Return the results of plain Keras."""
    where = launched_fit.Plain()
    if name in MESHES:
        return launched_fit.train(where, whole=name == launched_fit.WHOLE)
    return launched_fit.part_of_each(where) if name == "parts" else WAYS[name](where)


def numbers(value, name: str = "") -> dict[str, float]:
    """Return the numbers in nested dicts and lists, by their paths."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: number for key, item in items for place, number in numbers(item, f"{name}/{key}").items()}
    return {name: float(value)}


def assert_plain(run: Launched, num_clients: int, name: str, axis: str | None) -> None:
    """Assert that every client matches one device, that `axis` shards the kernels, and that the kernels moved."""
    expected = dict(plain(name))
    assert expected.pop("kernels") == []
    # A model that is built by its first step has no values before.
    start = expected["start"] or [np.zeros_like(value) for value in expected["weights"]]
    moved = [np.max(np.abs(np.subtract(*pair))) for pair in zip(start, expected["weights"], strict=True)]
    assert all(far >= 100 * TOLERANCE for far, value in zip(moved, start, strict=True) if np.ndim(value) == 2)
    assert len(run.clients) == num_clients
    for client in run.clients:
        assert client["clients"] == [num_clients, 4 // num_clients]
        found = dict(client[name])
        kernels = found.pop("kernels")
        assert kernels and all(axis is None or axis in kernel for kernel in kernels)
        ours, theirs = numbers(found), numbers(expected)
        assert ours.keys() == theirs.keys()
        for place, number in theirs.items():
            np.testing.assert_allclose(ours[place], number, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{name}{place}")


@sweeps.table("launched meshes", "mesh", MESHES, **MESH_CASES)
def test_clients_train_to_the_numbers_of_one_device(two, mesh):
    axes, stage = MESHES[mesh]
    assert_plain(two, 2, mesh, "batch" if stage == 3 else None)
    assert ("model" in axes) == ("model" in two.clients[0][mesh]["kernels"][0])


@sweeps.table("launched ways", "way", WAYS, **WAY_CASES)
def test_every_way_to_train_has_the_numbers_of_one_device(two, way):
    assert_plain(two, 2, way, "batch")


def test_clients_that_feed_their_own_rows_train_to_the_numbers_of_one_device(two):
    assert_plain(two, 2, "parts", "batch")
    for client in two.clients:
        # Another training process repeats the second epoch.
        assert client["resumed"] == client["parts"]["history"]["loss"][1:]


def test_clients_that_copy_their_own_rows_ahead_of_the_step_have_the_same_numbers(two):
    for client in two.clients:
        assert client["copied ahead"] == [client["parts"], client["resumed"]]


def test_random_masks_are_those_of_one_process_and_another_one_for_each_row_and_step(two):
    expected = launched_fit.masks(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    for client in two.clients:
        first, second = client["masks"]["rows"]
        # Half of the values are dropped, and the others are doubled.
        assert {number for row in first + second for number in row} == {0.0, 2.0}
        assert first != second and len({tuple(row) for row in first}) >= 7
        assert client["masks"]["rows"] == expected["rows"]
        np.testing.assert_allclose(client["masks"]["losses"], expected["losses"], rtol=TOLERANCE)


def test_files_that_clients_wrote_together_are_read_by_one_process(two):
    loaded = keras.models.load_model(two.directory / "model.keras")
    assert loaded.count_params() == launched_fit.build().count_params()
    assert len({client["files"] for client in two.clients}) == 1
    manager = tfshard.CheckpointManager(two.directory / "checkpoints")
    written = [path.name for path in manager.open().directory.iterdir() if re.match(r"data\.data-", path.name)]
    assert len(written) == 2
    model = launched_fit.compiled(launched_fit.Sharded.on("batch, stage 3"))
    manager.restore(model)
    for client in two.clients:
        assert launched_fit.values(model) == client["checkpoint"]


@pytest.mark.slow
def test_four_clients_exchange_over_both_axes_of_a_mesh(tmp_path):
    """Each client has one device. No client has the full value of a variable that a model or batch axis shards."""
    mesh = "model across clients, stage 2"
    run = launch(tmp_path, 4, meshes=[mesh])
    assert_plain(run, 4, mesh, None)
    for client in run.clients:
        assert "model" in client[mesh]["kernels"][0]
