"""The behavior of a process as one of several clients. `clients.replaced` pretends that it is one."""

import contextlib
import dataclasses
import gc
import queue
import re
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import clients
from tfshard.layouts.axes import axis_sizes
from tfshard.training import datasets


class Second(clients.Alone):
    """Client 1 of two. Records all agreements and messages, and has the devices of this process."""

    rank = 1
    count = 2
    is_launched = True

    def __init__(self):
        self.told: list[str] = []
        self.values: list[np.ndarray] = []
        self.noted: list[np.ndarray] = []

    def agree(self, what, value, *, error=tfshard.errors.ClientError, hint="", timeout=None):
        self.told.append(f"agree: {what}")

    def checksum(self, value):
        self.values.append(np.array(value))
        return len(self.values) - 1

    def note_checksum(self, tensor, checksum):
        self.noted.append(self.values[checksum])

    def step(self, kind, batch, traced):
        self.told.append(kind)
        return contextlib.nullcontext()

    def purpose(self, what):
        self.told.append(f"for: {what}")
        return contextlib.nullcontext()


@pytest.fixture
def second():
    tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))  # The devices meet before the process is one of two clients.
    fake = Second()
    with clients.replaced(by=fake):
        yield fake


def sharded() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="net")
    model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    return model


def test_a_process_that_was_not_launched_is_alone_and_agrees_with_everything():
    here = clients.here()
    assert (type(here), here.rank, here.count, here.is_launched) == (clients.Alone, 0, 1, False)
    here.agree("anything", {"a": 1})
    here.barrier(timeout=0.001)
    with here.purpose("anything"), here.operation("anything"), here.step("step", [], True):
        pass
    assert here.checksum(np.ones(3)) is None


def test_other_clients_are_here_only_within_the_context():
    before = clients.here()
    with pytest.raises(KeyError), clients.replaced(by=Second()):
        assert clients.here().rank == 1
        raise KeyError
    assert clients.here() is before


def test_clients_agree_on_strategy_and_values_before_they_train(second):
    model = sharded()
    assert axis_sizes(model.distribute_strategy.mesh) == {"batch": 4}
    model.fit(np.ones((8, 8)), np.ones((8, 4)), batch_size=4, verbose=0)
    told = [line for line in second.told if not line.startswith("for")]
    values = "agree: the initial values of model 'net'"  # Of the model, then of its optimizer.
    assert told == ["agree: the strategy", values, values, "training step", "training step"]


def test_the_batches_that_clients_are_given_are_noted_to_be_compared(second):
    model = sharded()
    x, y = np.random.RandomState(0).randn(2, 8, 8).astype("float32")
    model.train_on_batch(x, y[:, :4])
    for given in (x, y[:, :4]):
        assert any(value.shape == given.shape and np.array_equal(value, given) for value in second.noted)


def test_only_the_first_client_writes_a_file_and_all_wait_for_it(second, tmp_path):
    model = sharded()
    second.told.clear()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    tfshard.export(model, tmp_path / "exported.keras")
    assert list(tmp_path.iterdir()) == []
    assert [line for line in second.told if not line.startswith("for: the value")] == [
        "for: save of model 'net'",
        "agree: a saved model",
        "for: save_weights of model 'net'",
        "agree: a saved model",
        "for: tfshard.export of model 'net'",
        "agree: an exported model",
    ]
    with clients.replaced(by=clients.Alone()):
        model.save(tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_what_clients_cannot_do_together_is_refused(second, tmp_path):
    model = sharded()
    x, y = np.ones((8, 8), "float32"), np.ones((8, 4), "float32")
    with pytest.raises(tfshard.errors.StrategyError, match="verify runs in one process"):
        tfshard.verify(model, (x, y))
    with pytest.raises(tfshard.errors.StrategyError, match="overwrite each other's backups"):
        model.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    with pytest.raises(tfshard.errors.StrategyError, match="is written in a function that no ShardedStrategy runs"):
        tf.function(lambda: model.layers[0].kernel.assign(np.zeros((8, 4))))()


def test_each_client_saves_its_iterator_where_each_feeds_its_own_part(second):
    strategy = sharded().distribute_strategy
    assert datasets.iterator_savers(strategy) == 1
    strategy.config = dataclasses.replace(strategy.config, already_sharded=True)
    assert datasets.iterator_savers(strategy) == 2


# --- messages of a launched client to its launcher -------------------------------------------------------


class Channel:
    """A control channel to a launcher that agrees to everything."""

    def __init__(self):
        self.sent: list[dict] = []
        self._replies: queue.Queue[dict] = queue.Queue()

    def send(self, kind: str, **fields) -> None:
        self.sent.append({"kind": kind, **fields})
        if kind == "agree":
            self._replies.put({"kind": "agreed", "fault": None, "missing": False})

    def receive(self) -> dict:
        return self._replies.get()


@pytest.fixture
def launched(monkeypatch):
    channel = Channel()
    monkeypatch.setattr(clients.Connection, "open", lambda *args, **kwargs: channel)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    settings = clients.Settings(
        client_id=1, num_clients=2, local_index=1, num_local=2, restart=0, control="", secret="", address="127.0.0.1",
        devices_per_process=4, client_port=0, first_step_timeout=600.0, seed=0,
    )  # fmt: skip
    return clients.Launched(settings), channel.sent


def test_steps_are_numbered_and_those_that_are_compiled_may_take_longer(launched):
    client, sent = launched
    for rows, first in ((4, True), (4, False), (3, True)):
        with client.step("training step", [np.ones((rows, 2))], first):
            pass
    client.continue_steps("training step", 10)
    with client.step("training step", [np.ones((3, 2))], False), client.operation("an exchange within"):
        pass
    begun = [message for message in sent if message["kind"] == "begin"]
    assert [message["label"] for message in begun] == [f"training step {number}" for number in (1, 2, 3, 11)]
    assert [message["number"] for message in begun] == [0, 1, 2, 3]
    assert [message["limit"] for message in begun] == [600.0, None, 600.0, None]
    assert [message["kind"] for message in sent] == ["begin", "end"] * 4


def test_batches_are_compared_by_the_values_that_they_were_made_from(launched):
    client, sent = launched
    tensors = []
    for value in (np.ones(3), np.ones(3), np.zeros(3)):
        tensors.append(tf.constant(value))
        client.note_value(tensors[-1], value)
        with client.step("step", tensors[-1:], True):
            pass
    same, again, other = (message["digest"] for message in sent if message["kind"] == "begin")
    assert same == again != other
    assert len(client._checksums) == 3
    tensors.clear()
    gc.collect()
    assert not client._checksums


def test_an_operation_says_what_it_is_for_and_how_it_failed(launched):
    client, sent = launched
    with pytest.raises(KeyError), client.purpose("model.save of model 'net'"), client.purpose("a value"):
        with client.operation("an exchange"):
            raise KeyError("lost")
    assert sent[0]["label"] == "an exchange, for model.save of model 'net'"
    assert (sent[1]["failed"], sent[1]["error"]) == (True, "KeyError: 'lost'")


def test_a_client_goes_on_after_an_error_unless_its_devices_cannot_communicate_any_more(launched):
    client, sent = launched

    def fail(error: Exception) -> None:
        with pytest.raises(type(error)), client.step("training step", [], False):
            raise error

    failed = tf.errors.InvalidArgumentError(None, None, "an id out of range")
    fail(failed)
    client.barrier("a barrier")  # As on CPUs.
    client.ends_communication = lambda error: isinstance(error, tf.errors.OpError)
    fail(ValueError("a wrong shape"))
    client.barrier("a barrier")
    assert len(sent) == 10, "premise: each began and ended"
    fail(failed)
    del sent[:]
    for action in (lambda: client.step("training step", [], False).__enter__(), lambda: client.barrier("a barrier")):
        with pytest.raises(tfshard.errors.ClientError) as refused:
            action()
        assert re.match(r"Client 1 cannot go on after training step 3 failed.* --max_restarts=N", str(refused.value))
        assert "an id out of range" in str(refused.value)
    assert not sent


def test_another_thread_agrees_on_nothing(launched):
    client, sent = launched
    raised: list[Exception] = []

    def agree():
        try:
            client.barrier("a saved model")
        except tfshard.errors.ClientError as error:
            raised.append(error)

    client.barrier("a saved model")
    assert [message["kind"] for message in sent] == ["begin", "agree", "end"]
    thread = threading.Thread(target=agree)
    thread.start()
    thread.join()
    assert "Only the main thread of a client can take part in a saved model" in str(raised[0])
    assert len(sent) == 3
