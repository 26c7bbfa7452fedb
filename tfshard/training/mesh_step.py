"""MeshStep: the step functions that Keras calls on a model that is attached to a strategy."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard.devices import process_lock, transfer
from tfshard.training import failures, output_losses
from tfshard.training.attached_model import TracedStorages, attached
from tfshard.training.step_functions import Prepared, StepFunction, StepFunctions
from tfshard.training.strategy import ShardedStrategy

# The names of Keras's methods for each kind of step: `make_train_function`, `train_function`, `train_step`.
_NAMES = {"training step": "train", "evaluation step": "test", "prediction step": "predict"}


class MeshStep:
    """A Keras step function that shards its batches over the mesh and returns results to the host.

    A call runs `steps_per_execution` steps:

    1. `AttachedModel.refresh` attaches what the model got since the last step.
    2. If variables moved since the trace, Keras makes the function again, and that function runs instead of 3 and 4.
    3. `StepFunctions.prepare` shards each batch and chooses the traced function for its shapes.
    4. `ShardedStrategy.operation` surrounds the execution, and `StepFunctions.run` runs each batch. The function that
       it calls opens the step (`hooks.ShardedExtended.step`).

    Args:
        model: The model.
        strategy: Its strategy.
        function: The step function that Keras made.
        kind: `"training step"`, `"evaluation step"` or `"prediction step"`.
        make_again: Makes another step function for batches of other shapes. Keras's functions relax the sizes that
            differ between calls to unknown sizes (reduce_retracing), and DTensor shards no dim of unknown size.
        to_host: True for predictions: each device sends its samples to the host, which concatenates them.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ShardedStrategy,
        *,
        function: StepFunction,
        kind: str,
        make_again: Callable[[], StepFunction],
        to_host: bool = False,
    ):
        functools.update_wrapper(self, function)
        self._model, self._strategy, self._kind, self._to_host = model, strategy, kind, to_host
        self._attached = attached(model, strategy)
        self._traced = TracedStorages(self._attached)
        self._functions = StepFunctions(
            model, strategy, kind=kind, function=function, again=make_again, step=f"{_NAMES[kind]}_step"
        )
        self._known_sizes = output_losses.KnownSizes()

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Run one execution, and return what the step returns for its last batch, or all predictions.

        Args:
            batches: The iterator of the epoch. Later executions take the batches after those of this one.

        Raises:
            StopIteration: No batch is left.
        """
        # Before the lock: the code that makes batches may need the lock.
        taken = list(itertools.islice(batches, self._model.steps_per_execution))
        if not taken:
            raise StopIteration
        with process_lock.held():
            return self._run(batches, taken)

    def _run(self, source: Iterable[Any], taken: list[Any]) -> Any:
        self._attached.refresh()
        if self._traced.have_changed():
            return self._made_again()(iter(taken))
        prepared = [self._prepare(batch, output_losses.size_of(source, batch)) for batch in taken]
        name = self._model.name
        if not self._to_host:
            with self._operation(prepared), failures.translated_errors(f"A step of model '{name}'"):
                # Copied to the host while this thread holds the lock: Keras may read the results in another thread.
                return transfer.map_tensors(transfer.eager_on_host, self._run_each(prepared)[-1])
        with (
            self._strategy.extended.results_stay_sharded(),
            failures.translated_errors(f"predict of model '{name}'"),
        ):
            with self._operation(prepared):
                outputs = self._run_each(prepared)
        return tf.nest.map_structure(_concatenated, *outputs)

    def _prepare(self, batch: Any, size: int | None) -> Prepared:
        counts = not self._to_host and not self._model.run_eagerly and output_losses.install(self._model)
        is_once = counts and not self._known_sizes.is_known(size)
        return self._functions.prepare(batch, counts_once=is_once, may_share=is_once or not counts)

    def _operation(self, prepared: list[Prepared]) -> contextlib.AbstractContextManager[None]:
        batches = [each.batch if each.is_open else each.argument for each in prepared]
        return self._strategy.operation(self, self._kind, batches)

    def _run_each(self, prepared: list[Prepared]) -> list[Any]:
        """Run the step on each batch."""
        known, results = self._functions.compiled, []
        try:
            for each in prepared:
                results.append(self._functions.run(each))
            return results
        finally:
            if self._functions.compiled > known:  # Also after a failure: what the step created may move.
                self._traced.note()

    def _made_again(self) -> StepFunction:
        """Return the step function of the model, which Keras makes again."""
        name = _NAMES[self._kind]
        getattr(self._model, f"make_{name}_function")(force=True)
        function: StepFunction = getattr(self._model, f"{name}_function")
        return function


def _concatenated(*parts: Any) -> Any:
    """Concatenate the results of several batches on the host."""
    if not tf.is_tensor(parts[0]):
        return parts[-1]
    on_host = [transfer.to_host(part) for part in parts]
    return tf.constant(on_host[0] if len(on_host) == 1 else np.concatenate(on_host))
