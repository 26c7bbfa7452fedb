"""The example scripts run, each in a separate process, with tiny settings."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
TINY_LM = ("--steps=6", "--eval_every=3", "--sample_bytes=5", "--layers=1", "--width=32", "--heads=2")
RUNS = {
    "lm": ("train_lm.py", *TINY_LM, "--sequence_length=32", "--eval_bytes=2048", "--mesh=batch:4"),
    "lm_tensor_parallel": (
        "train_lm.py", *TINY_LM, "--sequence_length=32", "--eval_bytes=2048", "--mesh=batch:2,model:2"
    ),
    "digits": ("train_digits.py", "--mesh=batch:4", "--min_accuracy=0.97"),
    "recommender": ("recommender.py", "--mesh=batch:4", "--rows=20000", "--steps=60", "--min_auc=0.65"),
    "recommender_lazy": (
        "recommender.py", "--mesh=batch:3", "--rows=20001", "--steps=60", "--min_auc=0.65", "--optimizer=adam",
        "--sparse=lazy",
    ),
    "keras_hub": ("finetune_keras_hub.py", "--mesh=batch:4", "--steps=3"),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", RUNS)
def test_example_runs_and_reports(name):
    script, *flags = RUNS[name]
    command = [sys.executable, str(EXAMPLES / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "total parameters" in done.stdout
    if script == "train_lm.py":
        # Lines instead of a progress bar without a terminal. The summary has a row for each block.
        assert re.search(r"^step +3  loss \S+  bits/byte \S+  tokens/s [\d,]+$", done.stdout, re.MULTILINE)
        assert "\x1b" not in done.stdout and "\r" not in done.stdout
        assert re.search(r"^ block_0 +16 ", done.stdout, re.MULTILINE)
        assert "block_0/up/kernel" not in done.stdout
