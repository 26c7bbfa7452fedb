"""`tfshard.spawn` runs a function in the processes of a local run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import launched
import launched_clusters
import tfshard
from tfshard.devices import clients
from tfshard.launch import spawning

# A program as a cell of a notebook: its functions are in __main__, and its process has used TensorFlow.
PROGRAM = """
import json, os, time
import tensorflow as tf
import tfshard
import launched_clusters

tfshard.initialize(num_devices=3, device_type="CPU")
tf.constant(1.0)
OFFSET = 5

def numbered(x):
    return [x + OFFSET, tfshard.collectives.rank(), os.getpid()]

def train(x):
    trained = launched_clusters.train()
    return [*numbered(x), trained]

def fail(kind):
    tfshard.initialize()
    if tfshard.collectives.rank() == 1:
        if kind == "raise":
            raise KeyError("the function's own error")
        os._exit(4)
    tfshard.collectives.barrier()
    time.sleep(60)

print("FOUND", json.dumps(tfshard.spawn(train, args=(2,), devices_per_process=1)))
for kind in ("raise", "die"):
    begin = time.monotonic()
    try:
        tfshard.spawn(fail, args=(kind,), devices_per_process=1)
    except tfshard.errors.ClientError as error:
        text = f"{type(error.__cause__).__name__} {error}".replace(chr(10), " ")
        print(f"FAILED {kind} {time.monotonic() - begin:.1f} {text}", flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> subprocess.CompletedProcess:
    file = tmp_path_factory.mktemp("spawn") / "program.py"
    file.write_text(PROGRAM)
    done = launched.run(str(file), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_functions_of_main_train_as_one_device_and_results_come_in_the_order_of_the_clients(program):
    (found,) = launched.said(program, "FOUND ")
    results = json.loads(found)
    assert [result[:2] for result in results] == [[7, 0], [7, 1]]
    assert len({result[2] for result in results}) == 2
    for result in results:
        assert result[3]["clients"] == 2 and "batch" in result[3]["kernels"][0]
        np.testing.assert_allclose(result[3]["losses"], launched_clusters.plain(), rtol=1e-5)


def test_an_error_comes_back_with_the_traceback_of_its_process(program):
    raised, died = launched.said(program, "FAILED ")
    assert raised.startswith("raise ") and "KeyError Client 1 raised KeyError. Its traceback:" in raised
    assert "in fail" in raised and "the function's own error" in raised
    assert died.startswith("die ") and "A process ended without a result" in died and "exit code 4" in died
    for line in (raised, died):
        assert float(line.split()[1]) < 45, "the other process did not sleep to its end"


@pytest.mark.slow
def test_a_keyboard_interrupt_ends_all_processes(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        textwrap.dedent("""
        import os, time, tfshard
        def wait():
            tfshard.initialize()
            print("pid", os.getpid(), flush=True)
            time.sleep(100)
        tfshard.spawn(wait, devices_per_process=1)
        """)
    )
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(launched.ROOT)},
    )  # fmt: skip
    pids = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if "pid" in line:
            pids.append(int(line.split()[-1]))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in said
    time.sleep(0.5)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_what_cannot_be_pickled_and_wrong_options_are_refused_before_a_process_starts():
    with pytest.raises(tfshard.errors.LaunchError, match="cannot be pickled.*make models and strategies inside"):
        tfshard.spawn(lambda lock: None, args=(threading.Lock(),))
    with pytest.raises(tfshard.errors.LaunchError, match="spawn needs a function. Received: function=3"):
        tfshard.spawn(3)
    for args in (0.01, "text"):
        with pytest.raises(
            tfshard.errors.LaunchError, match=r"args must be a tuple.*such as \(0.01,\). Received: args="
        ):
            tfshard.spawn(print, args=args)
    with pytest.raises(tfshard.errors.LaunchError, match="num_processes must be at least 1"):
        tfshard.spawn(print, num_processes=0)
    for wrong in (True, "2", 1.5):
        for name in ("num_processes", "devices_per_process"):
            with pytest.raises(
                tfshard.errors.LaunchError, match=f"{name} must be an integer. Received: {name}={wrong!r}"
            ):
                tfshard.spawn(print, **{name: wrong})


def test_a_client_cannot_spawn():
    class Client(clients.Alone):
        is_launched = True

    with clients.replaced(Client()):
        with pytest.raises(tfshard.errors.LaunchError, match="is a client of a run already"):
            tfshard.spawn(print)


def test_the_environment_of_the_caller_is_as_before(monkeypatch):
    monkeypatch.delenv("TFSHARD_CLUSTER", raising=False)
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    with spawning._environment():
        assert os.environ["TFSHARD_CLUSTER"] == "none" and os.environ["PYTHONPATH"].endswith(":somewhere")
    assert "TFSHARD_CLUSTER" not in os.environ and os.environ["PYTHONPATH"] == "somewhere"
