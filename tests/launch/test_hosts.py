"""Hosts with a network between them: parity with one device, planned bytes, and pulled cables."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import launched
import launched_hosts
import launched_tables
import sweeps
import tfshard
from tfshard.launch.options import HOST_SECONDS
from tfshard.layouts.layout_map import VariableSpec
from tfshard.planning import Links
from tools.fault_runs import watched
from tools.fault_runs.table import DEATH_LIMIT
from tools.host_runs import network

# Tolerance of losses.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def machine() -> None:
    """Skip tests on machines that cannot create such a network."""
    if (why := network.missing()) is not None:
        pytest.skip(f"no network of hosts: {why}")


def namespaces(pid: int) -> list[str]:
    """Return the network namespaces of a process's runs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tfshard-{pid}-")]


@pytest.fixture(scope="module")
def run(machine) -> subprocess.CompletedProcess:
    """Run launched_hosts.py on two hosts of two devices."""
    done = launched.run("-m", "tools.hosts", "--rate=1gbit", str(launched.HERE / "launched_hosts.py"))
    assert done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="module")
def found(run) -> list[dict]:
    """Return the clients' results by way, without the values."""
    clients = launched.found(run, 2)
    assert [list(client) for client in clients] == [["values", *launched_hosts.WAYS]] * 2
    return [{name: client[name] for name in launched_hosts.WAYS} for client in clients]


@pytest.mark.slow
def test_hosts_train_to_the_numbers_of_one_device(found):
    expected = launched_hosts.plain()
    assert expected[0] - expected[-1] > 100 * TOLERANCE * expected[0]
    for client in found:
        for name, way in client.items():
            np.testing.assert_allclose(way["losses"], expected, rtol=TOLERANCE, err_msg=name)


@pytest.mark.slow
def test_hosts_send_what_is_planned(found):
    assert found[0]["stage 0"]["kinds"] == ["all-reduce"]
    assert found[0]["stage 3, alone"]["kinds"] == ["all-gather", "all-reduce", "reduce-scatter"]
    for client in found:
        for name, way in client.items():
            assert 1 <= way["sent"] / way["planned"] < 1.1, (name, way)


@pytest.mark.slow
def test_values_are_sent_once(run):
    """By collectives, and to the host from a mesh with two axes, one of them within a client."""
    for client in launched.found(run, 2):
        assert len(client["values"]) == 5
        for name, ratio in client["values"].items():
            assert 1 <= ratio < 1.1, (name, ratio)


@pytest.mark.slow
def test_what_all_interfaces_sent_and_received_is_printed(run, found):
    line = r"hosts: host \d \(10\.77\.0\.\d\) sent (\S+) bytes in \S+ packets, and received (\S+) bytes"
    counted = [[int(text.replace(",", "")) for text in pair] for pair in re.findall(line, run.stdout)]
    (sent, received), (sent_back, received_back) = counted
    for number, other, client in ((sent, received_back, found[0]), (sent_back, received, found[1])):
        assert number > sum(launched_hosts.STEPS * way["planned"] for way in client.values())
        assert abs(number - other) < 0.01 * number


@pytest.mark.slow
def test_links_are_told_apart_and_replicas_are_proposed_for_them(machine, tmp_path):
    file = tmp_path / "links.json"
    done = launched.run(
        "-m", "tools.hosts", "--rate=100mbit", "--launch_flags=--module", "tfshard", "profile-network",
        "--sizes=1024,262144", "--repeats=2", f"--save={file}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    links = Links.load(file)
    assert links.devices_per_host == 2
    for kind in ("all-gather", "all-reduce"):
        for link in (links.between[kind], links.across[kind]):
            # 100 Mbit/s are 12.5 MB/s, shared by the two devices of a host. The token bucket of tc allows a burst.
            assert 8e6 < link.bandwidth < 20e6, (kind, link)
        assert links.inside[kind].bandwidth > 5 * links.between[kind].bandwidth
    kernels = [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(8)]
    advice = tfshard.advise(kernels, 4, 1 << 30, 32, links=file)
    assert advice.recommended.mesh_shape == {"replica": 2, "batch": 2}, str(advice)


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_all_launchers_with_the_cause_and_one_that_is_loose_does_not(machine):
    with network.connected(2, "1gbit") as hosts:
        flags = [f"--hosts={','.join(hosts.addresses)}", "--num_processes=1"]
        environment = {"TFSHARD_SECRET": os.urandom(32).hex()}
        first, second = [
            hosts.on(host, *watched.BARE_LAUNCH, *flags, f"--host_index={host}", watched.BARE_CLIENT) for host in (0, 1)
        ]
        with watched.running(*first, launch=(), environment=environment, num_clients=2) as run:
            run.launch(*second, environment=environment)
            run.wait_for("CLIENT step 5 ")
            hosts.set_link(1, up=False)
            time.sleep(1)
            while run.take(0.0) is not None:
                pass
            # Clients agree in each step, so no client continues alone.
            done = len(run.steps(0))
            assert run.take(0.5) is None
            hosts.set_link(1, up=True)
            run.wait_for(f"CLIENT step {done + 5} ", 30)
            assert "tfshard launch:" not in run.said
            hosts.set_link(1, up=False)
            run.wait(HOST_SECONDS + DEATH_LIMIT)
            run.check_nothing_is_left(0)
    assert [launcher.returncode for launcher in run.launchers] == [1, 1], run.text
    assert "The launcher of host 1 (10.77.0.2), with clients (1,), sent no heartbeat for 8 s." in run.said
    assert "The launcher of host 0 sent no heartbeat for 8 s: this launcher stops all clients of its host." in run.said


CABLES = {
    "hybrid": ["--replicas=2", "--compression=none"],
    "compressed": ["--replicas=2", "--compression=int8"],
    "pipeline": ["--pipeline=2"],
}


def pulled(*program, after: str) -> watched.Run:
    """Run two hosts of two devices, and pull the cable after a line. Checks that both ended with the cause."""
    with network.connected(2, "1gbit") as hosts:
        flags = [f"--hosts={','.join(hosts.addresses)}", "--num_processes=1", "--devices_per_process=2"]
        environment = {"TFSHARD_SECRET": os.urandom(32).hex(), "PYTHONPATH": str(launched.ROOT)}
        first, second = [
            hosts.on(host, *watched.BARE_LAUNCH, *flags, f"--host_index={host}", *program) for host in (0, 1)
        ]
        with watched.running(*first, launch=(), environment=environment, num_clients=2) as run:
            run.launch(*second, environment=environment)
            run.wait_for(after)
            hosts.set_link(1, up=False)
            run.wait(HOST_SECONDS + DEATH_LIMIT)
            run.check_nothing_is_left(0)
    assert [launcher.returncode for launcher in run.launchers] == [1, 1], run.text
    assert "The launcher of host 1 (10.77.0.2), with clients (1,), sent no heartbeat for 8 s." in run.said
    assert "The launcher of host 0 sent no heartbeat for 8 s: this launcher stops all clients of its host." in run.said
    return run


@pytest.mark.slow
@sweeps.table("cables", "feature", CABLES, sample=1)
def test_a_run_whose_cable_is_pulled_ends_with_the_cause_and_goes_on_on_a_flat_mesh(machine, feature, tmp_path):
    """The remaining host continues from the last checkpoint, with exact sums and the losses of one device."""
    steps = 12
    program = [f"--steps={steps}", f"--state={tmp_path}", "--every_steps=2"]
    run = pulled(watched.CLIENT, *program, "--step_seconds=1", *CABLES[feature], after="CLIENT step 5 ")
    found = run.steps(0)
    done = launched.run(
        *watched.BARE_LAUNCH[1:], "--num_processes=1", "--devices_per_process=2", watched.CLIENT, *program
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (resumed,) = launched.said(done, "resumes after step ")
    assert 4 <= int(resumed) <= found[-1][0] < steps, "premise"
    losses = {step: loss for step, loss, _ in found}
    for line in launched.said(done, "[client 0] step "):
        step, _, loss, *_ = line.split()
        losses[int(step)] = loss
    expected = launched.plain_losses(steps)
    assert sorted(losses) == list(range(1, steps + 1))
    tolerance = 1e-3 if feature == "compressed" else 1e-4
    for step, loss in losses.items():
        np.testing.assert_allclose(float(loss), expected[step - 1], rtol=tolerance, err_msg=f"step {step}")


@pytest.mark.slow
def test_a_run_with_a_table_whose_cable_is_pulled_goes_on_with_the_devices_of_a_host(machine, tmp_path):
    program = [str(launched.HERE / "launched_tables.py"), str(tmp_path), "slow"]
    pulled(*program, "4", after="CLIENT step 3 ")
    done = launched.run(*watched.BARE_LAUNCH[1:], "--num_processes=1", "--devices_per_process=2", *program, "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1 done" not in done.stdout, "premise: it went on from a checkpoint"
    plain = launched_tables.compiled(None)
    plain.fit(launched_tables.X, launched_tables.Y, batch_size=8, shuffle=False, verbose=0)
    (client,) = launched.found(done, 1)
    for variable in plain.variables:
        np.testing.assert_allclose(client["weights"][variable.path], variable.numpy(), rtol=1e-5, atol=1e-6)


def test_nothing_is_left_of_a_run_that_is_ended(machine):
    with subprocess.Popen(
        [sys.executable, "-m", "tools.hosts", str(launched.HERE / "launched_hosts.py")],
        cwd=launched.ROOT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert "10.77.0.1, 10.77.0.2, with links of 10gbit" in process.stdout.readline()
        assert len(namespaces(process.pid)) == 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert namespaces(process.pid) == []


def test_what_a_killed_run_left_is_cleaned_and_living_runs_stay(machine):
    program = (
        "import time; from tools.host_runs import network; n = network.Network(2, '1gbit'); print(1); time.sleep(99)"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-u", "-c", program], cwd=launched.ROOT, stdout=subprocess.PIPE, text=True
        ) as process,
        network.connected(1, "1gbit") as living,
    ):
        assert process.stdout.readline() == "1\n"
        process.kill()
        process.wait()
        left = namespaces(process.pid)
        assert len(left) == 3
        assert set(left) <= set(network.clean())
        assert namespaces(process.pid) == []
        assert len(namespaces(os.getpid())) == 2
        assert living.traffic(0).sent == 0


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tools.hosts", *arguments],
        cwd=launched.ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_where_there_cannot_be_such_a_network_it_is_said_in_a_line_with_an_exit_code_of_its_own():
    done = tool("train.py", PATH="")
    assert done.returncode == 77
    assert re.fullmatch(r"tools/hosts: cannot make a network here: .*(root|'ip' is not installed).*\n", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("down", ["2@1", "1", "1@", "x@1", "1@2+"])
def test_a_link_that_cannot_go_down_is_refused(down):
    done = tool(f"--down={down}", "train.py")
    assert done.returncode == 1
    assert f"Write HOST@SECONDS, HOST from 0 to 1. Received: down={down}" in done.stdout + done.stderr
