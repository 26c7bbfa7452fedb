"""The times of an epoch's steps, each from its beginning to that of the next one."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """What is known of an execution: the steps that Keras does at once, one unless `steps_per_execution` says more.

    Attributes:
        steps: How many they are; None where Keras's numbers have to tell, by which the last ones of an epoch may be
            more than there are.
        samples: Of all its steps, over all devices; NaN where that is not known.
        tokens: Likewise.
        is_timed: Whether its time counts: it compiled nothing, and was not profiled.
    """

    steps: int | None
    samples: float
    tokens: float
    is_timed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """The times of an epoch's steps.

    Attributes:
        steps: How many were done.
        timed_steps: How many of them count.
        seconds: Of those that count, from the beginning of each to that of the next.
        samples: Of those that count; NaN where that is not known.
        tokens: Likewise.
        percentiles: p50, p90 and p99 of the seconds of a step, of an execution the mean of its steps; NaN where none
            counts.
    """

    steps: int
    timed_steps: int
    seconds: float
    samples: float
    tokens: float
    percentiles: tuple[float, float, float]


class Pace:
    """The clock of an epoch. Steps are told by their numbers in the epoch, times in seconds of any clock.

    Example: two steps of 0.1 s, and one that compiled.

    >>> pace = Pace()
    >>> for step, now in enumerate((0.0, 2.0, 2.1)):
    ...     pace.begin(step, now)
    ...     pace.note(Ran(steps=1, samples=8.0, tokens=0.0, is_timed=step > 0))
    >>> pace.end(2.2)
    >>> times = pace.times(done=3)
    >>> times.steps, times.timed_steps, times.samples, round(times.seconds, 6)
    (3, 2, 16.0, 0.2)
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._begins: list[float] = []
        self._ran: dict[int, Ran] = {}
        self._end: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the epoch's last step has."""
        return self._end is not None

    def begin(self, step: int, now: float) -> None:
        """An execution begins with a step."""
        self._steps.append(step)
        self._begins.append(now)

    def note(self, ran: Ran) -> None:
        """What the execution was that began last."""
        self._ran[len(self._begins) - 1] = ran

    def end(self, now: float) -> None:
        """The last execution has ended."""
        self._end = now

    def times(self, done: int) -> Times:
        """What was measured.

        Args:
            done: The number of the step behind the last one. Keras announces a step for which there is no batch, where
                it does not know how many there are.
        """
        assert self._end is not None
        numbers = np.diff([*self._steps, done])
        seconds = np.diff([*self._begins, self._end])
        # In plain Keras nothing is noted, and the first step compiles.
        ran = [self._ran.get(place, _unknown(place)) for place in range(len(numbers))]
        steps = np.array(
            [given if each.steps is None else each.steps for given, each in zip(numbers, ran, strict=True)]
        )
        timed = [place for place, each in enumerate(ran) if each.is_timed and steps[place] > 0]
        each_step = seconds[timed] / steps[timed]
        percentiles = np.percentile(each_step, (50, 90, 99)) if timed else (np.nan,) * 3
        return Times(
            steps=int(steps[steps > 0].sum()),
            timed_steps=int(steps[timed].sum()),
            seconds=float(seconds[timed].sum()),
            samples=sum(ran[place].samples for place in timed),
            tokens=sum(ran[place].tokens for place in timed),
            percentiles=(float(percentiles[0]), float(percentiles[1]), float(percentiles[2])),
        )


def _unknown(place: int) -> Ran:
    return Ran(steps=None, samples=float("nan"), tokens=float("nan"), is_timed=place > 0)
