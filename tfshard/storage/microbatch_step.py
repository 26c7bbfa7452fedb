"""MicrobatchStep: the step of one microbatch, inside the step of the full batch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import tensorflow as tf

from tfshard.errors import StrategyError
from tfshard.storage import passes, steps
from tfshard.storage.steps import Step
from tfshard.storage.writes import Writable


class MicrobatchStep(Step):
    """The step of one microbatch, in a separate graph: the body of a loop.

    The step reads variables in that graph. It assigns nothing, and passes its writes on to the next microbatch.

    Args:
        outer: The step of the full batch.
        graph: The graph of the microbatch.
        carried: The values that the microbatch before has passed on, by storage.
        local_gradient: Makes a local gradient of a gradient, if the reduction waits for the last microbatch.
    """

    is_microbatch: ClassVar[bool] = True

    def __init__(
        self,
        outer: Step,
        graph: tf.Graph,
        carried: Mapping[Writable, tf.Tensor],
        local_gradient: Callable[[tf.Tensor], tf.Tensor] | None,
    ):
        record = outer.record
        super().__init__(graph, record.reshard, outer.reduce_gradient, record.only_mesh, outer.rounds_gathers)
        self.local_gradient = local_gradient
        # The ids of variables that are updated once the last microbatch has ended.
        self._updated_later: set[int] = set()
        for storage, value in carried.items():
            self.writes.begin_with(storage, value)

    def update_later(self, variables: Iterable[tf.Variable]) -> None:
        """Forbid reads of variables that are updated once the last microbatch has ended."""
        self._updated_later.update(id(variable) for variable in variables)

    def check_read(self, variable: tf.Variable) -> None:
        """Raise `StrategyError` if a variable is read that is updated once the last microbatch has ended."""
        if id(variable) in self._updated_later:
            raise StrategyError(
                f"Variable '{variable.path}' is read after its optimizer's update in a step with microbatches, which "
                "updates it only after the last microbatch. Read it before the update or in a separate step, return "
                "the variable itself, or set strategy.microbatches = 1."
            )

    def finish_microbatch(self, sums: dict[Writable, tf.Tensor]) -> tuple[dict[Writable, tf.Tensor], tf.Tensor]:
        """End the microbatch.

        Args:
            sums: The sums of gradients, by storage. The backward pass waits for them as it does for updates. The
                function replaces them by the tensors to return.

        Returns:
            The written values to pass on, by storage, and the sum of the tokens, which the full step must use.
        """
        written = {
            storage: storage.handed_on(recorded)
            for storage in self.writes.storages
            if (recorded := self.writes.find_in_step(storage)) is not None
        }
        self.return_sums(sums)
        passes.run(passes.MICROBATCH_PASSES, self.record)
        return written, tf.add_n([tf.zeros(()), *self.record.tokens])


@contextlib.contextmanager
def microbatch_scope(
    graph: tf.Graph,
    carried: Mapping[Writable, tf.Tensor] | None = None,
    local_gradient: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> Iterator[MicrobatchStep]:
    """Open the step of a microbatch, in a separate graph.

    Args:
        graph: The graph.
        carried: The values that the microbatch before has passed on.
        local_gradient: Makes a local gradient of a gradient, if the reduction waits for the last microbatch.
    """
    outer = steps.current()
    assert outer is not None, "Microbatches belong to a step."
    step = MicrobatchStep(outer, graph, carried or {}, local_gradient)
    with steps.changed(step=step):
        yield step
