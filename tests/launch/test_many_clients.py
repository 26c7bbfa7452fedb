"""Eleven and more clients match plain Keras on one device (launched_many.py)."""

import functools
import json
import pathlib

import numpy as np
import pytest

import launched
import launched_many
import sweeps
import tfshard
from launched_many import COMPRESSED, PLAIN, WAYS, Way

TOLERANCE = 2e-5


def launch(directory: pathlib.Path, num_clients: int, names: list[str]) -> list[dict]:
    """Launch a run, and return the results of each client."""
    done = launched.launch(
        f"--num_processes={num_clients}", "--devices_per_process=1", "--registration_timeout=300",
        str(launched.HERE / "launched_many.py"), str(directory), *names,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads((directory / f"found {client}.json").read_text()) for client in range(num_clients)]


@functools.cache
def plain() -> dict:
    return launched_many.train(PLAIN)


def alone(num_devices: int, name: str) -> dict:
    """Return the results of one process."""
    done = launched.run(str(launched.HERE / "launched_many.py"), "alone", str(num_devices), name)
    assert done.returncode == 0, done.stderr
    return json.loads(launched.said(done, "FOUND ")[0])


def assert_equal(found: dict, expected: dict) -> None:
    for kind in ("losses", "predict"):
        if kind in found:
            np.testing.assert_allclose(found[kind], expected[kind], rtol=5 * TOLERANCE, atol=TOLERANCE, err_msg=kind)
    for kind in {"weights", "restored"} & found.keys():
        assert found[kind].keys() == expected["weights"].keys()
        for path, value in expected["weights"].items():
            np.testing.assert_allclose(found[kind][path], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=path)


def assert_right(clients: list[dict], directory: pathlib.Path, names: list[str]) -> None:
    count, start = len(clients), launched_many.build()
    for weight in start.trainable_variables:
        far = np.max(np.abs(np.subtract(plain()["weights"][weight.path], weight.numpy())))
        assert far > 20 * TOLERANCE, f"premise: {weight.path} has moved"
    for rank, client in enumerate(clients):
        assert client["gathered"] == {
            "all_gather": list(range(count)), "reduce_scatter": [10 * count * rank], "broadcast": [10],
        }  # fmt: skip
    for name in names:
        expected = alone(count, name) if name == COMPRESSED else plain()
        for client in clients:
            # A replica of one device shares nothing with others.
            assert client[name]["sharded"] > 0 or WAYS[count][name].axes == {"replica": 11, "batch": 1}, "premise"
            assert_equal(client[name], expected)
    restored = launched_many.compiled(Way({"batch": 4}))
    tfshard.CheckpointManager(directory / "checkpoints").restore(restored)
    for weight in restored.trainable_variables:
        np.testing.assert_allclose(
            weight.numpy(), plain()["weights"][weight.path], rtol=TOLERANCE, atol=TOLERANCE, err_msg=weight.path
        )


@pytest.mark.slow
def test_eleven_clients_have_the_numbers_of_one_device(tmp_path):
    names = sweeps.taken("ways of eleven clients", WAYS[11], always=["flat", "model"])
    assert_right(launch(tmp_path, 11, names), tmp_path, names)


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [12, 16])
def test_more_clients_have_the_numbers_of_one_device(num_clients, tmp_path):
    names = list(WAYS[num_clients])
    assert_right(launch(tmp_path, num_clients, names), tmp_path, names)
