"""The longer checks, which `TFSHARD_SWEEP=1` adds to a run of the tests."""

import os

import pytest

SWEEP = os.environ.get("TFSHARD_SWEEP") == "1"
sweep = pytest.mark.skipif(not SWEEP, reason="a longer check: set TFSHARD_SWEEP=1")
