"""Runs that a cluster starts: with exactly its variables, one launcher on each host or each process by itself."""

import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

import cluster_variables
import launched
import launched_clusters
import sweeps
from tools.fault_runs import watched
from tools.host_runs import network

SECRET = {"TFSHARD_SECRET": "0123456789abcdef" * 4}
# Two members fail in these runs, one after the other.
FAILING = ("raise", "die")


def hosts() -> tuple[str, str]:
    """Return two loopback addresses that no other run uses. SageMaker's runs all have the same port."""
    return tuple(f"127.{random.randrange(2, 250)}.{random.randrange(2, 250)}.{host}" for host in (1, 2))


def variables(system: str, hosts: tuple[str, str]) -> list[dict[str, str]]:
    """Return the variables of both members."""
    port, job = watched.free_port(), str(random.randrange(1, 1 << 30))
    found = [cluster_variables.SYSTEMS[system](index, hosts, port) for index in (0, 1)]
    # Runs on the same machine have jobs of their own.
    own = {"SLURM_JOB_ID": job, "PMIX_NAMESPACE": f"prterun-node-{job}@1"}
    return [{**each, **{name: value for name, value in own.items() if name in each}} for each in found]


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without variables of clusters."""
    prefixes = ("TFSHARD_", "SLURM_", "SM_", "OMPI_", "PMI", "TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_", "DTENSOR_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


# --- each process by itself -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A run: the exit code and the output of each member, and the seconds it took."""

    codes: list[int]
    said: list[str]
    seconds: float


@pytest.fixture(scope="module")
def runs() -> dict[str, Ended]:
    """Run all systems and failures, from one process that has imported TensorFlow."""
    wanted = [[system, "train", variables(system, hosts())] for system in cluster_variables.SYSTEMS]
    wanted += [["one machine", "train", variables("torchrun", ("127.0.0.1", "127.0.0.1"))]]
    wanted += [[f"secret, {mode}", mode, [{**each, **SECRET} for each in variables("Kubeflow TFJob", hosts())]]
               for mode in ("train", *FAILING)]  # fmt: skip
    environment = {**clean_environment(), "PYTHONHASHSEED": "0", "PYTHONPATH": f"{launched.ROOT}:{launched.HERE}"}
    done = subprocess.run(
        [sys.executable, str(launched.HERE / "launched_clusters.py"), json.dumps(wanted)],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in launched.said(done, "RUN ")]
    return {name: Ended(codes=codes, said=said, seconds=seconds) for name, codes, said, seconds in found}


@pytest.mark.parametrize("system", [*cluster_variables.SYSTEMS, "one machine", "secret, train"])
def test_processes_that_the_cluster_starts_train_as_one_device(runs, system):
    run = runs[system]
    assert run.codes == [0, 0], "\n".join(run.said)
    clients = [json.loads(re.search(r"FOUND (.*)", said)[1]) for said in run.said]
    expected = launched_clusters.plain()
    assert expected[0] - expected[1] > 0.1, "premise: the model learns"
    for number, client in enumerate(clients):
        assert (client["client"], client["clients"]) == (number, 2)
        assert client["kernels"] and all("batch" in kernel for kernel in client["kernels"])
        np.testing.assert_allclose(client["losses"], expected, rtol=1e-5)
        assert client["secret"] == "None", "child processes do not inherit the secret"


@pytest.mark.parametrize("system", ["Vertex AI", "secret, train"])
def test_only_a_run_without_a_secret_warns_and_names_the_stronger_way(runs, system):
    warned = ["warning: no secret was given" in said and "TFSHARD_SECRET" in said for said in runs[system].said]
    assert warned == [system == "Vertex AI", False]


def test_the_error_of_one_process_ends_the_others_with_its_text(runs):
    run = runs["secret, raise"]
    assert run.codes == [75, 1], "\n".join(run.said)
    assert "ValueError: the script's own error" in run.said[0]
    assert re.search("client 0 ends with the run: Client 1 failed.*\n.*the script's own error", run.said[0])


def test_a_process_that_dies_ends_the_others_with_its_number(runs):
    run = runs["secret, die"]
    assert run.codes == [75, 3], "\n".join(run.said)
    assert "Client 1 is gone after training step 2: its process ended without an error" in run.said[0]
    assert run.seconds < 30


# --- one launcher on each host ----------------------------------------------------------------------------------


def launchers(systems, addresses, wrap) -> dict[str, tuple[list[int], str]]:
    """Run two launchers of one client each for each system, without TensorFlow. Returns exit codes and the output."""
    done = {}
    for system in systems:
        pair = addresses()
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        [*wrap(index), *watched.BARE_LAUNCH, "--num_processes=1", "--startup_timeout=30",
                         watched.BARE_CLIENT, "--steps=2"],
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                        env={**clean_environment(), **each},
                    )
                )
                for index, each in enumerate(variables(system, pair))
            ]  # fmt: skip
            said = [process.communicate(timeout=60)[0] for process in processes]
        done[system] = [process.returncode for process in processes], "\n".join(said)
    return done


@pytest.mark.parametrize("system", cluster_variables.SYSTEMS)
def test_launchers_that_the_cluster_starts_run_their_clients_together(system):
    codes, said = launchers([system], hosts, lambda index: ())[system]
    assert codes == [0, 0], said
    for client in (0, 1):
        assert re.search(rf"\[client {client}\] step 2 loss \S+ clients 2", said), said
    assert said.count("warning: no secret was given") == 1


def test_launchers_in_network_namespaces_join_by_the_variables_of_the_cluster():
    if (why := network.missing()) is not None:
        pytest.skip(f"no network of hosts: {why}")
    systems = sweeps.taken("clusters in namespaces", cluster_variables.SYSTEMS, always=["Kubeflow TFJob", "torchrun"])
    with network.connected(2, "1gbit") as made:
        done = launchers(systems, lambda: made.addresses, lambda index: made.on(index))
        assert made.traffic(0).sent > 1000, "premise: they talked over the link"
    for system, (codes, said) in done.items():
        assert codes == [0, 0], (system, said)
        assert re.search(r"\[client 1\] step 2 loss \S+ clients 2", said), (system, said)


def test_two_members_with_one_number_end_the_run_before_a_client_starts():
    first, second = variables("Kubeflow TFJob", hosts())
    first["TF_CONFIG"] = first["TF_CONFIG"].replace("]}", ', "127.0.0.9:1"]}')
    second["TF_CONFIG"] = second["TF_CONFIG"].replace("]}", ', "127.0.0.9:1"]}')
    command = [*watched.BARE_LAUNCH, "--num_processes=1", "--startup_timeout=30", watched.BARE_CLIENT, "--steps=2"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**clean_environment(), **each},
                )
            )
            for each in (first, second, second)
        ]  # fmt: skip
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode for process in processes), said
    assert "Two processes call themselves member 1" in said[0] and "client" not in said[0].partition("Two")[0]


def test_a_member_without_the_secret_of_the_others_is_refused():
    first, second = variables("Kubeflow TFJob", hosts())
    command = [*watched.BARE_LAUNCH, "--num_processes=1", "--startup_timeout=5", watched.BARE_CLIENT, "--steps=2"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**clean_environment(), **each},
                )
            )
            for each in ({**first, **SECRET}, second)
        ]  # fmt: skip
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode for process in processes), said
    assert "does not hand out a secret" in said[1] and "TFSHARD_SECRET, set it on all members" in said[1]
    assert "It has no secret, and this run has one" in said[0]
