"""Runs that a cluster starts: with exactly its variables, one launcher on each host or each process by itself."""

import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import cluster_variables
import launched
import launched_clusters
import sweeps
from tools.fault_runs import watched
from tools.host_runs import network

SECRET = {"TFSHARD_SECRET": "0123456789abcdef" * 4}
MEMBER = str(launched.ROOT / "tools" / "fault_runs" / "bare_member.py")


def hosts() -> tuple[str, str]:
    """Return two loopback addresses that no other run uses. SageMaker's runs all have the same port."""
    network = f"127.{random.randrange(2, 250)}.{random.randrange(2, 250)}"
    return f"{network}.1", f"{network}.2"


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
    """A run: the exit code and the output of each member."""

    codes: list[int]
    said: list[str]


@pytest.fixture(scope="module")
def runs() -> dict[str, Ended]:
    """Train with the variables of all systems, from one process that has imported TensorFlow."""
    # torchrun starts both processes of a machine. The Job of docs/clusters.md has a secret.
    places = {"torchrun": ("127.0.0.1", "127.0.0.1")}
    secrets = {"Kubernetes": SECRET}
    wanted = [
        [system, [{**each, **secrets.get(system, {})} for each in variables(system, places.get(system, hosts()))]]
        for system in cluster_variables.SYSTEMS
    ]
    environment = {**clean_environment(), "PYTHONHASHSEED": "0", "PYTHONPATH": f"{launched.ROOT}:{launched.HERE}"}
    done = subprocess.run(
        [sys.executable, str(launched.HERE / "launched_clusters.py"), json.dumps(wanted)],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in launched.said(done, "RUN ")]
    return {name: Ended(codes=codes, said=said) for name, codes, said in found}


@pytest.mark.parametrize("system", cluster_variables.SYSTEMS)
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


@pytest.mark.parametrize("system", ["Vertex AI", "Kubernetes"])
def test_only_a_run_without_a_secret_warns_and_names_the_stronger_way(runs, system):
    warned = ["warning: no secret was given" in said and "TFSHARD_SECRET" in said for said in runs[system].said]
    assert warned == [system == "Vertex AI", False]


# By fault of a member between steps: the exit codes of both members, and what the other one says.
FAULTS = {
    "raise": ([75, 1], "client 0 ends with the run: Client 1 failed.*RuntimeError: the disk is full"),
    "raise, on member 0": ([1, 75], "client 1 ends with the run: Client 0 failed.*RuntimeError: the disk is full"),
    "kill": ([75, -9], "client 0 ends with the run: Client 1 is gone after .*its process ended without an error"),
    "kill, on member 0": ([-9, 75], "client 1 ends with the run: Client 0 is gone after "),
    "exit": ([1, 0], r"ClientError: Clients \[1\] did not reach the gradients in time"),
}
SHORT = {"TFSHARD_STEP_TIMEOUT": "2", "TFSHARD_FIRST_STEP_TIMEOUT": "2"}


def members(environments, *arguments, wrap=lambda index: ()) -> list[subprocess.Popen]:
    """Start members without TensorFlow."""
    return [
        subprocess.Popen(
            [*wrap(index), sys.executable, MEMBER, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**clean_environment(), **each},
        )
        for index, each in enumerate(environments)
    ]  # fmt: skip


@sweeps.table("faults of members", "fault", FAULTS, always=["kill", "kill, on member 0", "raise"])
def test_a_member_that_fails_ends_the_others_with_the_cause(fault):
    codes, message = FAULTS[fault]
    what, _, first = fault.partition(", ")
    environments = [{**each, **SECRET, **SHORT} for each in variables("torchrun", hosts())]
    begin = time.monotonic()
    started = members(environments, "--steps=1000", f"--fault={what}", f"--client={0 if first else 1}")
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == codes, said
    assert re.search(message, said[1 if first else 0], re.DOTALL), said
    assert time.monotonic() - begin < 15


def test_a_process_leaves_the_run_with_shutdown_and_goes_on():
    started = members(variables("Ray Train", hosts()), "--steps=2", "--shutdown")
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "[client 0] goes on" in said[0] and "[client 1] goes on" in said[1]
    assert not any("is gone" in text for text in said)


@pytest.mark.slow
def test_members_whose_cable_is_pulled_end():
    if (why := network.missing()) is not None:
        pytest.skip(f"no network of hosts: {why}")
    with network.connected(2, "1gbit") as made:
        environments = variables("torchrun", made.addresses)
        started = members(environments, "--steps=100000", wrap=lambda index: made.on(index))
        time.sleep(5)
        assert [process.poll() for process in started] == [None, None], "premise: they run"
        made.set_link(1, up=False)
        begin = time.monotonic()
        said = [process.communicate(timeout=90)[0] for process in started]
        assert 10 < time.monotonic() - begin < 45
    assert [process.returncode for process in started] == [75, 75], said
    assert "[client 0] step 2 of 2 clients" in said[0], "premise: they had trained"


# --- one launcher on each host ----------------------------------------------------------------------------------


BARE_CLIENT = (watched.BARE_CLIENT, "--steps=2")
CLIENT = ("-c", "import json, launched_clusters; print('FOUND', json.dumps(launched_clusters.train()))")


def launchers(systems, addresses, wrap, client=BARE_CLIENT) -> dict[str, tuple[list[int], str]]:
    """Run two launchers of one client each for each system. Returns exit codes and the output."""
    done = {}
    for system in systems:
        pair = addresses()
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        [*wrap(index), *watched.BARE_LAUNCH, "--num_processes=1", "--startup_timeout=60", *client],
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                        env={**clean_environment(), "PYTHONPATH": f"{launched.ROOT}:{launched.HERE}", **each},
                    )
                )
                for index, each in enumerate(variables(system, pair))
            ]  # fmt: skip
            said = [process.communicate(timeout=120)[0] for process in processes]
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


@pytest.mark.slow
@pytest.mark.parametrize("system", cluster_variables.SYSTEMS)
def test_launchers_in_network_namespaces_train_as_one_device(system):
    if (why := network.missing()) is not None:
        pytest.skip(f"no network of hosts: {why}")
    with network.connected(2, "1gbit") as made:
        codes, said = launchers([system], lambda: made.addresses, lambda index: made.on(index), CLIENT)[system]
    assert codes == [0, 0], said
    for client in (0, 1):
        found = json.loads(re.search(rf"\[client {client}\] FOUND (.*)", said)[1])
        assert (found["client"], found["clients"]) == (client, 2)
        np.testing.assert_allclose(found["losses"], launched_clusters.plain(), rtol=1e-5)


def said_by_refused_launchers(startup_timeout: int, *environments: dict[str, str]) -> list[str]:
    """Start a launcher in each environment, check that all fail, and return their output."""
    command = [*watched.BARE_LAUNCH, "--num_processes=1", f"--startup_timeout={startup_timeout}", watched.BARE_CLIENT,
               "--steps=2"]  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**clean_environment(), **each},
                )
            )
            for each in environments
        ]  # fmt: skip
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode for process in processes), said
    return said


def test_two_members_with_one_number_end_the_run_before_a_client_starts():
    first, second = variables("Kubeflow TFJob", hosts())
    first["TF_CONFIG"] = first["TF_CONFIG"].replace("]}", ', "127.0.0.9:1"]}')
    second["TF_CONFIG"] = second["TF_CONFIG"].replace("]}", ', "127.0.0.9:1"]}')
    said = said_by_refused_launchers(30, first, second, second)
    assert "Two processes call themselves member 1" in said[0] and "client" not in said[0].partition("Two")[0]


def test_a_member_without_the_secret_of_the_others_is_refused():
    first, second = variables("Kubeflow TFJob", hosts())
    said = said_by_refused_launchers(5, {**first, **SECRET}, second)
    assert "does not hand out a secret" in said[1] and "TFSHARD_SECRET, set it on all members" in said[1]
    assert "It has no secret, and this run has one" in said[0]
