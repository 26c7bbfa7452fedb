"""The step functions of a model: `MeshStep`, which Keras calls, and the traced functions by the shapes of batches.

A step is traced with all shapes known, because DTensor shards no dim of unknown size. Each traced function takes about
a second to compile and some megabytes to keep. The module therefore does not keep one for each shape:

- The first shapes, and a shape that comes many times in a row, have separate functions.
- Other shapes share an open function, which gets padded batches and cuts the padding off (padding.py). Batch
  statistics, losses over pairs of samples and custom `train_step`s therefore match single-device Keras. Each capacity,
  a power of two, has a separate function. DTensor cannot shard the dims that were cut: every device computes the full
  batch. An open function takes batches that every device computes in full anyway, and batches that cost little.
- A model keeps at most `MOST` functions of a kind, and drops the least recently used one.

If the step contains an operation that was not tested on unknown sizes, or DTensor refuses the open function, every
shape gets a separate function.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import batching, clients, process_lock, transfer
from tfshard.errors import warn
from tfshard.graph import inventory
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.operations import chunked_cross_entropy
from tfshard.storage import steps
from tfshard.training import datasets, failures, output_losses, padding
from tfshard.training.attached_model import TracedStorages, attached
from tfshard.training.padding import BatchFamily
from tfshard.training.strategy import ShardedStrategy

# Keras calls this for one execution, with an iterator over batches.
StepFunction = Callable[[Any], Any]

MOST = 32

# Shapes that have separate functions at once: full batches and remainders, for each structure of a batch.
FIRST = 3

# A shape that comes this many times in a row gets a separate function.
IN_A_ROW = 64

# A model that has compiled this many functions of a kind warns.
MANY = 16

# The limit of parameters times positions (samples, tokens, pixels) for a batch that every device computes in full.
CHEAP = 1 << 25

# The names of Keras's methods for each kind of step: `make_train_function`, `train_function`, `train_step`.
_NAMES = {"training step": "train", "evaluation step": "test", "prediction step": "predict"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch for a step.

    Attributes:
        batch: The batch, with arrays for tensors that are on the host.
        key: The key of the function that runs on the batch.
        argument: The argument of the function, on the mesh.
        is_open: True for an open function.
        counts_once: True if the batch counts once in the metrics of outputs' losses (`output_losses`).
    """

    batch: Any
    key: Hashable
    argument: Any
    is_open: bool
    counts_once: bool


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
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ShardedStrategy,
        *,
        function: StepFunction,
        kind: str,
        make_again: Callable[[], StepFunction],
    ):
        functools.update_wrapper(self, function)
        self._model, self._strategy, self._kind = model, strategy, kind
        # Each device sends its predictions to the host, which concatenates them.
        self._to_host = kind == "prediction step"
        self._attached = attached(model, strategy)
        self._traced = TracedStorages(self._attached)
        self._functions = StepFunctions(model, strategy, kind=kind, function=function, again=make_again)
        self._known_sizes = output_losses.KnownSizes()

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Run one execution, and return what the step returns for its last batch, or all predictions.

        Args:
            batches: The iterator of the epoch. Later executions take the batches that follow.

        Raises:
            StopIteration: No batch is left.
        """
        # Before the lock: the code that makes batches may need the lock.
        if isinstance(batches, datasets.ShardedIterator):
            batches.take_together(self._model.steps_per_execution)
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
        return tf.nest.map_structure(functools.partial(_concatenated, self._strategy.mesh_shape), *outputs)

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


class StepFunctions:
    """The functions of one kind of step of a model.

    Attributes:
        functions: The kept functions by key, the least recently used one first.
        compiled: How many functions were compiled.
        takes_open: False once the model's step is known not to work as an open function.

    Args:
        model: The model.
        strategy: Its strategy.
        kind: As for `MeshStep`.
        function: The function that Keras made.
        again: Makes another function like `function`.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ShardedStrategy,
        *,
        kind: str,
        function: StepFunction,
        again: Callable[[], StepFunction],
    ):
        self._model, self._strategy, self._kind = model, strategy, kind
        self._again = again
        self._waiting = [function]
        self.functions: collections.OrderedDict[Hashable, StepFunction] = collections.OrderedDict()
        self._families: dict[str, BatchFamily] = {}
        self.takes_open = True
        self._last: Hashable = None
        self._in_a_row = 0
        self.compiled = 0
        # True if the latest open function was traced to the end.
        self._is_traced = False
        # How many batches in a row every device computed in full. None after the warning.
        self._full_in_a_row: int | None = 0

    def prepare(self, batch: Any, *, counts_once: bool = False, may_share: bool = True) -> Prepared:
        """Choose the function for a batch, and move the batch to the mesh.

        Args:
            batch: The batch.
            counts_once: As in `Prepared`.
            may_share: True if the batch may go through an open function, in which every batch counts once.
        """
        strategy = self._strategy
        if strategy.config.already_sharded or self._model.run_eagerly:
            return self._separate(batch, counts_once)
        batch = tf.nest.map_structure(batching.on_host, batch)
        self._note_full(batch)
        key = self._shape_key(batch, counts_once)
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        family = self._family(batch)
        if may_share and key not in self.functions and self._shares(batch, family):
            argument, capacities = family.padded(batch, strategy)
            return Prepared(batch=batch, key=capacities, argument=argument, is_open=True, counts_once=counts_once)
        family.separate += key not in self.functions
        return self._separate(batch, counts_once)

    def run(self, prepared: Prepared) -> Any:
        """Run the step on one batch."""
        function = self.functions.get(prepared.key)
        if function is not None:
            self.functions.move_to_end(prepared.key)
            return self._call(function, prepared)
        if not prepared.is_open:
            function = self._waiting.pop() if self._waiting else self._again()
            return self._first_run(prepared, function)
        self._is_traced = False
        try:
            return self._first_run(prepared, _private.make_step_function(self._model, self._open_step))
        except Exception as error:
            if self._is_traced and not _is_refusal(error):
                raise  # The step ran, and failed as on one device.
            self.takes_open = False
            del self.functions[prepared.key]
        return self.run(self._separate(prepared.batch, prepared.counts_once))

    def _call(self, function: StepFunction, prepared: Prepared) -> Any:
        # Keras counts a batch of unknown size once.
        rows = _rows(prepared.argument) if prepared.counts_once and not prepared.is_open else None
        option = self._strategy.config.chunked_cross_entropy
        with (
            output_losses.counted_once(rows),
            chunked_cross_entropy.expected(self._model, self._kind, option),
            steps.changed(skips_frozen=_is_of_keras(self._model)),
        ):
            return function([prepared.argument])

    def _separate(self, batch: Any, counts_once: bool) -> Prepared:
        strategy = self._strategy
        argument = batching.batch_to_mesh(batch, strategy.mesh, strategy.config.already_sharded)
        key = self._shape_key(argument, counts_once)
        return Prepared(batch=batch, key=key, argument=argument, is_open=False, counts_once=counts_once)

    def _shape_key(self, batch: Any, counts_once: bool) -> Hashable:
        if self._model.run_eagerly:
            return "eager"
        shapes = tuple(tuple(leaf.shape) for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape"))
        return shapes, self._strategy.microbatches, counts_once

    def _first_run(self, prepared: Prepared, function: StepFunction) -> Any:
        _check_splits_sequences(self._model, self._strategy, prepared.batch)
        self.compiled += 1
        self.functions[prepared.key] = function
        try:
            return self._call(function, prepared)
        finally:
            _private.keep_gradients_with_graphs()
            if len(self.functions) > MOST:
                self.functions.popitem(last=False)
                gc.collect()  # Frees the graph, which is a cycle, and the function in TensorFlow and DTensor.
            if self.compiled == MANY:
                self._warn()

    # --- open functions -------------------------------------------------------------------------------

    def _family(self, batch: Any) -> BatchFamily:
        structure = padding.structure_of(batch)
        family = self._families.setdefault(structure, BatchFamily(structure))
        family.note(batch)
        return family

    def _shares(self, batch: Any, family: BatchFamily) -> bool:
        """Return whether a batch goes through the open function."""
        strategy = self._strategy
        axes = axis_sizes(strategy.mesh)
        leaves = [leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape")]
        if (
            not self.takes_open
            or family.separate < FIRST
            or self._in_a_row >= IN_A_ROW
            or clients.here().is_launched
            or axes.contexts > 1
            or strategy.microbatches > 1
            or strategy.config.reduction is not None
            or strategy.config.kinds
            or strategy.config.chunked_cross_entropy is not None
            or any(axes[axis] > 1 for axis in axes.tensor)
            or not all(padding.can_be_padded(leaf) for leaf in leaves)
        ):
            return False
        return self._is_full(leaves) or self._is_cheap(leaves)

    def _is_full(self, leaves: list[Any]) -> bool:
        """Return whether every device computes a batch in full, because the batch axis divides none of its tensors."""
        return not any(batching.shares_samples(tuple(leaf.shape), self._strategy.mesh) for leaf in leaves)

    def _is_cheap(self, leaves: list[Any]) -> bool:
        """Return whether a batch is so small that every device may compute it in full."""
        positions = max(_positions(leaf) for leaf in leaves)
        parameters = sum(math.prod(variable.shape) for variable, _ in inventory.owned_variables(self._model))
        return bool(positions * parameters <= CHEAP)

    def _note_full(self, batch: Any) -> None:
        """Warn once about training batches that the batch axis does not divide.

        A single such batch is the last batch of an epoch, and does not count.
        """
        if self._full_in_a_row is None or self._kind != "training step":
            return
        leaves = [leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape")]
        axes = axis_sizes(self._strategy.mesh)
        if axes.sample_shards == 1 or not leaves or not self._is_full(leaves):
            self._full_in_a_row = 0
            return
        self._full_in_a_row += 1
        if self._full_in_a_row < 2 or self._is_cheap(leaves):
            return
        self._full_in_a_row = None
        shapes = [tuple(leaf.shape) for leaf in leaves]
        samples = max((shape[0] for shape in shapes if shape), default=1)
        divided = -(-samples // axes.sample_shards) * axes.sample_shards
        warn(
            f"Model '{self._model.name}' trains on batches whose size is not divisible by mesh axis '{axes.data}' of "
            f"{axes.sample_shards} devices, so every device computes the full batch: the results are correct, but the "
            f"devices do not share the work. Use a batch_size that is a multiple of {axes.sample_shards}, such as "
            f"{divided}. Received: a batch of shapes {shapes}"
        )

    def _open_step(self, padded: tuple[Any, Any]) -> Any:
        """Run the model's step on a padded batch."""
        batch, masks = padded
        leaves = [padding.cut(leaf, kept) for leaf, kept in zip(tf.nest.flatten(batch), masks, strict=True)]
        result = getattr(self._model, f"{_NAMES[self._kind]}_step")(tf.nest.pack_sequence_as(batch, leaves))
        padding.check_operations(tf.compat.v1.get_default_graph())
        self._is_traced = True
        return result

    def _warn(self) -> None:
        warn(
            f"Model '{self._model.name}' has compiled its {self._kind} for {MANY} shapes of batches. Each new shape is "
            f"compiled, which takes seconds, and tfshard keeps the {MOST} functions that were used last. Pad batches "
            "to a few sizes and sequences to a few lengths (tf.data's bucket_by_sequence_length, padded_batch), or "
            "leave the last batch out (drop_remainder=True)."
        )


def _check_splits_sequences(model: keras.Model, strategy: ShardedStrategy, batch: Any) -> None:
    """Check that a model works on chunks of sequences, if its inputs were not known before this batch."""
    if strategy.mesh_shape.contexts > 1 and isinstance(batch, tuple):
        specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)), batch[0])
        attached(model, strategy).check_splits_sequences(specs)


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says that DTensor could not expand a function."""
    is_memory = isinstance(error, tf.errors.ResourceExhaustedError)
    return isinstance(error, tf.errors.OpError) and not is_memory and "dtensor" in str(error).lower()


def _rows(batch: Any) -> int:
    """Return the rows of the first tensor of a batch."""
    return int(next(leaf.shape[0] for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)))


def _positions(leaf: Any) -> int:
    """Count samples, tokens or pixels. The last dim of a float tensor is the features."""
    shape = tuple(leaf.shape)
    return math.prod(shape[:-1] if tf.as_dtype(leaf.dtype).is_floating and len(shape) > 1 else shape)


def _concatenated(axes: MeshAxes, *parts: Any) -> Any:
    """Concatenate the results of several batches on the host. Rows of chunks become sequences again."""
    if not tf.is_tensor(parts[0]):
        return parts[-1]
    on_host = [transfer.to_host(part) for part in parts]
    if axes.contexts > 1:
        on_host = [SequenceChunks.of(axes).sequences_of(part) for part in on_host]
    return tf.constant(on_host[0] if len(on_host) == 1 else np.concatenate(on_host))


def _is_of_keras(model: keras.Model) -> bool:
    """Return whether Keras's own code computes the loss of a model and its gradients."""
    methods = type(model).train_step, type(model).compute_loss
    return all(each.__module__.partition(".")[0] in ("keras", "tfshard") for each in methods)
