"""Failures of launched runs name the object and the remedy, after working calls. A run serves several tests."""

import json
import pathlib
import re
import subprocess

import pytest

import launched
import tfshard
from launched import said

SCRIPT = str(launched.HERE / "launched_failures.py")


def launch(name: str, directory: pathlib.Path, *flags: str, num_processes: int = 2) -> subprocess.CompletedProcess:
    program = [SCRIPT] if "--module" not in flags else ["launched_failures"]
    return launched.launch(
        f"--num_processes={num_processes}", "--devices_per_process=2", *flags, *program, name, str(directory),
        bare=not flags,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model_first(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model_first")
    return launch("model_first", directory), directory


def test_a_script_that_builds_its_model_first_trains_launched(model_first):
    done, directory = model_first
    # In the script's environment, as without a launcher.
    expected = f"2 clients, argv {['model_first', str(directory)]}, main __main__, path {launched.HERE}"
    assert said(done, "STARTED") == [expected] * 2, done.stderr
    losses = said(done, "TRAINED")
    assert len(losses) == 2 and losses[0] == losses[1] and len(set(json.loads(losses[0]))) == 2


def test_another_number_of_devices_than_the_client_has_is_still_refused(model_first):
    done, _ = model_first
    refused = said(done, "REFUSED")
    assert len(refused) == 2
    for message in refused:
        assert "started when TensorFlow was first used" in message and "num_devices=6" in message


def test_the_recommended_augmentation_resumes_launched(model_first):
    done, _ = model_first
    assert len(said(done, "RESUMED")) == 2, done.stderr


def test_what_client_0_does_alone_is_named_with_the_remedy(model_first):
    done, _ = model_first
    assert done.returncode == 1
    cause = done.stderr.partition("tfshard launch: ")[2]
    assert re.search(r"the exchange of \d+ bytes for each device, for save of model 'sequential'", cause), done.stderr
    assert "Make these calls on every client, not under an 'if rank == 0'." in cause


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return launch("parts", tmp_path_factory.mktemp("parts"), "--module")


def test_clients_that_share_a_part_and_feed_different_rows_get_an_error(parts):
    differed = said(parts, "DIFFERED")
    assert len(differed) == 2, parts.stderr
    for message in differed:
        assert re.search(r"rows of part 0 \(from 0\) of 1: client 0 has \d+, client 1 has \d+", message)
        assert "feed the same rows" in message
    losses = said(parts, "WENT ON")
    assert len(losses) == 2 and losses[0] == losses[1]


def test_the_client_whose_step_fails_is_named_with_its_error(parts):
    assert parts.returncode == 1
    assert "NOT NOTICED" not in parts.stdout
    cause = parts.stderr.partition("tfshard launch: ")[2]
    assert re.match(r"Client 1 failed in training step 4:\n", cause), parts.stderr
    assert "InvalidArgumentError" in cause and "not a number in the batch" in cause
    assert re.search(r"/check\w*/CheckNumerics", cause), cause


@pytest.mark.slow
def test_a_run_over_nccl_restarts_after_a_failed_step_and_any_other_goes_on(tmp_path):
    done = launch("caught", tmp_path, "--max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert sorted(said(done, "] FAILED")) == ["0", "0", "1", "1"], "premise: the step fails on each client"
    assert sorted(said(done, "LOOP FAILED")) == ["0", "0", "1", "1"], "premise: the loop's step fails, too"
    of_loop = said(done, "LOOP REFUSED")
    assert len(of_loop) == 2
    for message in of_loop:
        assert re.search(r"Client \d cannot go on after a step failed: .* --max_restarts=N", message)
    refused = said(done, "] REFUSED")
    assert len(refused) == 2
    for message in refused:
        assert re.search(r"Client \d cannot go on after training step 2 failed: .* --max_restarts=N", message)
        assert "not a number in the batch" in message
    assert "tfshard launch: restart 1 of 1" in done.stderr
    assert said(done, "WENT ON") == ["1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_last_save_that_fails_is_told_with_an_exit_code(is_launched, tmp_path):
    done = launch("last_save", tmp_path) if is_launched else launched.run(SCRIPT, "last_save", str(tmp_path))
    assert len(said(done, "END")) == 1 + is_launched, done.stderr
    assert done.returncode == 1
    assert "CheckpointError: A checkpoint could not be written: no space left on the device" in done.stderr
    if is_launched:
        assert "tfshard launch: Client 1 failed after checkpoint-2" in done.stderr
    assert tfshard.CheckpointManager(tmp_path).steps() == [1]


@pytest.mark.slow
def test_a_script_that_makes_tensors_and_no_strategy_is_an_error(tmp_path):
    done = launch("alone", tmp_path, num_processes=1)
    assert done.returncode == 1
    assert "ended without a tfshard.ShardedStrategy and without a collective" in done.stderr
