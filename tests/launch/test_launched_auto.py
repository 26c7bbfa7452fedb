"""Clients that have different memory choose one strategy, for the least."""

import numpy as np
import pytest

import launched
import launched_auto
from tfshard.devices import startup
from tfshard.planning import known_machines


@pytest.mark.slow
def test_clients_choose_for_the_client_with_the_least_memory(monkeypatch):
    done = launched.launch("--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_auto.py"))
    assert done.returncode == 0, done.stderr
    clients = [client["auto"] for client in launched.found(done, 2)]
    assert clients[0] == clients[1]
    monkeypatch.setattr(known_machines, "here", lambda: None)
    before = startup.current()
    try:
        alone = launched_auto.train(devices=4, memory="2.7MiB")
        ample = launched_auto.train(devices=4, memory="1GiB")
    finally:
        startup._runtime = before
    assert clients[0]["strategy"] == alone["strategy"] != ample["strategy"]
    np.testing.assert_allclose(clients[0]["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(alone["losses"], ample["losses"], rtol=1e-5)
    assert done.stderr.count('tfshard: strategy="auto" chose') + done.stdout.count('strategy="auto" chose') == 1
