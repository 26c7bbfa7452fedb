"""Sequences that are split between clients train as on one device."""

import json

import numpy as np
import pytest

import launched
import launched_context


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"batch": 1, "context": 4}, {"batch": 2, "context": 2}])
def test_clients_that_share_sequences_have_the_numbers_of_one_device(axes):
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_context.py"), json.dumps(axes)
    )
    assert done.returncode == 0, done.stderr
    expected = launched_context.train()
    for client in launched.found(done, 2):
        np.testing.assert_allclose(client["context"]["losses"], expected["losses"], rtol=2e-5)
        np.testing.assert_allclose(client["context"]["predictions"], expected["predictions"], rtol=2e-4, atol=2e-5)
