"""Pipelines over the clients of a launched run match one device (launched_pipelines.py)."""

import functools
import json
import pathlib

import keras
import numpy as np
import pytest

import launched
import launched_pipelines
import sweeps
import tfshard
from launched_pipelines import MESHES

TOLERANCE = 2e-5


@functools.cache
def plain() -> tuple[dict, keras.Model]:
    model = launched_pipelines.compiled(None)
    return launched_pipelines.found_of(model), model


def launch(directory: pathlib.Path, num_clients: int, names: list[str]) -> list[dict]:
    done = launched.launch(
        f"--num_processes={num_clients}", f"--devices_per_process={4 // num_clients}",
        str(launched.HERE / "launched_pipelines.py"), str(directory), *names,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    clients: list[dict] = [{} for _ in range(num_clients)]
    for file in directory.glob("found *.json"):
        _, client, name = file.stem.split(" ", 2)
        clients[int(client)][name] = json.loads(file.read_text())
    return clients


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[list[dict], pathlib.Path]:
    """Two clients of two devices."""
    directory = tmp_path_factory.mktemp("two")
    return launch(directory, 2, sweeps.taken("meshes of launched pipelines", MESHES, sample=2)), directory


def assert_plain(clients: list[dict], name: str) -> None:
    expected, _ = plain()
    moved = np.subtract(
        expected["weights"]["table/embeddings"], launched_pipelines.build().get_layer("table").embeddings
    )
    assert np.max(np.abs(moved)) > 100 * TOLERANCE, "premise"
    for client in clients:
        found = client[name]
        for kind in ("fit", "evaluate"):
            for key, value in expected[kind].items():
                np.testing.assert_allclose(found[kind][key], value, rtol=TOLERANCE, err_msg=f"{kind} {key}")
        np.testing.assert_allclose(found["predict"], expected["predict"], rtol=1e-3, atol=TOLERANCE)
        for path, value in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=path)
        assert found["in flight"] == clients[0][name]["in flight"]
        assert 0 < found["bubble"] < 1
        assert found["stored"] == clients[0][name]["stored"], "of all places, told by every client"


def assert_goes_to_other_meshes(directory: pathlib.Path, name: str) -> None:
    """Restore the clients' checkpoint in this process: on a flat mesh, and in plain Keras."""
    _, model = plain()
    flat = tfshard.as_distributed(launched_pipelines.build())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    flat.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.5), "mse", strategy=strategy)
    tfshard.CheckpointManager(directory / name).restore(flat)
    for mine, expected in zip(flat.variables, model.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
    for mine, expected in zip(flat.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=1e-4, atol=TOLERANCE)
    loaded = keras.models.load_model(directory / f"{name}.keras")
    for mine, expected in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@sweeps.table("meshes of launched pipelines", "name", MESHES, sample=2)
def test_a_pipeline_over_two_clients_has_the_numbers_of_one_device(name, two):
    clients, directory = two
    # For each storage, the number of devices of each pipeline rank that a client has.
    devices = [client[name]["devices"] for client in clients]
    expected = {
        "a client each": [[2, 0], [0, 2]],
        "across clients": [[1, 1], [1, 1]],
        "two in each client": [[1, 1, 0, 0], [0, 0, 1, 1]],
        "interleaved": [[2, 0], [0, 2]],
    }
    assert devices == expected[name], "premise"
    assert_plain(clients, name)
    assert_goes_to_other_meshes(directory, name)


@pytest.mark.slow
def test_what_clients_send_each_other_has_the_same_bytes(two):
    clients, _ = two
    for client in clients:
        assert len(client["messages"]) == 2 * len(launched_pipelines.DTYPES) + 1
        assert {name for name, same in client["messages"].items() if not same} == set()


@pytest.mark.slow
def test_telemetry_is_told_by_every_client(two):
    clients, _ = two
    told = clients[0]["telemetry"]
    assert told["samples_per_second"] > 0 and told["device_bytes"] > 0 and told["collective_seconds"] >= 0, told
    assert clients[0]["telemetry"] == clients[1]["telemetry"]


@pytest.mark.slow
def test_clients_number_collectives_alike(two):
    clients, _ = two
    before, behind = clients[0]["numbers"]
    assert before[0] == before[1] + 5, "premise"
    assert behind[0] == behind[1]


@pytest.mark.slow
def test_a_model_on_a_mesh_of_all_clients_trains_behind_pipelines(two):
    """The clients compiled different functions before."""
    clients, _ = two
    model = launched_pipelines.compiled(None)
    expected = float(model.train_on_batch(launched_pipelines.X[:16], launched_pipelines.Y[:16])[0])
    for client in clients:
        np.testing.assert_allclose(client["flat"], expected, rtol=TOLERANCE)


@pytest.mark.slow
def test_places_of_several_clients_each(tmp_path):
    """Four clients of one device: two clients for each of the two pipeline ranks."""
    clients = launch(tmp_path, 4, ["a client each"])
    assert [client["a client each"]["devices"] for client in clients] == [[1, 0], [1, 0], [0, 1], [0, 1]], "premise"
    assert_plain(clients, "a client each")
    assert_goes_to_other_meshes(tmp_path, "a client each")
