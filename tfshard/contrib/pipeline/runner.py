"""Runs the tasks of a step in a thread for each pipeline rank."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from tfshard.contrib.pipeline.schedules import Schedule, Task, Timed
from tfshard.devices import process_lock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a step.

    Attributes:
        schedule: The schedule of the step.
        tasks: For each pipeline rank: begin and end of each task, in seconds from the begin of the step.
        in_flight: For each stage: the largest number of microbatches for which the stage kept its inputs at once.
        kept_bytes: For each stage: the largest number of bytes of these inputs, on all devices of its pipeline rank.
        sent_bytes: Bytes sent between pipeline ranks, on all devices.
    """

    schedule: Schedule
    tasks: tuple[tuple[Timed, ...], ...]
    in_flight: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """The time from the begin of the step to the end of the last task."""
        return max(each.end for tasks in self.tasks for each in tasks)

    @property
    def bubble(self) -> float:
        """The share of the pipeline ranks' time in which they waited."""
        busy = sum(each.end - each.begin for tasks in self.tasks for each in tasks)
        return 1 - busy / (len(self.tasks) * self.seconds)

    @property
    def times(self) -> dict[tuple[bool, int], float]:
        """The mean seconds of the tasks of each stage, by (is forward, stage)."""
        found: dict[tuple[bool, int], list[float]] = {}
        for tasks in self.tasks:
            for each in tasks:
                found.setdefault((each.task.is_forward, each.task.stage), []).append(each.end - each.begin)
        return {key: sum(values) / len(values) for key, values in found.items()}


class Runner:
    """Runs the tasks of a schedule: each pipeline rank runs its tasks in order, after the tasks that they need.

    Args:
        ranks: The number of pipeline ranks, each with a thread.
    """

    def __init__(self, ranks: int):
        self._threads = futures.ThreadPoolExecutor(max_workers=ranks, thread_name_prefix="tfshard_rank")

    def run(
        self, schedule: Schedule, tasks: Sequence[Sequence[Task]], do: Callable[[Task], object]
    ) -> list[list[Timed]]:
        """Run the tasks of all pipeline ranks concurrently.

        Args:
            schedule: Tells which tasks a task needs.
            tasks: The tasks of each pipeline rank, in order.
            do: Runs a task. An exception ends the step: every pipeline rank stops before its next task.

        Returns:
            The begin and end of each task.
        """
        begin = time.perf_counter()
        done: set[Task] = set()
        changed = threading.Condition()
        failed: list[BaseException] = []

        @process_lock.working_for_holder()
        def of_rank(rank_tasks: Sequence[Task]) -> list[Timed]:
            timed: list[Timed] = []
            for task in rank_tasks:
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

        ended = [each.result() for each in [self._threads.submit(of_rank, rank_tasks) for rank_tasks in tasks]]
        if failed:
            raise failed[0]
        return ended
