"""Clients that gather in codes have the bits of one process (launched_gathers.py)."""

import pytest

import launched
import launched_gathers


@pytest.mark.slow
def test_gathers_in_codes_have_the_bits_of_one_process():
    script = str(launched.HERE / "launched_gathers.py")
    done = launched.launch("--num_processes=2", "--devices_per_process=2", script)
    assert done.returncode == 0, done.stderr
    first, second = launched.found(done, 2)
    assert first == second
    for name in launched_gathers.MESHES:
        expected = launched_gathers.trained(name)
        assert expected["codes"] == ["net/hidden_0/kernel", "net/hidden_1/kernel"], "premise"
        assert first[name] == expected
