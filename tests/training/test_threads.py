"""Threads of one process train and predict at the same time, with the numbers that each has alone (threaded.py)."""

import json
import threading

import numpy as np
import pytest

import launched
import tfshard
import threaded
from tfshard.devices import clients


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
