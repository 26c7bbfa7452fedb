"""Every fault of a launched run ends all processes with its cause, or the run recovers (tools/faults.py)."""

import concurrent.futures
import os
import pathlib
import re
import signal
import socket

import keras
import numpy as np
import pytest

import launched
import sweeps
import tfshard
from tfshard.launch.options import HOST_SECONDS
from tfshard.layouts import variable_layout
from tools import faults
from tools.fault_runs import model, watched
from tools.fault_runs.table import DEATH_LIMIT

FAULTS = faults.faults(2)
# Each mostly waits.
AT_ONCE = 6
# Tolerances of losses; the second is for gradients in 8-bit codes.
TOLERANCE = 1e-4
COMPRESSED = 1e-3


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(launched.ROOT))


def test_every_fault_that_needs_no_tensorflow_ends_everything_in_time_and_is_named():
    """Uses the package's launchers and clients, and only leaves out the clients' computation."""
    names = [name for name, fault in FAULTS.items() if fault.bare]
    assert len(names) >= 28
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {name: pool.submit(faults.run_fault, name, 2, seed=name, bare=True) for name in names}
    wrong = {name: str(error) for name, run in runs.items() if (error := run.exception()) is not None}
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_a_port_that_no_process_has_and_that_is_held_is_told_from_one_that_another_has():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert watched.is_given_up(port)
        sender, receiver = socket.socketpair()
        with sender, receiver:
            # A socket that is sent to another process has no owner on the way.
            socket.send_fds(sender, [b"-"], [server.fileno()])
            server.close()
            assert not watched.is_given_up(port)
        assert watched.is_given_up(port)


@sweeps.table("faults while TensorFlow computes", "name", FAULTS, sample=1)
def test_a_fault_ends_everything_in_time_and_is_named(name):
    faults.run_fault(name, 2, seed=name)


def test_a_run_is_restarted_and_a_client_that_does_not_come_back_is_left_out():
    """Client 1 is killed in two starts, and does not come to the third."""
    flags = ["--num_processes=2", "--max_restarts=3", "--elastic_min=1"]
    program = [watched.BARE_CLIENT, "--fault=kill,kill,gone", "--at_step=3,2", "--steps=4"]
    with watched.running(*flags, *program, launch=watched.BARE_LAUNCH, num_clients=2) as run:
        run.wait(60)
        run.check_nothing_is_left(1)
    assert run.launchers[0].returncode == 0, run.text
    for step in (3, 2):
        # Its last message may still have been under way.
        assert re.search(rf"Client 1 was killed by signal 9 \(SIGKILL\) (in|after) training step {step}\.", run.said)
    assert "Client 1 ended with exit code 7, before it called tfshard.initialize()" in run.said
    assert re.findall(r"restart \d of 3, with \d clients", run.said) == [
        "restart 1 of 3, with 2 clients", "restart 2 of 3, with 2 clients", "restart 3 of 3, with 1 clients",
    ]  # fmt: skip
    assert [(step, clients) for step, _, clients in run.steps(0)] == [
        (step, clients) for last, clients in ((3, 2), (2, 2), (4, 1)) for step in range(1, last + 1)
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("restarts", "elastic"), [(0, 1), (3, 2)])
def test_a_run_ends_with_the_code_of_the_failure_that_it_cannot_go_on_from(restarts, elastic):
    """The run has no restart left, or fewer clients than requested."""
    flags = ["--num_processes=2", f"--max_restarts={restarts}", f"--elastic_min={elastic}"]
    program = [watched.BARE_CLIENT, "--fault=gone,gone,gone,gone", "--steps=4"]
    with watched.running(*flags, *program, launch=watched.BARE_LAUNCH, num_clients=2) as run:
        run.wait(60)
    assert run.launchers[0].returncode == 7, run.text
    assert [int(number) for number in re.findall(r"restart (\d) of", run.said)] == list(range(1, restarts + 1))


def test_a_host_that_is_lost_is_left_out():
    """Two launchers run on two addresses of this machine. The follower is killed."""
    flags = [
        "--hosts=127.0.0.1,127.0.0.2", f"--port={watched.free_port()}", "--num_processes=1", "--max_restarts=1",
        "--elastic_min=1", "--registration_timeout=2", "--step_timeout=20",
    ]  # fmt: skip
    environment = {"TFSHARD_SECRET": os.urandom(32).hex()}
    first = [*flags, "--host_index=0", watched.BARE_CLIENT]
    with watched.running(*first, launch=watched.BARE_LAUNCH, environment=environment, num_clients=2) as run:
        run.launch(*flags, "--host_index=1", watched.BARE_CLIENT, environment=environment)
        run.wait_for("CLIENT step 5 ")
        run.launchers[1].kill()
        run.wait_for(r"restart 1 of 1, with 1 clients", 60)
        run.wait_for(r"\[client 0\] step \d+ loss \S+ clients 1", 60)
        run.launchers[0].terminate()
        run.wait(20)
        run.check_nothing_is_left(3)
    assert "The launcher of host 1 (127.0.0.2), with clients (1,), closed its connection." in run.said


def test_the_launcher_of_another_host_ends_its_clients_when_the_first_one_is_silent():
    """The launcher of host 0 is stopped, but its connections stay open. When it continues, it ends, too."""
    flags = ["--hosts=127.0.0.1,127.0.0.2", f"--port={watched.free_port()}", "--num_processes=1"]
    environment = {"TFSHARD_SECRET": os.urandom(32).hex()}
    first = [*flags, "--host_index=0", watched.BARE_CLIENT]
    with watched.running(*first, launch=watched.BARE_LAUNCH, environment=environment, num_clients=2) as run:
        run.launch(*flags, "--host_index=1", watched.BARE_CLIENT, environment=environment)
        run.wait_for("CLIENT step 5 ")
        leader, follower = run.launchers
        leader.send_signal(signal.SIGSTOP)
        follower.wait(HOST_SECONDS + DEATH_LIMIT)
        assert watched.is_stopped(leader.pid)
        assert run.pids[1] not in run.living()
        leader.send_signal(signal.SIGCONT)
        run.wait(DEATH_LIMIT)
        run.check_nothing_is_left(3)
    assert [leader.returncode, follower.returncode] == [1, 1], run.text
    assert "The launcher of host 0 sent no heartbeat for 8 s: this launcher stops all clients of its host." in run.said
    assert "The launcher of host 1 (127.0.0.2), with clients (1,), closed its connection." in run.said


@pytest.mark.sweep(1)
@pytest.mark.parametrize("system", ["SLURM", "Kubernetes"])
def test_launchers_find_each_other_by_the_variables_of_a_cluster(system):
    """Two addresses of this machine act as two hosts."""
    flags, variables, index = [f"--port={watched.free_port()}", "--num_processes=1"], {}, "JOB_COMPLETION_INDEX"
    if system == "SLURM":
        variables, index = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}, "SLURM_PROCID"
    else:
        flags.append("--hosts=127.0.0.1,127.0.0.2")
    environment = {"TFSHARD_SECRET": os.urandom(32).hex(), **variables}
    command = [*flags, watched.BARE_CLIENT, "--steps=3"]
    first = {**environment, index: "0"}
    with watched.running(*command, launch=watched.BARE_LAUNCH, environment=first, num_clients=2) as run:
        run.launch(*command, environment={**environment, index: "1"})
        run.wait(60)
        run.check_nothing_is_left(1)
    assert [launcher.returncode for launcher in run.launchers] == [0, 0], run.text
    for client in (0, 1):
        assert [(step, clients) for step, _, clients in run.steps(client)] == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.slow
@sweeps.table("restarts from a checkpoint", "how", ["no", ""], always=["no"])
def test_a_run_that_was_killed_in_a_save_goes_on_from_the_last_commit_with_the_numbers_of_one_device(how, tmp_path):
    """Client 1 is killed after it has written its shards, and does not come back."""
    flags = ["--num_processes=2", "--devices_per_process=2", "--max_restarts=2", "--elastic_min=1"]
    program = [
        watched.CLIENT, "--fault=save_written,gone", "--at_step=4", "--steps=6", f"--state={tmp_path}",
        "--every_steps=2", f"--{how}async_save",
    ]  # fmt: skip
    with watched.running(*flags, *program, launch=watched.BARE_LAUNCH, num_clients=2) as run:
        run.wait(300)
        run.check_nothing_is_left(3)
    assert run.launchers[0].returncode == 0, run.text
    assert "Client 1 was killed by signal 9 (SIGKILL)" in run.said
    assert "restart 2 of 2, with 1 clients" in run.said
    resumed = [line.rpartition(" ")[2] for line in run.lines if "[client 0] resumes after step" in line]
    assert resumed == ["None", "2"]
    found = run.steps(0)
    done = max(step for step, _, clients in found if clients == 2)
    # A save that is due is made before the next step, or runs at the same time as the step.
    assert done == 4 if how == "no" else done >= 4
    again = [(step, 2) for step in range(1, done + 1)] + [(step, 1) for step in range(3, 7)]
    assert [(step, clients) for step, _, clients in found] == again
    expected = launched.plain_losses(6)
    # The losses show whether each earlier step was done.
    assert abs(expected[5] - launched.plain_losses(6, rate=0.0)[5]) > 100 * TOLERANCE * expected[5]
    for step, loss, _ in found:
        np.testing.assert_allclose(float(loss), expected[step - 1], rtol=TOLERANCE, err_msg=f"step {step}")
    assert tfshard.CheckpointManager(tmp_path).latest_step() == 6


def assert_goes_on(flag: str, clients: int, directory: pathlib.Path) -> None:
    """Check a run with `flag` that kills client 1 after a step. The client comes back or not.

    The losses of all steps must match one device.
    """
    flags = ["--num_processes=2", "--devices_per_process=2", f"--max_restarts={3 - clients}", "--elastic_min=1"]
    program = [
        watched.CLIENT, f"--fault={'kill' if clients == 2 else 'kill,gone'}", "--at_step=5", "--steps=8",
        f"--state={directory}", "--every_steps=2", flag,
    ]  # fmt: skip
    with watched.running(*flags, *program, launch=watched.BARE_LAUNCH, num_clients=2) as run:
        run.wait(300)
        run.check_nothing_is_left(3)
    assert run.launchers[0].returncode == 0, run.text
    assert re.search(r"Client 1 was killed by signal 9 \(SIGKILL\) (in|after) training step 5\.", run.said)
    assert f"with {clients} clients" in run.said
    resumed = [line.rpartition(" ")[2] for line in run.lines if "[client 0] resumes after step" in line]
    assert resumed == ["None", "4"]
    found = run.steps(0)
    before, after = found[:-4], found[-4:]
    assert [(step, count) for step, _, count in after] == [(step, clients) for step in range(5, 9)]
    # The other client may end before it reports the step.
    assert [step for step, _, _ in before] in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
    expected = launched.plain_losses(8)
    assert abs(expected[7] - launched.plain_losses(8, rate=0.0)[7]) > 100 * TOLERANCE * expected[7], "premise"
    for step, loss, _ in found:
        np.testing.assert_allclose(float(loss), expected[step - 1], rtol=TOLERANCE, err_msg=f"step {step}")
    assert tfshard.CheckpointManager(directory).latest_step() == 8


@pytest.mark.slow
@sweeps.table(
    "restarts of hybrid runs", ("replicas", "clients"), [("2,2", 2), ("2,1", 2), ("2,1", 1), ("1,2", 2)], sample=1
)
def test_a_hybrid_run_that_was_killed_goes_on_on_such_a_mesh_and_on_a_flat_one(replicas, clients, tmp_path):
    assert_goes_on(f"--replicas={replicas}", clients, tmp_path)


@pytest.mark.slow
@sweeps.table(
    "restarts of pipelines",
    ("ranks", "clients"),
    [("2,2", 2), ("2,1", 2), ("2,1", 1), ("2,2", 1), ("1,2", 2)],
    sample=1,
)
def test_a_pipeline_that_was_killed_goes_on_as_one_and_on_a_flat_mesh(ranks, clients, tmp_path):
    assert_goes_on(f"--pipeline={ranks}", clients, tmp_path)


@pytest.mark.slow
@sweeps.table("restarts of compressed runs", "replicas", ["1,1,1", "2,2,1"], sample=1)
def test_a_compressed_run_that_was_killed_goes_on_with_the_same_bits_and_without_compression(
    replicas, tmp_path, monkeypatch
):
    """Client 1 is killed, comes back, is killed again and is left out. The other client continues with exact sums."""
    flags = ["--num_processes=2", "--devices_per_process=2", "--max_restarts=3", "--elastic_min=1"]
    program = [
        watched.CLIENT, "--fault=kill,kill,gone", "--at_step=5,7", "--steps=10", f"--state={tmp_path}",
        "--every_steps=2", f"--replicas={replicas},1", "--compression=int8,int8,none",
    ]  # fmt: skip
    with watched.running(*flags, *program, launch=watched.BARE_LAUNCH, num_clients=2) as run:
        run.wait(300)
        run.check_nothing_is_left(4)
    assert run.launchers[0].returncode == 0, run.text
    for step in (5, 7):
        assert re.search(rf"Client 1 was killed by signal 9 \(SIGKILL\) (in|after) training step {step}\.", run.said)
    resumed = [line.rpartition(" ")[2] for line in run.lines if "[client 0] resumes after step" in line]
    assert resumed == ["None", "4", "6"]
    assert any("error-feedback residuals of 3 variables" in line for line in run.lines), run.text
    ended = [when for line, when in zip(run.lines, run.times, strict=True) if re.search(r"restart \d of 3", line)]
    for step, when in zip((5, 7), ended, strict=False):
        # Its last message may still have been under way.
        last = [at for line, at in zip(run.lines, run.times, strict=True) if f"[client 1] step {step - 1} " in line]
        assert when - last[-1] < DEATH_LIMIT, f"step {step}"
    compressed = [(step, loss) for step, loss, clients in run.steps(0) if clients == 2]
    exact = [(step, loss) for step, loss, clients in run.steps(0) if clients == 1]
    # The other client may end before it reports the step.
    assert [step for step, _ in compressed] in (
        [*range(1, first + 1), *range(5, second + 1)] for first in (4, 5) for second in (6, 7)
    )
    assert [step for step, _ in exact] == [7, 8, 9, 10]
    monkeypatch.setattr(variable_layout, "LEAST_BY_REPLICAS_BYTES", model.COMPRESSED_BYTES)
    axes = {"replica": 2, "batch": 2} if replicas.startswith("2") else {"batch": 4}
    mesh = tfshard.create_mesh(**axes)
    alone = launched.losses(10, strategy=tfshard.ShardedStrategy(mesh, analyzer=None, compression="int8"))
    expected = launched.plain_losses(10)
    assert abs(expected[9] - launched.plain_losses(10, rate=0.0)[9]) > 100 * COMPRESSED * expected[9], "premise"
    assert any(abs(a - b) > 1e-6 * b for a, b in zip(alone, expected, strict=True)), "premise: codes lose something"
    # With the error-feedback residual from before the kill: without it, the bits would differ from step 5 on.
    for step, loss in compressed:
        assert loss == f"{alone[step - 1]:.9g}", f"step {step}"
    for step, loss in exact:
        np.testing.assert_allclose(float(loss), expected[step - 1], rtol=COMPRESSED, err_msg=f"step {step}")
    assert tfshard.CheckpointManager(tmp_path).latest_step() == 10


def test_a_process_that_was_not_launched_opens_no_port():
    trained = tfshard.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trained.compile("sgd", "mse", strategy=tfshard.ShardedStrategy())
    trained.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert watched.listening_ports(os.getpid()) == set()


def test_a_script_that_never_joins_is_an_error(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("print('hello')")
    done = launched.launch("--num_processes=2", str(script))
    assert done.returncode == 1
    assert "ended without calling tfshard.initialize()" in done.stderr
    assert "[client 0] hello" in done.stdout and "[client 1] hello" in done.stdout
