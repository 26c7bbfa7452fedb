"""A killed and restarted run with an embedding table matches one device (launched_tables.py)."""

import re

import numpy as np
import pytest

import launched
import launched_tables
import tfshard


@pytest.mark.slow
def test_a_killed_run_with_a_table_goes_on_and_its_checkpoints_need_no_table(tmp_path):
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=2", "--max_restarts=1",
        str(launched.HERE / "launched_tables.py"), str(tmp_path), "killed", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    assert (tmp_path / "killed").exists(), "premise: client 1 was killed"
    assert re.search(r"Client 1 was killed by signal 9 \(SIGKILL\) (in|after|before) ", said), said
    assert "restart 1 of 1, with 2 clients" in said
    plain = launched_tables.compiled(None)
    plain.fit(launched_tables.X, launched_tables.Y, batch_size=8, shuffle=False, verbose=0)
    for client in launched.found(done, 2):
        assert client["weights"].keys() == {variable.path for variable in plain.variables}
        for variable in plain.variables:
            np.testing.assert_allclose(client["weights"][variable.path], variable.numpy(), rtol=1e-5, atol=1e-6)
    for strategy in (
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=2)),
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), tables=".*items/embeddings"),
    ):
        restored = launched_tables.compiled(strategy)
        tfshard.CheckpointManager(tmp_path / "checkpoints").restore(restored)
        for mine, variable in zip(restored.variables, plain.variables, strict=True):
            np.testing.assert_allclose(mine.numpy(), variable.numpy(), rtol=1e-5, atol=1e-6)
