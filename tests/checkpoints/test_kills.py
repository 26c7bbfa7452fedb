"""If a process is killed at any disk change of a save, the last committed checkpoint loads with its values."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest

import killed_saves
import sweeps
import tfshard
from disk import Change, Disk, Killed
from killed_saves import CASES, SAVED, check, commit, elements, expected, save
from resuming import X, Y, assert_same_bits, drawn, fill, values, without_metrics
from tfshard.checkpoints import files, stores, training_state, writer
from tfshard.checkpoints.local_store import LocalStore
from tfshard.checkpoints.manifest import Position
from tfshard.checkpoints.writer import Snapshot, Writing
from tfshard.devices import clients
from tfshard.training import datasets

HERE = pathlib.Path(__file__).parents[1]
KINDS = {"mkdir", "create", "write", "fsync", "fsync directory", "rename", "unlink", "rmdir", "save tensors"}


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


def killed(disk: Disk, saved: keras.Model, root: pathlib.Path, case: killed_saves.Case) -> None:
    """Save a case by one client, until it is killed or done."""
    with disk:
        manager = tfshard.CheckpointManager(root, keep=case.keep)
        try:
            manager.save(saved, case.step, iterator=elements(SAVED), wait=case.wait)
            manager.wait()
        except Killed:
            pass


# --- several clients, each a thread of this process


class Client(clients.Alone):
    """A client of two that meet at a barrier."""

    count = 2

    def __init__(self, rank: int, meeting: threading.Barrier):
        self.rank = rank
        self.meeting = meeting

    def agree(self, what, value, **options):
        try:
            self.meeting.wait()
        except threading.BrokenBarrierError:
            raise Killed from None


def save_together(
    faults: contextlib.AbstractContextManager[object],
    saved: keras.Model,
    store: Callable[[], stores.Store],
    case: killed_saves.Case,
) -> None:
    """Save a case by two clients, each with half of the shards, until they are killed or done.

    Args:
        faults: The disk or cloud that kills the clients.
        saved: The model.
        store: Returns a client's store.
        case: The case.
    """
    variables = training_state.collect(saved)
    position = Position(epoch=0, step=None, consumed=0, num_batches=None, fresh=False, clients=1)
    states = [datasets.iterator_state(elements(SAVED))]
    whole = Snapshot.take(saved, variables, case.step, position, states)
    meeting = threading.Barrier(2)
    failures = []

    def run(writing: Writing, snapshot: Snapshot) -> None:
        """Run a save as CheckpointManager does."""
        try:
            try:
                writing.begin([variable.key for variable in variables])
                writing.run(snapshot)
            except BaseException:
                writing.end(failed=True)
                raise
            writing.end(failed=False)
        except Killed:
            meeting.abort()
        except BaseException as error:
            failures.append(error)
            meeting.abort()

    threads = []
    with faults:
        for rank in range(2):
            with clients.replaced(Client(rank, meeting)):
                writing = Writing(store(), case.keep, case.step)
            snapshot = dataclasses.replace(whole, held=whole.held[rank::2])
            threads.append(threading.Thread(target=run, args=(writing, snapshot), name=f"client {rank}"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def killed_together(disk: Disk, saved: keras.Model, root: pathlib.Path, case: killed_saves.Case) -> None:
    save_together(disk, saved, lambda: LocalStore(root), case)


def number_of_thread() -> int:
    return int(threading.current_thread().name[-1])


@pytest.fixture
def two(monkeypatch):
    """Return a function that makes a Disk of two clients. A client that waits for a killed client is killed, too."""
    disks: list[Disk] = []

    def sleep(seconds: float) -> None:
        disks[-1].stop_if_killed()
        time.sleep(seconds / 50)

    def make(folder: pathlib.Path, **options) -> Disk:
        disks.append(Disk(folder, client=number_of_thread, **options))
        return disks[-1]

    monkeypatch.setattr(writer, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return make


# --- every point, as seen from the disk


@pytest.fixture(scope="module")
def templates(model, tmp_path_factory) -> dict[str, pathlib.Path]:
    """The initial directory of each case."""
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        found[name] = tmp_path_factory.mktemp(f"case-{number}")
        for step, values_number in case.before:
            save(tfshard.CheckpointManager(found[name] / "run"), model, step, values_number)
    return found


def again(template: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


def left_and_next(
    root: pathlib.Path, model: keras.Model, case: killed_saves.Case, then: tuple[int, int] | None
) -> None:
    """Check a killed save: the last commit has its values, the next save works, and no temporary files stay."""
    check(root, model, then)
    manager = tfshard.CheckpointManager(root, keep=case.keep)
    manager.save(model, case.step + 1)
    assert manager.latest_step() == case.step + 1
    manager.open().verify()
    assert not [path.name for path in root.iterdir() if files.is_temporary(path.name)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_each_change_of_the_disk_leaves_what_was_committed_with_its_values(
    name, model, saved, templates, tmp_path
):
    case = CASES[name]
    whole = Disk(again(templates[name], tmp_path / "run"))
    killed(whole, saved, whole.folder / "run", case)
    left_and_next(whole.folder / "run", model, case, (case.step, SAVED))
    points = whole.points[0]
    assert not whole.was_killed
    then = collections.Counter()
    for number, point in enumerate(points):
        disk = Disk(again(templates[name], tmp_path / "run"), kill=(0, number))
        killed(disk, saved, disk.folder / "run", case)
        assert disk.was_killed and without_names(disk.points[0]) == without_names(points[: number + 1])
        if number <= commit(points, case.step):
            # Nothing is deleted before the commit.
            assert tfshard.CheckpointManager(disk.folder / "run").steps() == sorted({step for step, _ in case.before})
        try:
            left_and_next(disk.folder / "run", model, case, expected(case, points, (0, number)))
        except Exception as error:
            raise AssertionError(f"Killed before {point}") from error
        then[expected(case, points, (0, number))] += 1
    print(f"{name}: {len(points)} kills, then there were {dict(then)}")
    assert then[case.last] == commit(points, case.step) + 1 and then[case.step, SAVED] >= 1


@pytest.mark.sweep(1)
@sweeps.table("kills of one of two clients", "name", CASES, always=["the first", "one that deletes others"], sample=0)
def test_a_kill_of_one_of_two_clients_leaves_what_was_committed_with_its_values(
    name, model, saved, templates, two, tmp_path
):
    """The other client runs on until it waits, or is killed at the same moment.

    An ordinary run alternates between the two; TFSHARD_SWEEP=1 runs both.
    """
    case = CASES[name]
    whole = two(again(templates[name], tmp_path / "run"))
    killed_together(whole, saved, whole.folder / "run", case)
    check(whole.folder / "run", model, (case.step, SAVED))
    points = whole.points
    assert not whole.was_killed and points.keys() == {0, 1}
    assert "merge tensors" in {point.what for point in points[0]}
    assert {"save tensors", "fsync", "write", "rename"} <= {point.what for point in points[1]}
    for client in points:
        for number, point in enumerate(points[client]):
            for all_at_once in (True, False) if sweeps.SWEEP else (number % 2 == 0,):
                disk = two(again(templates[name], tmp_path / "run"), kill=(client, number), all_at_once=all_at_once)
                killed_together(disk, saved, disk.folder / "run", case)
                assert disk.was_killed
                try:
                    left_and_next(disk.folder / "run", model, case, expected(case, points[0], (client, number)))
                except Exception as error:
                    raise AssertionError(f"Client {client} killed before {point}, all_at_once={all_at_once}") from error
    print(f"{name}: {len(points[0])} kills of client 0, {len(points[1])} of client 1")


def without_names(points: list[Change]) -> list[tuple[str, str]]:
    """Return the changes without names of a time or a process, and without the order of directory listings."""
    return [(point.what, "removed" if "removed" in point.path else point.path) for point in points]


# --- the points are complete, and their order survives a power loss


def test_every_change_of_the_disk_is_a_point(saved, tmp_path):
    """The system sees no change outside the points, and it does see a foreign change."""
    root = tmp_path / "above" / "run"
    kinds = set()
    for name in ("the first", "one that deletes others"):
        disk = Disk(tmp_path, watch=True)
        killed(disk, saved, disk.folder / "above" / "run", CASES[name])
        assert disk.unexplained == []
        kinds |= {point.what for point in disk.points[0]}
    assert kinds == KINDS
    disk = Disk(tmp_path, watch=True)
    with disk:
        (root / "unseen").write_bytes(b"1")
    assert {line.split()[-1] for line in disk.unexplained} == {str(disk.folder / "above" / "run" / "unseen")}


def tree(folder: pathlib.Path) -> frozenset:
    """Return names and contents."""
    return frozenset(
        (str(path.relative_to(folder)), path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    )


@pytest.mark.sweep(1)
@sweeps.table(
    "power lost while saving", ("name", "together"),
    [(name, together) for name in CASES if CASES[name].wait for together in (False, True)],
    always=[("the first", False), ("one that deletes others", False), ("the same again", True)],
)  # fmt: skip
def test_a_power_loss_at_each_change_of_the_disk_leaves_what_was_committed(
    name, together, model, saved, templates, two, tmp_path
):
    """All changes that were not synced are lost, or only the contents of files."""
    case, run, make = CASES[name], killed_together if together else killed, two if together else Disk
    whole = make(again(templates[name], tmp_path / "run"))
    # New parent directories must be durable, too.
    below = pathlib.Path("run") if case.before else pathlib.Path("above", "run")
    run(whole, saved, whole.folder / below, case)
    points = whole.points[0]
    committed = commit(points, case.step)
    synced = next(
        i for i, p in enumerate(points) if i > committed and (p.what, p.path) == ("fsync directory", str(below))
    )
    checked = set()
    # The last round is after the save, without a kill.
    for number, point in enumerate([*points, Change(what="the end", path="")]):
        if point.within:
            continue
        disk = make(again(templates[name], tmp_path / "run"), kill=(0, number), power=True)
        run(disk, saved, disk.folder / below, case)
        for lost, since in (("without_what_was_not_synced", synced), ("with_all_names", committed)):
            shutil.rmtree(tmp_path / "lost", ignore_errors=True)
            getattr(disk.durable, lost)(tmp_path / "lost")
            then = (case.step, SAVED) if number > since else case.last
            # Most changes leave the same files.
            if (found := (tree(tmp_path / "lost"), then)) in checked:
                continue
            checked.add(found)
            try:
                check(tmp_path / "lost" / below, model, then)
            except Exception as error:
                raise AssertionError(f"Power lost before {point}: {lost}") from error
    assert len(checked) > 4


# --- fit, which saves at its end


def fit(model: keras.Model, directory: pathlib.Path, seen: list | None = None) -> None:
    """Run two epochs of one step each, from the start or from the last committed save."""

    class Begin(keras.callbacks.Callback):
        """Record the values at the start of training."""

        def on_epoch_begin(self, epoch, logs=None):
            if seen is not None and not seen:
                seen.append((epoch, without_metrics(values(model))))

    saving = tfshard.CheckpointCallback(directory, every_epochs=1)
    x, y = X[:8, :3], np.repeat(Y[:8], 2, axis=1)[:, :4]
    try:
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[saving, Begin()])
    except Killed:
        pass


@pytest.mark.filterwarnings("ignore:Nothing was trained")
def test_a_fit_that_is_killed_in_its_last_save_goes_on_from_what_was_committed(saved, tmp_path):
    """Kills each point of the save that a thread writes at the end of fit. The next fit ends with the same bits."""
    model, begins = killed_saves.build(), drawn(saved, 3)

    def begin(into: pathlib.Path) -> pathlib.Path:
        fill(model, 3)
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        return into

    whole = Disk(begin(tmp_path / "run"))
    with whole:
        fit(model, whole.folder / "run")
    ends = without_metrics(values(model))
    assert any((ends[key] != begins[key]).any() for key in begins if key.endswith("kernel"))
    points = whole.points[0]
    first, last = (commit(points, step) for step in (1, 2))
    chosen = sweeps.taken(
        "kills of the save at the end of fit", range(first + 2, len(points)), always=(last, last + 1), sample=1
    )
    for number in chosen:
        disk = Disk(begin(tmp_path / "run"), kill=(0, number))
        with disk:
            fit(model, disk.folder / "run")
        assert disk.was_killed
        fill(model, 100)
        seen = []
        fit(model, disk.folder / "run", seen)
        assert_same_bits(without_metrics(values(model)), ends)
        if number <= last:
            ((epoch, then),) = seen
            assert epoch == 1
        assert bool(seen) == (number <= last), points[number]
    print(f"Of {len(points)} points: {chosen}")


# --- kill -9


def run_killed(directory: pathlib.Path, sample: int, *launcher: str) -> str:
    """Run killed_saves.py, and return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, *launcher, str(HERE / "killed_saves.py"), str(directory), str(sample)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def counts(said: str) -> tuple[int, int, int]:
    """Return the numbers of planned kills, of points, and of restarts that passed."""
    ((planned, points),) = re.findall(r"PLAN (\d+) of (\d+)", said)
    return int(planned), int(points), int(re.findall(r"PASSED (\d+)", said)[-1])


def test_kill_minus_9_at_points_of_saves_leaves_what_was_committed_with_its_values(tmp_path):
    """An ordinary run kills at a sample of the points; TFSHARD_SWEEP=1 kills at each."""
    planned, points, passed = counts(run_killed(tmp_path, 2))
    assert planned == passed == (points if sweeps.SWEEP else 2) and points > 100


@pytest.mark.slow
def test_kill_minus_9_of_a_launched_client_leaves_what_was_committed_with_its_values(tmp_path):
    """An ordinary run kills at a sample of both clients' points; TFSHARD_SWEEP=1 kills at each."""
    options = ("--num_processes=2", "--devices_per_process=1", "--max_restarts=1000")
    said = run_killed(tmp_path, 1, "-m", "tfshard", "launch", *options)
    planned, points, passed = counts(said)
    assert planned == passed == (points if sweeps.SWEEP else 1) and points > 150
    assert said.count("was killed by signal 9 (SIGKILL)") == passed


WRITER = """
import itertools, sys
import numpy as np, keras
import tfshard
tfshard.initialize(num_devices=2, device_type="CPU")
model = tfshard.Sequential([keras.Input((13,)), keras.layers.Dense(17), keras.layers.Dense(64)])
model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2)))
manager = tfshard.CheckpointManager(sys.argv[1], keep=2)
model.train_on_batch(np.zeros((2, 13)), np.zeros((2, 64)))  # Makes the slots.
first = 0
if manager.latest_step() is not None:
    first = manager.restore(model).step
    for variable in model.trainable_variables + model.optimizer._momentums:
        value = np.array(variable.numpy())
        assert (value == value.flat[0]).all(), (first, variable.path)
        assert value.flat[0] in (first, first + 0.5), (first, value.flat[0])
    print("restored", first, flush=True)
for step in itertools.count(first):
    # Each step is saved, and saved again with other values.
    for value, wait in ((step, False), (step + 0.5, step % 2 == 0)):
        for variable in model.trainable_variables + model.optimizer._momentums:
            variable.assign(np.full(variable.shape, value))
        manager.save(model, step, wait=wait)
        manager.steps()
    manager.wait()
    print("committed", step, flush=True)
"""


@pytest.mark.slow
def test_kill_minus_9_at_random_moments_of_saving_leaves_the_last_committed_step(tmp_path):
    """Overwriting and asynchronous saves run in a loop. Kills also hit TensorFlow's writing."""
    kills = 100
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    rs = np.random.RandomState(0)
    committed = None
    restored = 0
    for _ in range(kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if lines[-1][0] == "committed" and len(lines) >= 3:
                break
        time.sleep(rs.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        lines += [line.split() for line in rest.splitlines() if line.split()[1:]]
        if committed is not None:
            assert lines[0][0] == "restored", errors
            # The step that was committed, or that was committed after the last message.
            assert committed <= int(lines[0][1]) <= committed + 1
            restored += 1
        committed = max(int(line[1]) for line in lines)
    assert restored == kills
