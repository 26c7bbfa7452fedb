"""Saves that are killed: the states to save and to find again. As a program, kills saves by SIGKILL.

    python tests/killed_saves.py DIRECTORY SAMPLE
    tfshard launch --num_processes=2 --max_restarts=1000 tests/killed_saves.py DIRECTORY SAMPLE

The first start makes the initial state of each case, and lists the points where a save can be killed (tests/disk.py).
Each start checks the result of the start before: the last committed checkpoint loads with its values, and the next
save commits. Then it starts the save of another case, and is killed in it. In a launched run the launcher restarts the
program. Without a launcher, the program forks a process for each start, before TensorFlow has started a thread.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys

import keras
import pytest
import tensorflow as tf

import sweeps
import tfshard
from disk import Change, Disk
from resuming import assert_same_bits, drawn, fill, values
from tfshard.checkpoints import files, training_state
from tfshard.devices import clients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A save that is killed.

    Attributes:
        before: Step and number of the values of each earlier save, in order.
        step: The step it saves.
        keep: How many steps it keeps.
        wait: True if the main thread writes.
    """

    before: tuple[tuple[int, int], ...] = ()
    step: int
    keep: int = 3
    wait: bool = True

    @property
    def last(self) -> tuple[int, int] | None:
        """The last commit before the save."""
        return self.before[-1] if self.before else None


CASES = {
    "the first": Case(step=1),
    "the first, by a thread": Case(step=1, wait=False),
    "the next": Case(before=((1, 1),), step=2),
    "the same again": Case(before=((1, 1), (1, 2)), step=1),
    "the same again, by a thread": Case(before=((1, 1), (1, 2)), step=1, wait=False),
    "one that deletes others": Case(before=((1, 1), (2, 2)), step=3, keep=1),
}
# The cases for several processes. They contain every kind of point; each start takes its time.
LAUNCHED = ("the first, by a thread", "the same again", "one that deletes others")
# The number of the values in a killed save, and in the next save.
SAVED, NEXT = 5, 6


def build() -> keras.Model:
    """Return an untrained model with a group, a separate flat form, slots, counters and a seed generator's state."""
    keras.backend.clear_session()
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
    model = tfshard.Sequential([keras.Input((3,)), *layers])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model.compile("adam", "mse", strategy=strategy)
    training_state.build_optimizer(model)
    return model


def elements(used: int):
    """Return an iterator that has used a number of elements, in an order that its state contains."""
    found = iter(tf.data.Dataset.range(20).shuffle(20, seed=3))
    for _ in range(used):
        next(found)
    return found


def save(manager: tfshard.CheckpointManager, model: keras.Model, step: int, number: int, *, wait: bool = True) -> None:
    fill(model, number)
    manager.save(model, step, iterator=elements(number), wait=wait)


def check(root: pathlib.Path, model: keras.Model, expected: tuple[int, int] | None) -> None:
    """Check that a restart finds the bits of the last committed checkpoint, or an error if nothing was committed.

    Earlier checkpoints must be complete if they exist. The first client deletes the steps that the killed save was to
    delete, and checks the others after that; another client might find one that is about to be deleted.
    """
    manager = tfshard.CheckpointManager(root)
    for step in manager.steps() if clients.here().rank == 0 else ():
        manager.open(step)
    fill(model, 100)
    found = elements(0)
    if expected is None:
        assert manager.latest_step() is None
        with pytest.raises(tfshard.errors.CheckpointError, match="checkpoint does not exist"):
            manager.restore(model, iterator=found)
        assert_same_bits(values(model), drawn(model, 100))
        return
    step, number = expected
    assert manager.latest_step() == step
    assert manager.restore(model, iterator=found).step == step
    assert_same_bits(values(model), drawn(model, number))
    assert int(next(found)) == int(next(elements(number)))


def commit(points: list[Change], step: int) -> int:
    """Return the number of the point before the rename that commits a step."""
    name = files.name_of(step, 0)
    (found,) = [i for i, p in enumerate(points) if p.what == "rename" and pathlib.PurePath(p.to).stem == name]
    return found


def expected(case: Case, points: list[Change], at: tuple[int, int]) -> tuple[int, int] | None:
    """Return step and number of the last commit when a client is killed at one of its points.

    Args:
        case: The save.
        points: The points of the first client, which commits.
        at: The client, and the number of the point.
    """
    client, number = at
    return (case.step, SAVED) if client == 0 and number > commit(points, case.step) else case.last


# --- as a program


class Start:
    """A start of the program. Its number counts the starts before it."""

    def __init__(self, directory: pathlib.Path, sample: int, number: int):
        tfshard.initialize(num_devices=None if clients.here().is_launched else 2, device_type="CPU")
        self.here = clients.here()
        self.directory = directory
        self.sample = sample
        self.number = number
        self.model = build()
        self.root = directory / "work" / "run"

    def run(self) -> None:
        if self.number == 0:
            self._list()
        plan = json.loads((self.directory / "plan.json").read_text())
        if self.number:
            name, *_, found = plan[self.number - 1]
            check(self.root, self.model, found and tuple(found))
            case = CASES[name]
            save(tfshard.CheckpointManager(self.root, keep=case.keep), self.model, case.step + 1, NEXT)
            check(self.root, self.model, (case.step + 1, NEXT))
            assert not [path for path in self.root.iterdir() if files.is_temporary(path.name)]
        if self.number == len(plan):
            print(f"PASSED {self.number}", flush=True)
            return
        name, client, point, said, _ = plan[self.number]
        if self.here.rank == client:
            print(f"KILLED in {name}: {said}", flush=True)
        self._copy(name)
        self._save(CASES[name], (client, point))
        # The other client may come here before it is killed, too.
        self.here.barrier("a kill")
        raise AssertionError("It was not killed.")

    def _list(self) -> None:
        """Make the initial states, and the plan: case, client and point of each kill, and the state it leaves."""
        (self.directory / "points").mkdir(parents=True, exist_ok=True)
        found: list[tuple] = []
        for name in CASES if self.here.count == 1 else LAUNCHED:
            case = CASES[name]
            template = self.directory / "templates" / name
            for step, number in case.before:
                save(tfshard.CheckpointManager(template / "run"), self.model, step, number)
            self._copy(name)
            points = self._save(case, None)
            said = [str(point) for point in points]
            (self.directory / "points" / f"{self.here.rank}.json").write_text(json.dumps(said))
            self.here.barrier("points")
            for client in range(self.here.count):
                theirs = json.loads((self.directory / "points" / f"{client}.json").read_text())
                for number, point in enumerate(theirs):
                    then = expected(case, points, (client, number)) if self.here.rank == 0 else None
                    found.append((name, client, number, point, then))
            self.here.barrier("cases")
        if self.here.rank == 0:
            plan = sweeps.taken(f"kills of {self.here.count}", found, sample=self.sample)
            (self.directory / "plan.json").write_text(json.dumps(plan))
            print(f"PLAN {len(plan)} of {len(found)}", flush=True)
        self.here.barrier("a plan")

    def _copy(self, name: str) -> None:
        """Copy the initial state of a case to the place where it is saved."""
        self.here.barrier("what was there")
        if self.here.rank == 0:
            shutil.rmtree(self.directory / "work", ignore_errors=True)
            (self.directory / "work").mkdir()
            if CASES[name].before:
                shutil.copytree(self.directory / "templates" / name, self.directory / "work", dirs_exist_ok=True)
        self.here.barrier("what is there")

    def _save(self, case: Case, kill: tuple[int, int] | None) -> list[Change]:
        rank = self.here.rank
        with Disk(self.directory / "work", kill=kill, really=True, client=lambda: rank) as disk:
            manager = tfshard.CheckpointManager(self.root, keep=case.keep)
            save(manager, self.model, case.step, SAVED, wait=case.wait)
            manager.wait()
        return disk.points[rank]


def main() -> None:
    directory, sample = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    if "TFSHARD_RESTART" in os.environ:
        Start(directory, sample, int(os.environ["TFSHARD_RESTART"])).run()
        return
    number = 0
    while True:
        process = os.fork()
        if not process:
            Start(directory, sample, number).run()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(code)
        number += 1


if __name__ == "__main__":
    main()
