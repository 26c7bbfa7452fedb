"""Profiling steps of a launched run kills no client (launched_profiles.py)."""

import pytest

import launched
from launched_profiles import LAYERS, PROFILES


@pytest.mark.slow
def test_clients_that_profile_many_steps_live_and_have_the_profile_of_client_0():
    done = launched.launch("--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_profiles.py"))
    assert done.returncode == 0, done.stderr
    first, second = (client["profiles"] for client in launched.found(done, 2))
    # On clients other than 0, TensorFlow's recorder writes to freed memory, so they do not start it.
    assert first.pop("started") == [PROFILES, PROFILES] and second.pop("started") == [0, 0]
    assert first == second
    # Two gathers of each kernel and bias, and as many reductions, some of them merged.
    assert len(set(first["counts"])) == 1 and first["counts"][0] >= 2 * 2 * LAYERS
    assert first["devices"] == 2 and all(0 < hidden < 1 for hidden in first["hidden"])
    assert first["collective_seconds"][0] > 0
