"""Pipelines over the clients of a launched run match one device (launched_pipelines.py)."""

import functools
import json
import pathlib

import keras
import numpy as np
import pytest

import launched
import launched_messages
import launched_pipelines
import streams
import sweeps
import tfshard
from launched_pipelines import MESHES

TOLERANCE = 2e-5


@functools.cache
def plain() -> tuple[dict, keras.Model]:
    model = launched_pipelines.compiled(None)
    return launched_pipelines.found_of(model), model


def launch(
    directory: pathlib.Path, num_clients: int, names: list[str], script: str = "launched_pipelines.py"
) -> list[dict]:
    done = launched.launch(
        f"--num_processes={num_clients}", f"--devices_per_process={4 // num_clients}",
        str(launched.HERE / script), str(directory), *names,
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
    assert_numbers([client[name] for client in clients])
    for client in clients:
        found = client[name]
        assert found["in flight"] == clients[0][name]["in flight"]
        assert 0 < found["bubble"] < 1
        assert found["stored"] == clients[0][name]["stored"], "of all places, told by every client"


def assert_numbers(clients: list[dict]) -> None:
    expected, _ = plain()
    moved = np.subtract(
        expected["weights"]["table/embeddings"], launched_pipelines.build().get_layer("table").embeddings
    )
    assert np.max(np.abs(moved)) > 100 * TOLERANCE, "premise"
    for found in clients:
        for kind in ("fit", "evaluate"):
            for key, value in expected[kind].items():
                np.testing.assert_allclose(found[kind][key], value, rtol=TOLERANCE, err_msg=f"{kind} {key}")
        np.testing.assert_allclose(found["predict"], expected["predict"], rtol=1e-3, atol=TOLERANCE)
        for path, value in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=path)


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


@pytest.fixture(scope="module")
def through_hosts(tmp_path_factory) -> dict[str, list[dict]]:
    """The results of each client whose messages take the way of GPUs, by the name of the run."""
    names = sweeps.taken("messages through hosts", launched_messages.WAYS, always=["1f1b"])
    found = {}
    for count in (2, 4):
        of_count = [name for name in names if launched_messages.WAYS[name][-1] == count]
        if of_count:
            clients = launch(tmp_path_factory.mktemp("hosts"), count, of_count, script="launched_messages.py")
            found |= {name: [client[name] for client in clients] for name in of_count}
    return found


@pytest.mark.slow
@sweeps.table("messages through hosts", "name", launched_messages.WAYS, always=["1f1b"])
def test_a_pipeline_with_messages_through_hosts_has_the_numbers_of_one_device(name, through_hosts):
    for rank, client in enumerate(through_hosts[name]):
        assert client["senders"] == [f"/job:worker/task:{rank}/device:CPU:0"], "premise"
        assert client["collective_nccl"], "premise: TensorFlow uses NCCL, except on CPU devices"
    assert_numbers(through_hosts[name])


@pytest.mark.slow
@sweeps.table("messages through hosts", "name", launched_messages.WAYS, always=["1f1b"])
def test_messages_through_hosts_cannot_deadlock_in_any_order_of_the_threads(name, through_hosts):
    devices = through_hosts[name][0]["devices"]
    steps = list(zip(*(client["steps"] for client in through_hosts[name]), strict=True))
    assert len(steps) == 8, "premise: three steps of fit, three of evaluate, two of predict"
    stuck = 0
    for step in steps:
        kinds = {kind for events in step for _, kind, *_ in events}
        assert kinds >= {"begin", "send", "receive", "collective"}, "premise"
        between_devices = streams.threads_of(step, devices, on_streams=True)
        stuck += any(not state.has_ended() for state in streams.orders(between_devices))
        through = streams.threads_of(step, devices, on_streams=False)
        assert all(state.has_ended() for state in streams.orders(through))
        assert all(streams.drawn_order(through, seed).has_ended() for seed in range(20))
    assert stuck, "premise: messages between devices can deadlock"
