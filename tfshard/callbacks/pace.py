"""The step times of an epoch, each measured from the start of one step to the start of the next."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """The known facts about an execution: the steps that Keras runs at once (one by default, or `steps_per_execution`).

    Attributes:
        steps: The number of steps. If None, the count follows from Keras's step numbers, which may overcount an epoch's
            last execution.
        samples: The samples of all its steps, over all devices. NaN if unknown.
        tokens: The tokens, likewise.
        is_timed: True if its time counts, because the execution compiled nothing and was not profiled.
    """

    steps: int | None
    samples: float
    tokens: float
    is_timed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """The step times of an epoch.

    Attributes:
        steps: The number of steps done.
        timed_steps: The number of steps that are timed.
        seconds: The total time of the timed steps, each from its start to the start of the next.
        samples: The samples of the timed steps. NaN if unknown.
        tokens: The tokens of the timed steps. NaN if unknown.
        percentiles: p50, p90 and p99 of the seconds per step. An execution counts as the mean of its steps. NaN if no
            step is timed.
    """

    steps: int
    timed_steps: int
    seconds: float
    samples: float
    tokens: float
    percentiles: tuple[float, float, float]


class Pace:
    """The clock of an epoch. It identifies steps by their numbers in the epoch, and takes times in seconds from any
    clock.

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
        """True if the epoch's last step has ended."""
        return self._end is not None

    def begin(self, step: int, now: float) -> None:
        """Record the start of an execution that begins with `step`."""
        self._steps.append(step)
        self._begins.append(now)

    def note(self, ran: Ran) -> None:
        """Record the facts about the execution that began last."""
        self._ran[len(self._begins) - 1] = ran

    def end(self, now: float) -> None:
        """Record the end of the last execution."""
        self._end = now

    def times(self, done: int) -> Times:
        """Return the times of the epoch.

        Args:
            done: The number of the last step done, plus one. If Keras does not know the number of batches, it announces
                one step that has no batch.
        """
        assert self._end is not None
        numbers = np.diff([*self._steps, done])
        seconds = np.diff([*self._begins, self._end])
        # Plain Keras notes nothing, and its first step compiles.
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
