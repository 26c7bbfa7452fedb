"""Clients of a launched run that share experts match one device (launched_experts.py)."""

import numpy as np
import pytest

import launched
import launched_experts


@pytest.mark.slow
def test_clients_send_each_other_tokens_with_the_numbers_of_one_device():
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_experts.py"), "4"
    )
    assert done.returncode == 0, done.stderr
    plain = launched_experts.compiled(None)
    losses = plain.fit(launched_experts.X, launched_experts.Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    for client in launched.found(done, 2):
        np.testing.assert_allclose(client["losses"], losses, rtol=1e-6)
        assert client["weights"].keys() == {variable.path for variable in plain.variables}
        for variable in plain.variables:
            np.testing.assert_allclose(client["weights"][variable.path], variable.numpy(), rtol=0, atol=1e-6)
