"""The watchdog finds the cause of failures from the clients' messages and times."""

import pytest

from tfshard.launch.options import Clock, Launch
from tfshard.launch.watchdog import Failure, Watchdog, WatchedClient


class Run:
    """Two registered clients, and the launcher's reactions to them."""

    def __init__(self, **options):
        self.clock = Clock()
        launch = Launch(command=("python",), num_processes=2, step_timeout=20.0, **options)
        clients = [WatchedClient(client_id=number, host=0, local_index=number) for number in (0, 1)]
        self.stopped: set[int] = set()
        self.watchdog = Watchdog(launch, self.clock, clients, is_stopped=self.stopped.__contains__)
        self.clients = clients
        self.let_go: list[int] = []

    def register(self, *numbers: int) -> "Run":
        for number in numbers:
            self.clients[number].facts = {"versions": "same"}
            self.clients[number].connection = object()  # type: ignore[assignment]
        self.watchdog.first_registered = self.clock.now
        return self

    def begin(self, client: int, number: int, label: str = "", digest: int | None = None) -> None:
        label = label or f"step {number}"
        self.watchdog.begin(self.clients[client], number, label, limit=None, digest=digest)

    def wait(self, seconds: float, silent: tuple[int, ...] = ()) -> Failure | None:
        """Let time pass, with heartbeats, until a failure is found."""
        for _ in range(int(seconds * 10)):
            self.clock.now += 0.1
            for client in self.clients:
                if client.client_id not in silent:
                    client.heard = self.clock.now
            self.let_go += [client.client_id for client in self.watchdog.watch()]
            failure = self.watchdog.cause()
            if failure is not None:
                return failure
        return None


@pytest.fixture
def run() -> Run:
    return Run().register(0, 1)


def step(run: Run, number: int) -> None:
    for client in (0, 1):
        run.begin(client, number)
    for client in (0, 1):
        run.watchdog.end(run.clients[client], failed=False)


def test_a_client_that_is_late_and_comes_is_not_to_blame(run):
    step(run, 0)
    run.begin(0, 1)
    assert run.wait(19) is None
    run.begin(1, 1)
    assert run.wait(19) is None
    for client in (0, 1):
        run.watchdog.end(run.clients[client], failed=False)
    assert run.watchdog.leave(run.clients[0]) == []
    assert run.watchdog.leave(run.clients[1]) == run.clients
    for client in run.clients:
        run.watchdog.ended(client, 0, ())
    assert run.wait(30) is None and not run.watchdog.has_failed


def test_a_client_that_does_not_come_to_a_step_is_to_blame(run):
    step(run, 0)
    run.begin(0, 1)
    failure = run.wait(30)
    assert 20 <= failure.at <= 20.2
    assert failure.clients == (1,)
    assert failure.text == ("Clients (1,) did not reach step 1 within 20 s: stuck (client 1: after step 0 since 20 s).")


def test_a_client_that_is_stopped_in_a_step_is_to_blame(run):
    for client in (0, 1):
        run.begin(client, 0)
    run.stopped.add(1)
    failure = run.wait(40, silent=(1,))
    assert failure.at < 21 and failure.clients == (1,)
    assert "its process is stopped (SIGSTOP), in step 0" in failure.text


def test_a_client_that_ends_its_script_early_is_let_go_and_named(run):
    step(run, 0)
    run.begin(0, 1)
    assert run.watchdog.leave(run.clients[1]) == []
    assert run.wait(2) is None
    assert run.wait(2) is None
    assert run.let_go == [1]
    run.watchdog.ended(run.clients[1], 0, ())
    failure = run.wait(5)
    assert not failure.retry
    assert failure.text.startswith("Client 1 ended its script, with exit code 0, while client 0 was in step 1:")


def test_the_cause_is_reported_and_not_its_consequence(run):
    for client in (0, 1):
        run.begin(client, 0)
    run.watchdog.reported(run.clients[0], "UnavailableError", "lost the other one")
    assert run.wait(2) is None
    run.watchdog.ended(run.clients[1], -9, ["last words"])
    failure = run.wait(2)
    assert (failure.clients, failure.code, failure.tail, failure.retry) == ((1,), 137, ("last words",), True)
    assert failure.text == "Client 1 was killed by signal 9 (SIGKILL) in step 0."


def test_a_client_that_cannot_write_any_more_is_not_the_cause_where_its_launcher_is_gone(run):
    run.begin(1, 0)
    run.watchdog.reported(run.clients[1], "BrokenPipeError", "BrokenPipeError: [Errno 32] Broken pipe")
    assert run.wait(0.5) is None
    run.watchdog.fail("The launcher of host 1 closed its connection.", clients=(1,))
    assert run.wait(1).text == "The launcher of host 1 closed its connection."


def test_an_error_without_another_cause_is_reported_after_a_while(run):
    run.begin(0, 0)
    run.watchdog.reported(run.clients[0], "UnavailableError", "UnavailableError: the network")
    failure = run.wait(4)
    assert failure.consequence and failure.text == "Client 0 failed in step 0:\nUnavailableError: the network"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_client_whose_script_goes_on_after_an_error_in_a_step_is_to_blame(run, goes_on):
    for client in (0, 1):
        run.begin(client, 0)
    run.watchdog.end(run.clients[1], failed=True, error="InvalidArgumentError: bad input")
    if goes_on:
        run.begin(1, 1)
    failure = run.wait(30)
    assert 20 <= failure.at <= 20.2 and failure.clients == (1,)
    assert "Client 1 failed in an operation that needs all clients, and its script continued" in failure.text
    assert "client 0: in step 0 since" in failure.text and failure.text.endswith("InvalidArgumentError: bad input")


@pytest.mark.parametrize(
    ("error", "retry"), [("MeshError", False), ("CheckpointMismatchError", False), ("OSError", True)]
)
def test_what_would_fail_again_is_not_tried_again(run, error, retry):
    run.watchdog.reported(run.clients[0], error, "text")
    assert run.wait(2).retry is retry


def test_clients_that_differ_in_order_or_batches_are_told_at_once(run):
    run.begin(0, 0, "step 1", digest=5)
    run.begin(1, 0, "reading a variable")
    assert "Client 1 reached reading a variable while client 0 was in step 1" in run.wait(1).text
    other = Run().register(0, 1)
    other.begin(0, 0, "step 1", digest=5)
    other.begin(1, 0, "step 1", digest=6)
    assert "Clients 0 and 1 were given different batches in step 1" in other.wait(1).text


def test_a_client_that_never_registers_is_named():
    run = Run(registration_timeout=6.0).register(0)
    failure = run.wait(10)
    assert 6 <= failure.at <= 6.2 and failure.clients == (1,)
    late = Run(startup_timeout=9.0)
    assert 9 <= late.wait(12).at <= 9.2


def test_a_client_without_a_connection_that_lives_on_is_stuck(run):
    run.clients[1].connection = None
    run.watchdog.disconnected(run.clients[1])
    failure = run.wait(4, silent=(1,))
    assert failure.clients == (1,) and "it closed its connection and did not end" in failure.text
