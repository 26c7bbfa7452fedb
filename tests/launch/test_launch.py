"""The launcher's options, hosts and agreements, and an example script. The other files of this folder test more."""

import re

import numpy as np
import pytest

import launched
import tfshard
from tfshard.clusters import run_secret
from tfshard.clusters import slurm as slurm_variables
from tfshard.devices import startup
from tfshard.launch import agreements, hosts
from tfshard.launch.options import Launch

LM = [
    "--layers=1", "--width=16", "--heads=2", "--sequence_length=16", "--batch_size=8", "--steps=4", "--eval_every=2",
    "--eval_bytes=256", "--sample_bytes=2", f"--text_path={launched.ROOT / 'tfshard'}",
]  # fmt: skip
FIGURES = r"(?:loss|bits/byte|bits per byte:) +(\d+\.\d+)"


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "mesh"), [(2, "model:2,batch:2"), (2, "batch:4"), (4, "model:2,batch:2")])
def test_the_language_model_example_trains_launched_as_alone(clients, mesh):
    example = str(launched.ROOT / "examples" / "train_lm.py")
    one = launched.run(example, *LM)
    assert one.returncode == 0, one.stderr
    expected = [float(figure) for figure in re.findall(FIGURES, one.stdout)]
    assert len(expected) == 5
    done = launched.launch(f"--num_processes={clients}", example, f"--mesh={mesh}", *LM)
    assert done.returncode == 0, done.stderr
    for client in range(clients):
        said = "\n".join(launched.said(done, f"[client {client}] "))
        np.testing.assert_allclose([float(figure) for figure in re.findall(FIGURES, said)], expected, atol=2e-4)


# --- launched scripts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes must be at least 1"),
        ({"devices_per_process": 0}, "devices_per_process must be at least 1"),
        ({"step_timeout": 0}, "step_timeout must be positive"),
        ({"max_restarts": -1}, "max_restarts must not be negative"),
        ({"elastic_min": 3}, "elastic_min must be between 1 and the number of clients, 2"),
        ({"host_index": 1}, "host_index must be the index of one of the 1 hosts"),
        ({"hosts": ("a", "b")}, "need a shared secret of at least 32 characters"),
        ({"port": 1 << 16}, "port must be a port"),
        ({"allocator": "jemalloc"}, "Unknown allocator. Allocators: .*system.*tensorflow"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(tfshard.errors.LaunchError, match=message):
        Launch(**{"command": ("python",), "num_processes": 2, **options})


def test_slurm_needs_one_launcher_on_each_node():
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
    with pytest.raises(tfshard.errors.LaunchError, match="srun --ntasks-per-node=1"):
        hosts.find_hosts(None, None, slurm)
    assert hosts.find_hosts(None, None, {"SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-2]"}) == hosts.Hosts()
    with pytest.raises(tfshard.errors.LaunchError, match="nodes cannot be parsed"):
        slurm_variables.expand_nodes("n[1-")
    with pytest.raises(tfshard.errors.LaunchError, match="does not know which of the hosts this is"):
        hosts.find_hosts(["a", "b"], None, {})


def test_the_file_of_the_secret_is_private(tmp_path):
    file = tmp_path / "secret"
    file.write_text("a" * 64 + "\n")
    file.chmod(0o644)
    with pytest.raises(tfshard.errors.LaunchError, match="Other users can read the secret file"):
        run_secret.read_secret(str(file))
    file.chmod(0o600)
    assert run_secret.read_secret(str(file)) == "a" * 64
    assert run_secret.read_secret(None, {"TFSHARD_SECRET": "b"}) == "b"


def test_an_agreement_that_is_late_is_told_to_all():
    made = agreements.Agreements(3)
    message = {"number": 0, "what": "a barrier", "value": {}, "timeout": 5.0}
    assert made.add(0, message, now=0.0) == [] == made.add(2, message, now=1.0)
    assert made.expired(4.9) == []
    replies = made.expired(5.0)
    assert [client for client, _ in replies] == [0, 2]
    assert replies[0][1]["fault"] == "Clients [1] did not reach a barrier in time."
    assert made.add(1, message, now=9.0) == [(1, replies[0][1])]
    other = {"number": 1, "what": "the mesh", "value": {}, "timeout": 5.0}
    made.add(0, {**message, "number": 1}, now=10.0)
    assert (
        "Client 1 has reached the mesh, but other clients have reached a barrier"
        in made.add(1, other, now=10.0)[0][1]["fault"]
    )


def test_clients_without_a_launcher_are_refused(monkeypatch):
    monkeypatch.setattr(startup, "_runtime", None)
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:1,localhost:2")
    with pytest.raises(tfshard.errors.InitializationError, match="was not started by 'tfshard launch'"):
        tfshard.initialize()
