"""If a process is killed at any change of a remote file system, the last committed checkpoint loads with its values."""

import os
import pathlib
import threading
import time
import types
import uuid

import keras
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_kills import number_of_thread, save_together

import killed_saves
import launched
import sweeps
import tfshard
from cloud import Cloud, Point
from disk import Killed
from killed_saves import CASES, NEXT, SAVED, check, elements, save
from resuming import fill
from tfshard.checkpoints import files, remote_store, writer
from tfshard.checkpoints.remote_store import RemoteStore

HERE = pathlib.Path(__file__).parents[1]
TWO = ("the first", "the same again", "one that deletes others")


@pytest.fixture(scope="module")
def model() -> keras.Model:
    """The model to restore into."""
    found = killed_saves.build()
    layouts = [variable.value.layout for variable in found.trainable_variables]
    assert any("batch" in layout.storage for layout in layouts)
    return found


@pytest.fixture(scope="module")
def saved() -> keras.Model:
    """The model of the killed saves, with the values number `SAVED`."""
    found = killed_saves.build()
    fill(found, SAVED)
    return found


@pytest.fixture(autouse=True)
def several_data_files(monkeypatch):
    monkeypatch.setattr(remote_store, "CHUNK_BYTES", 300)
    # One upload after the other, so that each run has the same points.
    monkeypatch.setattr(remote_store, "UPLOADS", 1)


@pytest.fixture
def prepared(model):
    """Return a function that makes the initial state of a case in a new directory."""

    def make(case: killed_saves.Case) -> str:
        url = f"memory://{uuid.uuid4().hex}/run"
        for step, number in case.before:
            save(tfshard.CheckpointManager(url), model, step, number)
        return url

    yield make
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def killed(cloud: Cloud, saved: keras.Model, url: str, case: killed_saves.Case) -> None:
    """Save a case by one client, until it is killed or done."""
    with cloud:
        try:
            manager = tfshard.CheckpointManager(url, keep=case.keep)
            manager.save(saved, case.step, iterator=elements(SAVED), wait=case.wait)
            manager.wait()
        except Killed:
            pass


def is_commit(point: Point, step: int) -> bool:
    parent, name = os.path.split(point.path)
    parsed = files.parse(os.path.basename(parent))
    return point.what == "write" and name == files.MANIFEST and parsed is not None and parsed[0] == step


def expected(case: killed_saves.Case, points: list[Point], at: int) -> tuple[int, int] | None:
    """Return step and number of the last commit when the first client is killed at one of its points."""
    (commit,) = [i for i, point in enumerate(points) if point.after and is_commit(point, case.step)]
    return (case.step, SAVED) if at >= commit else case.last


def assert_the_next_save_works_and_cleans(url: str, model: keras.Model, case: killed_saves.Case) -> None:
    save(tfshard.CheckpointManager(url, keep=case.keep), model, case.step + 1, NEXT)
    check(url, model, (case.step + 1, NEXT))
    store = RemoteStore(url)
    committed = {files.name_of(*each) for each in store.checkpoints()}
    assert {path.partition("/")[0] for path in store.root.find()} == committed


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_each_change_of_a_remote_directory_leaves_what_was_committed_with_its_values(
    name, model, saved, prepared
):
    case = CASES[name]
    cloud = Cloud()
    killed(cloud, saved, prepared(case), case)
    points = cloud.points[0]
    assert sum(point.what == "write" for point in points) > 10, "premise: several data files, claims, a manifest"
    chosen = sweeps.taken(
        f"remote kills, {name}", list(range(len(points))), sample=1,
        always=[i for i, point in enumerate(points) if is_commit(point, case.step)],
    )  # fmt: skip
    for number in chosen:
        url = prepared(case)
        cloud = Cloud(kill=(0, number))
        killed(cloud, saved, url, case)
        assert cloud.was_killed, points[number]
        check(url, model, expected(case, points, number))
        assert_the_next_save_works_and_cleans(url, model, case)


@pytest.fixture
def quick_waits(monkeypatch):
    """A client that waits for a killed client is killed, too."""
    clouds: list[Cloud] = []

    def sleep(seconds: float) -> None:
        clouds[-1].stop_if_killed()
        time.sleep(seconds / 100)

    monkeypatch.setattr(writer, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return clouds


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TWO)
def test_a_kill_of_one_of_two_clients_leaves_what_was_committed_with_its_values(
    name, model, saved, prepared, quick_waits
):
    case = CASES[name]

    def run(kill: tuple[int, int] | None) -> tuple[Cloud, str]:
        url = prepared(case)
        quick_waits.append(Cloud(kill=kill, client=number_of_thread_or_0))
        save_together(quick_waits[-1], saved, lambda: RemoteStore(url, writes=False), case)
        return quick_waits[-1], url

    whole, url = run(None)
    check(url, model, (case.step, SAVED))
    assert min(len(points) for points in whole.points.values()) >= 8, "premise: both clients write"
    every = [(rank, number) for rank in range(2) for number in range(len(whole.points[rank]))]
    for rank, number in sweeps.taken(f"remote kills of two, {name}", every, sample=3):
        cloud, url = run((rank, number))
        assert cloud.was_killed, whole.points[rank][number]
        after_all = rank == 1 and whole.points[1][number] == whole.points[1][-1]
        if after_all:
            # The other client has everything that it needs, and may commit before the launcher ends it.
            is_new = committed_generation(url, case.step) > generations_before(case)
            check(url, model, (case.step, SAVED) if is_new else case.last)
        else:
            check(url, model, expected(case, whole.points[0], number) if rank == 0 else case.last)
        assert_the_next_save_works_and_cleans(url, model, case)


def committed_generation(url: str, step: int) -> int:
    return RemoteStore(url).committed().get(step, -1)


def generations_before(case: killed_saves.Case) -> int:
    """Return the highest generation of the step before the save."""
    return sum(step == case.step for step, _ in case.before) - 1


def number_of_thread_or_0() -> int:
    return number_of_thread() if threading.current_thread().name.startswith("client") else 0


@pytest.mark.slow
def test_kill_minus_9_at_requests_of_a_save_to_a_real_server(tmp_path):
    """TFSHARD_SWEEP=1 kills at each request that changes something: before the server sees it, and after."""
    done = launched.run(str(HERE / "killed_remote_saves.py"), str(tmp_path), "2", timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (planned,) = launched.said(done, "PLAN")
    taken, _, count = planned.split()
    assert int(count) >= 100
    assert launched.said(done, "PASSED") == [taken]


@pytest.mark.slow
def test_kill_minus_9_of_one_of_two_clients_that_save_to_a_real_server(tmp_path):
    done = launched.run(str(HERE / "killed_remote_saves.py"), str(tmp_path), "10", "--launched", timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert launched.said(done, "PASSED") == [launched.said(done, "PLAN")[0].split()[0]]
