"""Microbatches: a training step takes its batch in microbatches, one after the other, and updates once.

A step holds the activations of one microbatch, but computes the results of the full batch. It adds up the gradients in
the layout of their update: in shards, and for a group in its buffer. Optimizers get the mean gradient, so clipping,
averages of weights and loss scaling work as without microbatches. A loss that is divided by the unmasked elements, or
by the sum of weights, is divided by their number or sum over the full batch. Everything that depends on the batch by
more than a mean differs, as with a smaller batch: batch normalization uses the statistics of a microbatch. In float16,
a sum over a microbatch can overflow that cancels out over the batch. Random numbers match the full batch: every
microbatch starts from the same seeds, and draws its rows (`operations/draws.py`).

The microbatches are the iterations of a `tf.while_loop`. The loop's body has its own step (`microbatch_scope`).
The body reads variables, and its writes (metrics, statistics, seeds) go from microbatch to microbatch as variables of
the loop. The step function is traced twice: once to learn its writes and the divisors of its losses, once in the loop.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.devices.batching import Parts
from tfshard.errors import StrategyError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import chunked_cross_entropy, loops, partial_sums
from tfshard.storage import graph_edits, group_update, steps
from tfshard.storage.microbatch import Microbatch
from tfshard.storage.microbatch_step import MicrobatchStep, microbatch_scope
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.storage.writes import Recorded, Writable

# A gradient sum belongs to a storage, or to one of its members.
_Summed: TypeAlias = tuple[Storage, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCall:
    """A call of an optimizer's `apply`.

    Attributes:
        optimizer: The optimizer.
        gradients: The gradient of each variable, or None.
        variables: The variables of Keras.
        share: The factor of the gradients in the sum: the microbatch's share of the batch, or 1 if the loss was scaled.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]
    variables: Sequence[keras.Variable | tf.Variable]
    share: float

    def sums(self, mesh: dtensor.Mesh, *, reduced: bool) -> "dict[_Summed, tf.Tensor]":
        """Return the terms that the gradients add to the sums.

        Reduced gradients are in the layout of the update, by storage. Unreduced ones are local gradients, by member.
        Nothing reduces the gradient of a variable of a kind.
        """
        sums: dict[_Summed, tf.Tensor] = {}
        members: dict[Storage, dict[int, tf.Tensor]] = collections.defaultdict(dict)
        for variable, gradient in self._present():
            if not reduced and variable.layout.kind is None:
                sums[variable.storage, variable.member] = partial_sums.stack(gradient, mesh)
            elif variable.storage.format.packed:
                members[variable.storage][variable.member] = tf.convert_to_tensor(gradient)
            else:
                sums[variable.storage, None] = variable.to_update(gradient)
        for storage, given in members.items():
            gradients = [given.get(number) for number in range(len(storage.format.members))]
            dtype = next(iter(given.values())).dtype
            sums[storage, None] = group_update.pack_gradients(storage, gradients, dtype)
        return {key: each if self.share == 1 else each * self.share for key, each in sums.items()}

    def apply(self, sums: "Mapping[_Summed, tf.Tensor]") -> None:
        """Update the variables with the summed gradients."""
        gathered = {
            storage: storage.format.gather(each)
            for (storage, member), each in sums.items()
            if member is None and storage.format.packed
        }
        gradients: dict[int, tf.Tensor] = {}
        for variable, _ in self._present():
            storage = variable.storage
            if (storage, variable.member) in sums:
                gradients[id(variable)] = _reduced(sums[storage, variable.member], variable)
            elif storage in gathered:
                gradients[id(variable)] = storage.format.read(gathered[storage], variable.member)
            else:
                gradients[id(variable)] = sums[storage, None]
        self.optimizer.apply([gradients.get(id(sharded_of(each))) for each in self.variables], self.variables)

    def _present(self) -> Iterable[tuple[ShardedVariable, tf.Tensor]]:
        for variable, gradient in zip(self.variables, self.gradients, strict=True):
            if gradient is not None:
                yield sharded_of(variable), gradient


def _reduced(stacked: tf.Tensor, variable: ShardedVariable) -> tf.Tensor:
    """Return the gradient of a variable, reduced from the sums of the devices."""
    reduction = variable.layout.reduction
    if reduction is None:
        return variable.reduced(partial_sums.total(stacked))
    with _private.stop_recording():
        return reduction.reduce_local(partial_sums.unstacked(stacked, variable.mesh), variable)


def sharded_of(variable: keras.Variable | tf.Variable) -> ShardedVariable:
    current = _private.backend_variable(variable) if isinstance(variable, keras.Variable) else variable
    if not isinstance(current, ShardedVariable):
        raise StrategyError(
            "A step with microbatches can update only variables on its strategy's mesh. Create the variables in "
            f"strategy.scope(). Received: {variable!r}"
        )
    return current


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """The result of a step function on a microbatch.

    Attributes:
        outputs: The returned leaves: replicated tensors, and any other objects, such as variables.
        structure: The structure that the function returned.
        updates: The updates that the function asked for.
    """

    outputs: list[Any]
    structure: Any
    updates: list[OptimizerCall]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Learned:
    """The behaviour of a step function, learned from one microbatch in a graph that is thrown away.

    Attributes:
        graph: The graph.
        arguments: The arguments of the microbatch: placeholders, and arguments without rows.
        traced: The result of the step function.
        sums: The terms that each update's gradients add to the sums.
        divisors: The divisors of the losses.
        state: The tensors read from and written to each storage that was written.
    """

    graph: tf.Graph
    arguments: list[Any]
    traced: _Traced
    sums: list[dict[_Summed, tf.Tensor]]
    divisors: list[tf.Tensor]
    state: dict[Writable, list[tf.Tensor]]

    def is_state(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor depends on written state, as results of metrics do."""
        state = {each.op for tensors in self.state.values() for each in tensors}
        return not state.isdisjoint(graph_edits.ancestors([tensor]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchedStep:
    """A step function that runs in microbatches.

    Attributes:
        fn: The step function.
        parts: The split of its batch.
        mesh: The mesh.
        reduce_once: True to add up gradients on each device, and reduce them after the last microbatch.
        is_kerases: True for the step of `keras.Model`, which looks at no gradient before it is reduced.
    """

    fn: Callable[..., Any]
    parts: Parts
    mesh: dtensor.Mesh
    reduce_once: bool = False
    is_kerases: bool = True

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function on a batch, inside a step that is traced.

        Raises:
            StrategyError: Gradients are to be reduced once, but a custom training step might look at them before.
        """
        learned = self._learn((args, kwargs))
        if not learned.traced.updates:
            result = self.fn(*args, **kwargs)  # The function does not train.
            chunked_cross_entropy.settle(result)
            return result
        for update in learned.traced.updates:
            if not update.optimizer.built:  # An unbuilt optimizer scales a loss by a constant.
                update.optimizer.build(list(update.variables))
        leaves = tf.nest.flatten((args, kwargs))
        split = [self.parts.split(leaf) for leaf in leaves]

        def microbatch_of(number: tf.Tensor) -> list[Any]:
            return [self.parts.part(leaf, each, number) for leaf, each in zip(leaves, split, strict=True)]

        return self._loop((args, kwargs), learned, microbatch_of, self._totals(learned, microbatch_of))

    def _trace(self, given: Any, change: Callable[[_private.Reduced], tf.Tensor]) -> _Traced:
        updates: list[OptimizerCall] = []
        step = steps.current()
        assert isinstance(step, MicrobatchStep)
        step.batch.note(given)

        scaled: set[int] = set()
        count = self.parts.count

        def later(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            if self.reduce_once and not self.is_kerases:
                raise StrategyError(
                    "With reduce_once=True, gradients are reduced over the devices after the last microbatch, so a "
                    "custom step function would see unreduced gradients. Leave reduce_once out, or use "
                    f"keras.Model's train_step. Received: {self.fn!r}"
                )
            share = 1.0 if id(optimizer) in scaled else 1 / count
            updates.append(OptimizerCall(optimizer=optimizer, gradients=gradients, variables=variables, share=share))
            state = [each for each in _private.variables_of_optimizer(optimizer) if each.name != "learning_rate"]
            step.update_later(map(sharded_of, [*variables, *state]))

        def scale(optimizer: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
            # Float16 gradients overflow where they do with the full batch.
            scaled.add(id(optimizer))
            return loss / tf.cast(count, loss.dtype)

        with _private.applied_by(later, scale), _private.reduced_losses(change):
            args, kwargs = given
            structure = self.fn(*args, **kwargs)
            chunked_cross_entropy.settle(structure)
        outputs = [self._replicated(each) for each in tf.nest.flatten(structure)]
        return _Traced(outputs=outputs, structure=structure, updates=updates)

    @property
    def _local_gradient(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        return functools.partial(partial_sums.of_gradient, mesh=self.mesh) if self.reduce_once else None

    def _sums(self, update: OptimizerCall) -> dict[_Summed, tf.Tensor]:
        return update.sums(self.mesh, reduced=not self.reduce_once)

    def _axes(self, key: _Summed, rank: int) -> Axes:
        """Return the layout of a gradient sum."""
        storage, member = key
        return storage.format.update if member is None else (axis_sizes(self.mesh).data, *(None,) * (rank - 1))

    def _replicated(self, value: Any) -> Any:
        # A variable is read when the step has ended, after the update.
        return transfer.replicate(value, self.mesh) if isinstance(value, tf.Tensor) else value

    def _learn(self, given: Any) -> _Learned:
        graph, divisors = _private.func_graph("part"), []

        def note(reduced: _private.Reduced) -> tf.Tensor:
            if reduced.divisor is not None:
                divisors.append(reduced.divisor)
            return reduced.loss

        with graph.as_default(), microbatch_scope(graph, local_gradient=self._local_gradient) as step:
            arguments = [
                tf.compat.v1.placeholder(leaf.dtype, (self.parts.rows, *leaf.shape[1:]))
                if self.parts.has_rows(leaf)
                else leaf
                for leaf in tf.nest.flatten(given)
            ]
            traced = self._trace(tf.nest.pack_sequence_as(given, arguments), note)
            sums = [self._sums(update) for update in traced.updates]
            state = {storage: step.tensors_of(storage) for storage in step.writes.storages}
        return _Learned(graph=graph, arguments=arguments, traced=traced, sums=sums, divisors=divisors, state=state)

    def _totals(self, learned: _Learned, microbatch_of: Callable[[tf.Tensor], list[Any]]) -> list[tf.Tensor]:
        """Return the divisors of the losses of the full batch: the sums over its microbatches.

        Copies the operations that compute a divisor, which are few, such as a mask of nonzero tokens.
        """
        if not learned.divisors:
            return []
        needed = graph_edits.ancestors(learned.divisors)
        for operation in needed:
            if (
                _private.is_stateful(operation)
                and operation.type != "ReadVariableOp"
                or any(each.op is operation for tensors in learned.state.values() for each in tensors)
            ):
                raise StrategyError(
                    "A loss is divided by a value that depends on the state of the model or on random numbers "
                    f"('{operation.name}'). For the full batch, this value is not known before the microbatches are "
                    "computed. Divide the loss by a value that depends only on the batch, or set "
                    "strategy.microbatches = 1."
                )

        def body(number: tf.Tensor, *totals: tf.Tensor) -> tuple[tf.Tensor, ...]:
            graph = tf.compat.v1.get_default_graph()
            arguments = zip(learned.arguments, microbatch_of(number), strict=True)
            made = {argument.ref(): each for argument, each in arguments if tf.is_tensor(argument)}
            for operation in learned.graph.get_operations():
                if operation not in needed or (operation.outputs and operation.outputs[0].ref() in made):
                    continue
                if operation.type == "Placeholder":
                    outputs = [_private.captured(operation.outputs[0])]
                else:
                    outputs = _private.copied(operation, [made[each.ref()] for each in operation.inputs], graph=graph)
                made.update((old.ref(), new) for old, new in zip(operation.outputs, outputs, strict=True))
            new = [
                total + self._replicated(made[each.ref()]) for total, each in zip(totals, learned.divisors, strict=True)
            ]
            return number + 1, *(self._replicated(each) for each in new)

        zeros = [transfer.zeros((), each.dtype, (), self.mesh) for each in learned.divisors]
        return list(self._while(body, zeros))

    def _while(self, body: Callable[..., Any], variables: Sequence[Any]) -> Sequence[Any]:
        """Run a loop over the microbatches, and return its final variables."""
        given = (tf.constant(0), *variables)
        ended: list[Any]
        _, *ended = tf.while_loop(lambda number, *_: number < self.parts.count, body, given, parallel_iterations=1)
        return ended

    def _loop(
        self,
        given: Any,
        learned: _Learned,
        microbatch_of: Callable[[tf.Tensor], list[Any]],
        totals: Sequence[tf.Tensor],
    ) -> Any:
        step, count = steps.current(), self.parts.count
        assert step is not None
        is_tensor = [isinstance(each, tf.Tensor) for each in learned.traced.outputs]
        tensors = [each for each in learned.traced.outputs if isinstance(each, tf.Tensor)]
        is_mean = [_is_mean(learned, each) for each in tensors]

        def body(
            number: tf.Tensor,
            state: list[tf.Tensor],
            sums: list[list[tf.Tensor]],
            outputs: list[tf.Tensor],
            token: tf.Tensor,
        ) -> tuple[Any, ...]:
            del token  # The token of the last microbatch suffices.
            graph = tf.compat.v1.get_default_graph()
            carried = {
                storage: loops.made_here(first if _is_seed(storage) else value)
                for storage, first, value in zip(learned.state, at_first, state, strict=True)
            }
            with microbatch_scope(graph, carried, self._local_gradient) as part:
                part.batch.microbatch = Microbatch(number=number, count=count, rows=self.parts.rows)
                done = self._trace(tf.nest.pack_sequence_as(given, microbatch_of(number)), Shares(count, totals))
                added = [
                    {
                        key: transfer.relayout(total + gradient, self._axes(key, gradient.shape.rank), self.mesh)
                        for (key, gradient), total in zip(self._sums(update).items(), before, strict=True)
                    }
                    for update, before in zip(done.updates, sums, strict=True)
                ]
                # Two updates may have members of one group.
                of_update: dict[Storage, dict[_Summed, tf.Tensor]] = {
                    storage: each for each in added for storage, member in each if member is None
                }
                waited: dict[Writable, tf.Tensor] = {
                    storage: each[storage, None] for storage, each in of_update.items()
                }
                written, used = part.finish_microbatch(waited)
                for storage, each in of_update.items():
                    each[storage, None] = waited[storage]
            assert written.keys() == learned.state.keys(), "The same function writes the same."
            ended = [each for each in done.outputs if isinstance(each, tf.Tensor)]
            return (
                number + 1,
                [written[storage] for storage in learned.state],
                [list(each.values()) for each in added],
                [
                    self._replicated(before + new / count) if mean else new
                    for before, new, mean in zip(outputs, ended, is_mean, strict=True)
                ],
                self._replicated(used),
            )

        # Each microbatch starts from the same seeds, and draws its rows of the full batch's random numbers.
        at_first = [storage.handed_on(None) for storage in learned.state]
        state, sums, outputs, token = self._while(
            body,
            (
                at_first,
                [
                    [
                        transfer.zeros(tuple(each.shape), each.dtype, self._axes(key, each.shape.rank), self.mesh)
                        for key, each in of_update.items()
                    ]
                    for of_update in learned.sums
                ],
                [
                    transfer.zeros(tuple(each.shape), each.dtype, (None,) * each.shape.rank, self.mesh)
                    for each in tensors
                ],
                transfer.zeros((), tf.float32, (), self.mesh),
            ),
        )
        step.record.tokens.append(token)
        for storage, value in zip(learned.state, state, strict=True):
            step.writes.record(storage, Recorded(base=value, written={}))
        for update, keys, means in zip(learned.traced.updates, learned.sums, sums, strict=True):
            update.apply(dict(zip(keys, means, strict=True)))
        found = iter(outputs)
        flat = [next(found) if tensor else each for tensor, each in zip(is_tensor, learned.traced.outputs, strict=True)]
        return tf.nest.pack_sequence_as(learned.traced.structure, flat)


def parts_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    count: int,
    reduce_once: bool,
    mesh: dtensor.Mesh,
) -> MicrobatchedStep | None:
    """Return the microbatches of a step function.

    Returns None in eager code, for a model's evaluation and predictions, and if the batch cannot be split.

    Raises:
        StrategyError: The tensors of the batch have different numbers of rows.
    """
    model = getattr(fn, "__self__", None)
    name = getattr(fn, "__name__", "") if isinstance(model, keras.Model) else ""
    is_kerases = name == "train_step" and getattr(type(model), name) is keras.Model.train_step
    if count == 1 or _private.is_eager() or name in ("test_step", "predict_step"):
        return None
    parts = Parts.of((args, kwargs), count, mesh)
    if parts.count == 1:
        return None
    return MicrobatchedStep(fn=fn, parts=parts, mesh=mesh, reduce_once=reduce_once, is_kerases=is_kerases)


def _is_seed(storage: Writable) -> bool:
    """Return whether a storage is the state of a `keras.random.SeedGenerator`."""
    return _private.is_seed_state(storage.name)


class Shares:
    """Scale the losses of microbatches so that their mean is the loss of the full batch.

    Args:
        count: How many microbatches.
        totals: The divisors of the losses of the full batch, in the order of the losses.
    """

    def __init__(self, count: int, totals: Sequence[tf.Tensor]):
        self._count = count
        self._totals = iter(totals)

    def __call__(self, reduced: _private.Reduced) -> tf.Tensor:
        loss, count = reduced.loss, tf.cast(self._count, reduced.loss.dtype)
        if reduced.reduction == "sum":
            return loss * count
        if reduced.divisor is None:
            return loss
        total = next(self._totals)
        return loss * tf.math.divide_no_nan(tf.cast(reduced.divisor, loss.dtype) * count, tf.cast(total, loss.dtype))


def _is_mean(learned: _Learned, output: tf.Tensor) -> bool:
    """Return whether an output of the step function is the mean over microbatches, such as a loss.

    Otherwise the output is the last microbatch's: a result of a metric that all microbatches updated.
    """
    if learned.is_state(output):
        return False
    if output.dtype.is_floating and output.shape.rank == 0:
        return True
    raise StrategyError(
        "A step function with microbatches can return results of metrics, and scalars that are means over the "
        "batch, such as a loss. Return nothing else from it, or set strategy.microbatches = 1. Received: a tensor "
        f"of shape={output.shape}, dtype={output.dtype.name} ('{output.name}')"
    )
