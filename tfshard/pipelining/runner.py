"""The tasks of a step, done by a thread for each rank."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from tfshard.devices import process_lock
from tfshard.pipelining.schedules import Schedule, Task, Timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in a step.

    Attributes:
        schedule: Its schedule.
        tasks: Of each rank: when each task began and ended, in seconds from the begin of the step.
        in_flight: Of each part: for how many microbatches it kept its inputs at once, at most.
        kept_bytes: Of each part: how many bytes these were, on all devices of its rank, at most.
        sent_bytes: What went from rank to rank, on all devices.
    """

    schedule: Schedule
    tasks: tuple[tuple[Timed, ...], ...]
    in_flight: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """From the begin of the first task to the end of the last."""
        return max(each.end for tasks in self.tasks for each in tasks)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they waited."""
        busy = sum(each.end - each.begin for tasks in self.tasks for each in tasks)
        return 1 - busy / (len(self.tasks) * self.seconds)

    @property
    def times(self) -> dict[tuple[bool, int], float]:
        """How long the tasks of each part took, forward and backward: their mean, in seconds."""
        found: dict[tuple[bool, int], list[float]] = {}
        for tasks in self.tasks:
            for each in tasks:
                found.setdefault((each.task.is_forward, each.task.part), []).append(each.end - each.begin)
        return {key: sum(values) / len(values) for key, values in found.items()}


class Runner:
    """Does the tasks of a schedule: each rank its own in order, when what they need is done.

    Args:
        ranks: How many ranks, each with a thread.
    """

    def __init__(self, ranks: int):
        self._threads = futures.ThreadPoolExecutor(max_workers=ranks, thread_name_prefix="tfshard_rank")

    def run(
        self, schedule: Schedule, tasks: Sequence[Sequence[Task]], do: Callable[[Task], object]
    ) -> list[list[Timed]]:
        """Does the tasks at once.

        Args:
            schedule: Says what a task needs.
            tasks: Of each rank, in order.
            do: Does one. What it raises ends the step: every rank stops before its next task.

        Returns:
            When each began and ended.
        """
        begin = time.perf_counter()
        done: set[Task] = set()
        changed = threading.Condition()
        failed: list[BaseException] = []

        @process_lock.working_for_holder()
        def of_rank(own: Sequence[Task]) -> list[Timed]:
            timed: list[Timed] = []
            for task in own:
                needed = set(schedule.needs(task))
                with changed:
                    while not failed and not needed <= done:
                        changed.wait()
                    if failed:
                        return timed
                started = time.perf_counter()
                try:
                    do(task)
                except BaseException as error:
                    with changed:
                        failed.append(error)
                        changed.notify_all()
                    return timed
                timed.append(Timed(task=task, begin=started - begin, end=time.perf_counter() - begin))
                with changed:
                    done.add(task)
                    changed.notify_all()
            return timed

        ended = [each.result() for each in [self._threads.submit(of_rank, own) for own in tasks]]
        if failed:
            raise failed[0]
        return ended
