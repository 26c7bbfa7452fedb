"""In which order the ranks of a pipeline compute what: schedules, checked and timed without a device.

A *rank* is a place on the pipeline axis. It has one part of the model, or several with `"interleaved"`: part `n` is on
rank `n mod ranks`. A *task* is the forward or the backward pass of one part with one microbatch. The last part has
both in one task, a backward one: its loss is there when its gradient can begin.

The schedules are those of Huang et al. 2019, "GPipe" (`"gpipe"`), Narayanan et al. 2019, "PipeDream", with a flush at
the end of each step (`"1f1b"`), and Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", section 2.2 (`"interleaved"`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tfshard.errors import StrategyError

NAMES = ("gpipe", "1f1b", "interleaved")


class Task(NamedTuple):
    """The forward or the backward pass of one part with one microbatch."""

    is_forward: bool
    part: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.part}.{self.microbatch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """When a task begins and ends, in the unit in which tasks were timed."""

    task: Task
    begin: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of each rank in one step, in the order in which it does them.

    Attributes:
        name: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        ranks: How many ranks.
        parts: How many parts; a multiple of `ranks`.
        microbatches: How many microbatches.
        tasks: Of each rank.

    >>> schedule = Schedule.of("1f1b", ranks=2, parts=2, microbatches=3)
    >>> [" ".join(map(str, tasks)) for tasks in schedule.tasks]
    ['F0.0 F0.1 B0.0 F0.2 B0.1 B0.2', 'B1.0 B1.1 B1.2']
    >>> schedule.in_flight
    (2, 0)
    >>> schedule.bubble()
    0.25
    """

    name: str
    ranks: int
    parts: int
    microbatches: int
    tasks: tuple[tuple[Task, ...], ...]

    @classmethod
    def of(cls, name: str, *, ranks: int, parts: int, microbatches: int) -> "Schedule":
        """The schedule of a name. Of `"interleaved"`, microbatches that the ranks do not divide are taken as by GPipe.

        Raises:
            StrategyError: An unknown name; several parts of a rank in another schedule than `"interleaved"`, for which
                the ranks have to divide the parts.
        """
        check(name, ranks=ranks, parts=parts)
        if name == "gpipe" or (parts > ranks and microbatches % ranks):
            order = [_gpipe(rank, ranks, parts, microbatches) for rank in range(ranks)]
        else:
            order = [_one_forward_one_backward(rank, ranks, parts, microbatches) for rank in range(ranks)]
        # The last part's forward pass is in its backward task.
        tasks = tuple(
            tuple(task for task in each if not (task.is_forward and task.part == parts - 1)) for each in order
        )
        made = cls(name=name, ranks=ranks, parts=parts, microbatches=microbatches, tasks=tasks)
        made.timed()  # Raises if tasks wait for each other.
        return made

    def needs(self, task: Task) -> Iterator[Task]:
        """The tasks that have to end before a task can begin, on other ranks or on its own."""
        last = self.parts - 1
        if task.part > 0 and (task.is_forward or task.part == last):
            yield Task(True, task.part - 1, task.microbatch)
        if not task.is_forward and task.part < last:
            yield Task(True, task.part, task.microbatch)
            yield Task(False, task.part + 1, task.microbatch)

    def timed(self, times: "Mapping[tuple[bool, int], float] | None" = None, sent: float = 0.0) -> list[list[Timed]]:
        """When each task begins and ends, if each begins as soon as its rank and what it needs are there.

        Args:
            times: By whether it is forward, and part: how long a task takes. By default a forward pass takes one unit,
                and a backward pass, which computes it again, three; in the last part, both together three.
            sent: How long it takes to send a result to another rank.
        """
        if times is None:
            times = {
                (forward, part): 1.0 if forward else 3.0 for forward in (True, False) for part in range(self.parts)
            }
        ended: dict[Task, float] = {}
        found: list[list[Timed]] = [[] for _ in self.tasks]
        while any(len(done) < len(tasks) for done, tasks in zip(found, self.tasks, strict=True)):
            before = len(ended)
            for rank, (done, tasks) in enumerate(zip(found, self.tasks, strict=True)):
                while len(done) < len(tasks):
                    task = tasks[len(done)]
                    needed = list(self.needs(task))
                    if any(each not in ended for each in needed):
                        break
                    begin = max(
                        [
                            done[-1].end if done else 0.0,
                            *(ended[each] + (sent if each.part % self.ranks != rank else 0.0) for each in needed),
                        ]
                    )
                    ended[task] = begin + times[task.is_forward, task.part]
                    done.append(Timed(task=task, begin=begin, end=ended[task]))
            if len(ended) == before:
                raise AssertionError(f"Tasks of {self} wait for each other.")
        return found

    def bubble(self, times: "Mapping[tuple[bool, int], float] | None" = None, sent: float = 0.0) -> float:
        """The share of the ranks' time in which they wait: `1 - busy / (ranks * length of the step)`.

        Args:
            times, sent: As for `timed`.
        """
        timed = self.timed(times, sent)
        length = max(each.end for tasks in timed for each in tasks)
        busy = sum(each.end - each.begin for tasks in timed for each in tasks)
        return 1 - busy / (self.ranks * length)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Of how many microbatches each part keeps its inputs at once, at most: until their backward pass."""
        most = []
        for part in range(self.parts):
            kept = highest = 0
            for task in self.tasks[part % self.ranks]:
                if task.part == part:
                    kept += 1 if task.is_forward else -1
                    highest = max(highest, kept)
            most.append(highest)
        return tuple(most)

    def in_one_order(self) -> list[Task]:
        """All tasks, each behind those that it needs, as one thread can do them."""
        timed = [each for tasks in self.timed() for each in tasks]
        return [each.task for each in sorted(timed, key=lambda each: (each.end, each.begin))]


def check(name: str, *, ranks: int, parts: int) -> None:
    """Raises `StrategyError` as `Schedule.of`."""
    if name not in NAMES:
        raise StrategyError(f"Unknown schedule. Schedules: {NAMES}. Received: schedule={name!r}")
    if name != "interleaved" and parts != ranks:
        raise StrategyError(
            f"With schedule={name!r} each rank of a pipeline has one part of the model: use as many stages as the "
            "pipeline axis has places, or schedule='interleaved' with a multiple of it. "
            f"Received: {parts} stages for {ranks} ranks"
        )
    if parts % ranks:
        raise StrategyError(
            "The size of the pipeline axis has to divide the number of stages. "
            f"Received: {parts} stages for {ranks} ranks"
        )


def _gpipe(rank: int, ranks: int, parts: int, microbatches: int) -> list[Task]:
    """All forward passes, then all backward passes."""
    own, numbers = range(rank, parts, ranks), range(microbatches)
    forward = [Task(True, part, number) for part in own for number in numbers]
    return [*forward, *(Task(False, part, number) for part in reversed(own) for number in numbers)]


def _one_forward_one_backward(rank: int, ranks: int, parts: int, microbatches: int) -> list[Task]:
    """A forward pass and a backward pass in turn, after as many forward passes as the first gradient needs."""
    of_rank = parts // ranks
    total = microbatches * of_rank
    if of_rank == 1:
        ahead = ranks - rank - 1
    else:
        ahead = (ranks - rank - 1) * 2 + (of_rank - 1) * ranks
    ahead = min(ahead, total)

    def numbered(forward: bool) -> Sequence[Task]:
        # A rank takes as many microbatches as there are ranks through one of its parts, then through the next.
        tasks = []
        for number in range(total):
            group, within = divmod(number, ranks * of_rank)
            chunk, microbatch = divmod(within, ranks) if of_rank > 1 else (0, 0)
            if of_rank == 1:
                microbatch, group = number, 0
            chunk = chunk if forward else of_rank - 1 - chunk
            tasks.append(Task(forward, chunk * ranks + rank, group * ranks + microbatch))
        return tasks

    forward, backward = numbered(True), numbered(False)
    found = list(forward[:ahead])
    for number in range(total - ahead):
        found += [forward[ahead + number], backward[number]]
    return [*found, *backward[total - ahead :]]
