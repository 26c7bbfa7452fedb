"""Schedules: the order of tasks on each pipeline rank, checked and timed without a device.

A pipeline rank has one stage of the model, or several with `"interleaved"`: stage `n` is on pipeline rank
`n mod ranks`. A *task* is the forward or the backward pass of one stage with one microbatch. The last stage runs both
passes in one backward task, because its backward pass can begin as soon as its loss is known.

The schedules are from Huang et al. 2019, "GPipe" (`"gpipe"`), Narayanan et al. 2019, "PipeDream", with a flush at the
end of each step (`"1f1b"`), and Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", section 2.2 (`"interleaved"`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tfshard.errors import StrategyError

NAMES = ("gpipe", "1f1b", "interleaved")


class Task(NamedTuple):
    """The forward or the backward pass of one stage with one microbatch."""

    is_forward: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.stage}.{self.microbatch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """The begin and end of a task, in the time unit of the tasks."""

    task: Task
    begin: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of each pipeline rank in one step, in order.

    Attributes:
        name: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        ranks: The number of pipeline ranks.
        stages: The number of stages; a multiple of `ranks`.
        microbatches: The number of microbatches.
        tasks: The tasks of each pipeline rank.

    >>> schedule = Schedule.of("1f1b", ranks=2, stages=2, microbatches=3)
    >>> [" ".join(map(str, tasks)) for tasks in schedule.tasks]
    ['F0.0 F0.1 B0.0 F0.2 B0.1 B0.2', 'B1.0 B1.1 B1.2']
    >>> schedule.in_flight
    (2, 0)
    >>> schedule.bubble()
    0.25
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    tasks: tuple[tuple[Task, ...], ...]

    @classmethod
    def of(cls, name: str, *, ranks: int, stages: int, microbatches: int) -> "Schedule":
        """Return the schedule with a name.

        With `"interleaved"`, the order is GPipe's if the number of pipeline ranks does not divide the number of
        microbatches.

        Raises:
            StrategyError: An unknown name; several stages on a pipeline rank without `"interleaved"`; or a number of
                stages that the number of pipeline ranks does not divide.
        """
        check(name, ranks=ranks, stages=stages)
        if name == "gpipe" or (stages > ranks and microbatches % ranks):
            order = [_gpipe(rank, ranks, stages, microbatches) for rank in range(ranks)]
        else:
            order = [_one_forward_one_backward(rank, ranks, stages, microbatches) for rank in range(ranks)]
        # The backward task of the last stage includes its forward pass.
        tasks = tuple(
            tuple(task for task in each if not (task.is_forward and task.stage == stages - 1)) for each in order
        )
        made = cls(name=name, ranks=ranks, stages=stages, microbatches=microbatches, tasks=tasks)
        made.timed()  # Raises if tasks wait for each other.
        return made

    def needs(self, task: Task) -> Iterator[Task]:
        """Yield the tasks that must end before a task can begin, on any pipeline rank."""
        last = self.stages - 1
        if task.stage > 0 and (task.is_forward or task.stage == last):
            yield Task(True, task.stage - 1, task.microbatch)
        if not task.is_forward and task.stage < last:
            yield Task(True, task.stage, task.microbatch)
            yield Task(False, task.stage + 1, task.microbatch)

    def timed(self, times: "Mapping[tuple[bool, int], float] | None" = None, sent: float = 0.0) -> list[list[Timed]]:
        """Return the begin and end of each task, if each begins as soon as its pipeline rank and its inputs are ready.

        Args:
            times: The duration of a task, by (is forward, stage). By default a forward pass takes one unit, and a
                backward pass with recomputation takes three; in the last stage, both together take three.
            sent: The time to send a result to another pipeline rank.
        """
        if times is None:
            times = {
                (forward, stage): 1.0 if forward else 3.0 for forward in (True, False) for stage in range(self.stages)
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
                            *(ended[each] + (sent if each.stage % self.ranks != rank else 0.0) for each in needed),
                        ]
                    )
                    ended[task] = begin + times[task.is_forward, task.stage]
                    done.append(Timed(task=task, begin=begin, end=ended[task]))
            if len(ended) == before:
                raise AssertionError(f"Tasks of {self} wait for each other.")
        return found

    def bubble(self, times: "Mapping[tuple[bool, int], float] | None" = None, sent: float = 0.0) -> float:
        """Return the share of time in which pipeline ranks wait: `1 - busy / (ranks * length of the step)`.

        Args:
            times, sent: As for `timed`.
        """
        timed = self.timed(times, sent)
        length = max(each.end for tasks in timed for each in tasks)
        busy = sum(each.end - each.begin for tasks in timed for each in tasks)
        return 1 - busy / (self.ranks * length)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches for which a stage keeps its inputs at once, for each stage."""
        most = []
        for stage in range(self.stages):
            kept = highest = 0
            for task in self.tasks[stage % self.ranks]:
                if task.stage == stage:
                    kept += 1 if task.is_forward else -1
                    highest = max(highest, kept)
            most.append(highest)
        return tuple(most)

    def in_one_order(self) -> list[Task]:
        """Return all tasks in an order in which one thread can run them."""
        timed = [each for tasks in self.timed() for each in tasks]
        return [each.task for each in sorted(timed, key=lambda each: (each.end, each.begin))]


def check(name: str, *, ranks: int, stages: int) -> None:
    """Raise `StrategyError` like `Schedule.of`."""
    if name not in NAMES:
        raise StrategyError(f"Unknown schedule. Schedules: {NAMES}. Received: schedule={name!r}")
    if name != "interleaved" and stages != ranks:
        raise StrategyError(
            f"With schedule={name!r} each rank of a pipeline has one stage of the model: use as many stages as the "
            f"pipeline axis has ranks, or schedule='interleaved' with a multiple of that number. Received: {stages} "
            f"stages for {ranks} ranks"
        )
    if stages % ranks:
        raise StrategyError(
            f"The number of stages must be a multiple of the size of the pipeline axis. Received: {stages} stages "
            f"for {ranks} ranks"
        )


def _gpipe(rank: int, ranks: int, stages: int, microbatches: int) -> list[Task]:
    """Return all forward passes, then all backward passes."""
    rank_stages, numbers = range(rank, stages, ranks), range(microbatches)
    forward = [Task(True, stage, number) for stage in rank_stages for number in numbers]
    return [*forward, *(Task(False, stage, number) for stage in reversed(rank_stages) for number in numbers)]


def _one_forward_one_backward(rank: int, ranks: int, stages: int, microbatches: int) -> list[Task]:
    """Return alternating forward and backward passes, after the forward passes that the first gradient needs."""
    of_rank = stages // ranks
    total = microbatches * of_rank
    if of_rank == 1:
        ahead = ranks - rank - 1
    else:
        ahead = (ranks - rank - 1) * 2 + (of_rank - 1) * ranks
    ahead = min(ahead, total)

    def numbered(forward: bool) -> Sequence[Task]:
        # A pipeline rank runs `ranks` microbatches through one of its stages, then through the next stage.
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
