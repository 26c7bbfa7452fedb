"""Schedules run every task once, after its dependencies, with the promised number in flight."""

import pytest

from tfshard.contrib.pipeline.schedules import Schedule, Task
from tfshard.errors import StrategyError

CASES = [
    (name, ranks, stages, microbatches)
    for name, ranks, stages in (
        ("gpipe", 1, 1),
        ("gpipe", 2, 2),
        ("gpipe", 4, 4),
        ("1f1b", 2, 2),
        ("1f1b", 3, 3),
        ("1f1b", 4, 4),
        ("interleaved", 2, 4),
        ("interleaved", 2, 6),
        ("interleaved", 4, 8),
    )
    for microbatches in (1, 2, 3, 4, 8)
]


@pytest.mark.parametrize(("name", "ranks", "stages", "microbatches"), CASES)
def test_every_task_is_done_once_and_behind_what_it_needs(name, ranks, stages, microbatches):
    schedule = Schedule.of(name, ranks=ranks, stages=stages, microbatches=microbatches)
    tasks = [task for own in schedule.tasks for task in own]
    expected = [Task(True, stage, number) for stage in range(stages - 1) for number in range(microbatches)]
    expected += [Task(False, stage, number) for stage in range(stages) for number in range(microbatches)]
    assert sorted(tasks) == sorted(expected)
    for rank, own in enumerate(schedule.tasks):
        assert {task.stage % ranks for task in own} <= {rank}
    ended: set[Task] = set()
    for task in schedule.in_one_order():
        assert set(schedule.needs(task)) <= ended
        ended.add(task)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_the_bubble_of_equal_parts_is_that_of_the_papers(ranks, microbatches):
    # Forward and backward pass take 1 and 2. The last stage does both in one task, so each takes 3 for a microbatch.
    times = {
        (forward, stage): 1.0 if forward else 3.0 if stage == ranks - 1 else 2.0
        for forward in (True, False)
        for stage in range(ranks)
    }
    expected = (ranks - 1) / (microbatches + ranks - 1)
    schedule = Schedule.of("1f1b", ranks=ranks, stages=ranks, microbatches=microbatches)
    assert schedule.bubble(times) == pytest.approx(expected)


def test_several_parts_on_a_rank_wait_less():
    one = Schedule.of("1f1b", ranks=4, stages=4, microbatches=8)
    two = Schedule.of("interleaved", ranks=4, stages=8, microbatches=8)
    assert two.bubble() < 0.7 * one.bubble()


def test_what_is_in_flight_is_what_the_schedules_say():
    of = {name: Schedule.of(name, ranks=4, stages=4, microbatches=8).in_flight for name in ("gpipe", "1f1b")}
    # The last stage does both passes in one task.
    assert of == {"gpipe": (8, 8, 8, 0), "1f1b": (4, 3, 2, 0)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "zigzag", "ranks": 2, "stages": 2}, "Schedules: .*1f1b"),
        ({"name": "1f1b", "ranks": 2, "stages": 4}, "interleaved"),
        ({"name": "interleaved", "ranks": 2, "stages": 3}, "a multiple of the size"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments, says):
    with pytest.raises(StrategyError, match=says):
        Schedule.of(arguments.pop("name"), microbatches=4, **arguments)
