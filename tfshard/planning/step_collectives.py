"""Add stand-ins for collectives and updates to the graph of a step, to predict the time of the step.

Only `overlap`, `step_times` and the simulator use this. The operations stand for collectives, and compute nothing.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts import variable_layout
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning import variable_traffic
from tfshard.planning.step_graph import Gradient, Kind, StandIn, StepGraph, Tracer
from tfshard.storage import unshard_schedule


def trace(
    model: ModelOrSpecs,
    placement: ModelPlacement,
    *,
    inputs: Any = None,
    needs_all_gradients: bool = False,
    recompute: str | Sequence[str] | None = None,
) -> StepGraph:
    """Trace a step with its collectives and updates.

    Args:
        model: As for `step_graph.trace`.
        placement: As for `step_graph.trace`.
        inputs: As for `step_graph.trace`.
        needs_all_gradients: True if no update may begin before all gradients exist (`global_clipnorm`).
        recompute: As for `step_graph.trace`.

    Raises:
        LayoutError: As for `step_graph.trace`.
    """
    return _CollectiveTracer(placement, needs_all_gradients).run(model, inputs, recompute)


class _CollectiveTracer(Tracer):
    """Traces a step with its collectives and updates.

    Args:
        placement: The layouts of the model's variables.
        needs_all_gradients: True if updates wait for all gradients.
    """

    def __init__(self, placement: ModelPlacement, needs_all_gradients: bool):
        super().__init__(placement)
        self._needs_all = needs_all_gradients
        # Scattered gradients, as shards, with the name of their unit; one for each use.
        self._scattered: list[tuple[str, tf.Tensor]] = []
        # For a variable outside of groups, the number of its uses, and its gradients that join the merged all-reduce.
        self._reads: dict[str, int] = collections.Counter()
        self._joining: dict[str, list[tf.Tensor]] = collections.defaultdict(list)

    def _read_alone(self, name: str, layout: VariableLayout, value: tf.Tensor) -> tf.Tensor:
        if not layout.spec.trainable or self._devices == 1:
            return super()._read_alone(name, layout, value)
        self._reads[name] += 1

        def reduce(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
            full = tf.convert_to_tensor(upstream)
            self._gradients.append(Gradient(layout=layout, tensor=full))
            if not self._is_scattered(layout) or variable_traffic.joins(layout, self._reads[name]):
                self._joining[name].append(full)
                return full
            # The step transposes shards, not the full gradient (`gradient.scatter`).
            transposed = full.op if full.op.type == "Transpose" else None
            given = full if transposed is None else transposed.inputs[0]
            shard = self._copy(self._collective(given, sent=self._local_bytes(layout), is_cut=True))
            if transposed is not None:
                shard = tf.transpose(shard, transposed.inputs[1])
                self._stand_ins[shard.op] = StandIn(kind=Kind.COPY)
            self._scattered.append((name, shard))
            return shard

        return tf.custom_gradient(lambda given: (tf.identity(given), reduce))(value)

    def _is_scattered(self, layout: VariableLayout) -> bool:
        """Return True if the step reduces a gradient alone, and each device keeps its shard."""
        alone = layout.flat is None and layout.sharded is not None
        return alone and layout.spec.trainable and layout.update_sharded and self._devices > 1

    def _after_backward(self, gradients: Mapping[str, tf.Tensor]) -> list[unshard_schedule.WaitingGradient]:
        scattered = dict(self._scattered)
        merged: dict[tf.DType, dict[str, list[tf.Tensor]]] = {}
        waiting: dict[str, tf.Tensor] = {}
        for name, members in self._units.items():
            for each in members:
                gradient = gradients.get(each.spec.path)
                if gradient is None:
                    continue
                if each.grouped or self._devices == 1:
                    self._gradients.append(Gradient(layout=each, tensor=gradient))
                if variable_layout.is_added_up_by_replicas(each, self._mesh_shape):
                    if name not in scattered:
                        sent = self._local_bytes(each)
                        waiting[name] = self._collective(gradient, sent=sent, by_replicas=True)
                    continue
                local = self._joining.get(name, [] if name in scattered else [gradient])
                if local:
                    merged.setdefault(gradient.dtype, {})[each.spec.path] = local
        joined: dict[str, list[tf.Tensor]] = {}
        for together in merged.values():
            joined |= self._merged(together)
        shards: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        for name, shard in self._scattered:
            shards[name].append(shard)
        for name, local in shards.items():
            waiting[name] = self._sum([*local, *joined.pop(name, [])])
        waiting |= {name: self._sum(local) for name, local in joined.items()}
        if self._needs_all:
            waiting = dict(zip(waiting, tf.raw_ops.IdentityN(input=list(waiting.values())), strict=True))
        updated = {name: self._updated(name, gradient) for name, gradient in waiting.items()}
        self._results += updated.values()
        return [
            unshard_schedule.WaitingGradient(
                key=name,
                tensor=tensor,
                is_scattered=self._units[name][0].gradient != self._units[name][0].compute,
                updated=updated[name] if scattered[name] is tensor else None,
            )
            for name, tensor in self._scattered
        ]

    def _stand_in(self, tensor: tf.Tensor, stand_in: StandIn) -> tf.Tensor:
        made = tf.identity(tensor)
        self._stand_ins[made.op] = stand_in
        return made

    def _collective(
        self, tensor: tf.Tensor, *, sent: int, is_cut: bool = False, by_replicas: bool = False
    ) -> tf.Tensor:
        return self._stand_in(tensor, StandIn(kind=Kind.REDUCTION, sent=sent, is_cut=is_cut, by_replicas=by_replicas))

    def _copy(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._stand_in(tensor, StandIn(kind=Kind.COPY))

    def _sum(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a tensor that waits for some, of any shape."""
        if len(tensors) == 1:
            return tensors[0]
        made = tf.concat([tf.reshape(each, [-1]) for each in tensors], axis=0)
        self._stand_ins[made.op] = StandIn(kind=Kind.COPY)
        return made

    def _local_bytes(self, layout: VariableLayout) -> int:
        """Return the bytes of a gradient on one device, full over the batch axis."""
        return variable_traffic.device_bytes(layout.spec.shape, layout.compute, self._mesh_shape, layout.spec.dtype)

    def _merged(self, gradients: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, list[tf.Tensor]]:
        """Reduce gradients of one dtype in one all-reduce, with the loss.

        Args:
            gradients: By path, one for each use.

        Returns:
            The gradients of the members of each unit, by its name.
        """
        sizes = {each.spec.path: self._local_bytes(each) for each in self._placement.variables}
        parts = {path: list(local) for path, local in gradients.items()}
        if self._devices > 1:
            every = [each for local in gradients.values() for each in local]
            joined = self._sum([tf.cast(self._loss, every[0].dtype), *every])
            reduced = self._collective(joined, sent=sum(len(local) * sizes[path] for path, local in parts.items()))
            parts = {path: [self._copy(reduced) for _ in local] for path, local in parts.items()}
        found: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        for path, local in parts.items():
            found[self._name_of[path]].append(self._sum(local))
        return found

    def _updated(self, name: str, gradient: tf.Tensor) -> tf.Tensor:
        """Update a unit, and gather it where the step stores it in full and updates shards."""
        first = self._units[name][0]
        slot = first.slot(first.spec)
        shard = variable_traffic.device_bytes(slot.storage_shape, slot.storage, self._mesh_shape, first.spec.dtype)
        updated = self._stand_in(gradient, StandIn(kind=Kind.UPDATE, updated=shard))
        zero_stage = self._zero_stage
        is_sharded = zero_stage.shard_slots and not zero_stage.shard_params and self._devices > 1
        if not (is_sharded and variable_traffic.is_gathered(first, zero_stage)):
            return updated
        sent = variable_traffic.whole_bytes(first, self._mesh_shape)
        return self._stand_in(updated, StandIn(kind=Kind.GATHER, sent=sent))
