"""Threads of one process train and predict at the same time with the numbers of separate runs, and end."""

import json
import threading

import numpy as np
import pytest
import tensorflow as tf

import launched
import tfshard
import threaded
from tfshard.devices import clients, process_lock


@pytest.mark.slow
def test_threads_have_the_numbers_of_one_device_and_end():
    done = launched.run(str(launched.HERE / "threaded.py"), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(launched.said(done, "FOUND")[0])
    assert found.keys() == threaded.WORK.keys()
    fitted = threaded.build(None).fit(
        threaded.X, threaded.Y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history["loss"]  # fmt: skip
    plain = threaded.build(None)
    for name in ("fit", "fit again"):
        np.testing.assert_allclose(found[name], fitted, rtol=1e-4)
    np.testing.assert_allclose(found["fed"], [0.0, 0.0], atol=1e-6)
    stepped = [float(plain.train_on_batch(threaded.X[i : i + 12], threaded.Y[i : i + 12])) for i in range(0, 48, 12)]
    np.testing.assert_allclose(found["loop"][:4], stepped, rtol=1e-4)
    predicted = threaded.build(None).predict(threaded.X, verbose=0).ravel()
    np.testing.assert_allclose(found["predict"][:-1], predicted, rtol=1e-4, atol=1e-6)


def test_a_step_in_another_thread_of_a_client_of_several_is_refused():
    client = clients.Launched.__new__(clients.Launched)
    client._thread = threading.current_thread()
    client.count, client._steps = 2, {}
    raised: list[BaseException] = []

    def step():
        try:
            client.step("training step", [], first=False)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=step, name="mine")
    thread.start()
    thread.join()
    with pytest.raises(tfshard.errors.ClientError, match=r"Only the main thread .* training step.*thread 'mine'"):
        raise raised[0]


class Calls:
    """Calls of one tf.function in two threads: the second call starts while the first is traced.

    Attributes:
        results: The results or errors of the calls.
    """

    def __init__(self, monkeypatch):
        # Deadlocked threads would keep the lock for ever.
        monkeypatch.setattr(process_lock, "_lock", threading.RLock())
        self.results: dict[str, object] = {}
        self.is_traced, self.ended, self.waits = threading.Event(), threading.Event(), True

    def trace(self) -> None:
        """Wait during the trace until the other thread has reached its lock."""
        if self.waits:
            self.waits = False
            self.is_traced.set()
            self.ended.wait(2)

    def run(self, first, second) -> None:
        def work(name, call):
            try:
                self.results[name] = float(call())
            except BaseException as error:
                self.results[name] = repr(error)

        def after():
            self.is_traced.wait(60)
            work("second", second)
            self.ended.set()

        threads = [
            threading.Thread(target=work, args=("first", first), daemon=True),
            threading.Thread(target=after, daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"


TRACED_BY = {
    "its first call": lambda total, nested: total,
    "a call with another argument": lambda total, nested: (total(steps=False), total)[1],
    "get_concrete_function": lambda total, nested: lambda: total.get_concrete_function()(),
    "another function": lambda total, nested: nested,
}


@pytest.mark.parametrize("traced_by", TRACED_BY)
def test_threads_that_trace_one_function_do_not_wait_for_each_other(traced_by, monkeypatch):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        weight = tf.Variable(np.ones(8, "float32"))
    calls = Calls(monkeypatch)

    def step():
        return tf.reduce_sum(weight)

    @tf.function
    def total(steps=True):
        if not steps:
            return tf.zeros(())
        calls.trace()
        return strategy.run(step)

    @tf.function
    def nested():
        return total() + 0

    def in_turn():
        with process_lock.held():  # As a step's calls do.
            return total()

    calls.run(TRACED_BY[traced_by](total, nested), in_turn)
    assert calls.results == {"first": 8, "second": 8}


def test_a_concrete_function_with_a_step_waits_for_its_turn():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        weight = tf.Variable(np.ones(8, "float32"))
    concrete = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(weight))).get_concrete_function()
    found = []
    thread = threading.Thread(target=lambda: found.append(concrete()), daemon=True)
    with process_lock.held():
        thread.start()
        thread.join(1)
        assert not found
    thread.join(60)
    assert [float(each) for each in found] == [8]


def ends_while_the_lock_is_held(call) -> bool:
    """Return whether a call in another thread ends while this thread holds the process lock."""
    thread = threading.Thread(target=call, daemon=True)
    with process_lock.held():
        thread.start()
        thread.join(3)
        ended = not thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()
    return ended


@pytest.mark.slow
def test_a_plain_function_with_the_name_of_a_step_does_not_wait_for_steps():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        counter = tf.Variable(0.0)

    def named_train_step(function):
        function.__name__ = "train_step"
        return tf.function(function, autograph=False)

    step = named_train_step(lambda: strategy.run(lambda: counter.assign_add(1.0)))
    plain = named_train_step(lambda: tf.ones(()) + 1.0)
    around = tf.function(lambda: step() + 1.0, autograph=False)
    calls = [each.get_concrete_function() for each in (step, plain, around)]
    for call in calls:
        call()
    assert [ends_while_the_lock_is_held(call) for call in calls] == [False, True, False]
