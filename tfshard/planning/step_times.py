"""Predict the time of a training step on a machine: the work of its operations at the machine's prices."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard.graph.model_specs import SlotSpec
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.placement import ModelPlacement
from tfshard.operations import blocks
from tfshard.planning import (
    activation_traffic,
    context_traffic,
    overlap,
    statistics_traffic,
    step_collectives,
    variable_traffic,
)
from tfshard.planning.machine import Machine, Work, work_of
from tfshard.planning.peak import UpdateTiming, slot_bytes_of
from tfshard.planning.statistics_traffic import Statistics
from tfshard.planning.step_graph import StepGraph
from tfshard.planning.variable_traffic import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: The time of the full step.
        compute_seconds: The time in which a device computes.
        collective_seconds: The time in which a device sends, partly while it computes.
    """

    seconds: float
    compute_seconds: float
    collective_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step, or a microbatch of one, that was traced once for every mesh on which a device computes the same.

    Attributes:
        graph: The graph of the step.
        work: The work of its operations.
        sent: Its collectives over model axes.
        statistics: The statistics of each layer that normalizes by the batch.
        unknown: Traffic with unknown bytes, or an empty text.
    """

    graph: StepGraph
    work: Mapping[tf.Operation, Work]
    sent: tuple[Collective, ...]
    statistics: tuple[Statistics, ...]
    unknown: str

    @functools.cached_property
    def total(self) -> Work:
        """The work of all operations on one device."""
        return Work.total(self.work.values())

    def synchronizing(self, mesh_shape: Mapping[str, int]) -> Work:
        """Return the additional work on a mesh of layers that normalize by the full batch."""
        return Work(operations=statistics_traffic.operations(self.statistics, mesh_shape))

    @classmethod
    def of(
        cls,
        model: keras.Model,
        placement: ModelPlacement,
        *,
        inputs: Any,
        timing: UpdateTiming | None = None,
        recompute: str | Sequence[str] | None = None,
    ) -> "TracedStep":
        """Trace a step.

        Args:
            model: A built model.
            placement: The layouts of the model's variables.
            inputs: The inputs of the model, over all devices.
            timing: When updates can run. By default an update runs once its gradient exists.
            recompute: Blocks to compute again in addition to the marked blocks, as for `blocks.marked`.

        Raises:
            LayoutError: The model cannot be called on its inputs.
        """
        graph = step_collectives.trace(
            model,
            placement,
            inputs=inputs,
            needs_all_gradients=(timing or UpdateTiming()).needs_all_gradients,
            recompute=recompute,
        )
        with contextlib.nullcontext() if recompute is None else blocks.marked(model, recompute):
            sent = activation_traffic.plan(model, placement.variables, placement.mesh_shape, inputs)
            exchanged, _ = context_traffic.plan(model, placement, inputs)
        return cls(
            graph=graph,
            work=work_of(graph),
            sent=(*sent.collectives, *exchanged),
            statistics=statistics_traffic.statistics_of(model),
            unknown=sent.unknown,
        )

    def on(
        self, machine: Machine, mesh_shape: Mapping[str, int], *, updated_bytes: int, microbatches: int = 1
    ) -> StepTime:
        """Return the time of the step on a mesh of a machine's devices.

        Collectives over the batch axis run beside the computation, one after the other, as soon as they can
        (`overlap`). The step waits for collectives over model axes. Devices that share cores compute one after the
        other, and hide nothing.

        Args:
            machine: The machine.
            mesh_shape: The mesh.
            updated_bytes: Bytes of weights and slots that a device writes after the step, or after the last microbatch
                (`updated_bytes_of`).
            microbatches: The number of microbatches of a step. This graph is the graph of one microbatch.
        """
        mesh_axes, links = MeshAxes.of(mesh_shape), machine.links

        @functools.cache
        def sending(kind: str, axis: str, bytes_: int | None) -> float:
            each = Collective(kind=kind, what="", axis=axis, count=1, bytes=bytes_, formula="")
            return links.seconds(each, mesh_axes) or 0.0

        def seconds(operation: tf.Operation) -> float:
            cost = self.graph.stand_ins.get(operation)
            if cost is not None and cost.is_collective:
                return overlap.sending_seconds(cost, links, mesh_axes) if mesh_axes.data_size > 1 else 0.0
            return machine.seconds(self.work[operation])

        count = microbatches
        waits = (*self.sent, *statistics_traffic.collectives(self.statistics, mesh_shape))
        waited = sum(each.count * sending(each.kind, each.axis, each.bytes) for each in waits)
        updates, synchronizing = Work(updated_bytes=updated_bytes, steps=1), self.synchronizing(mesh_shape)
        one = overlap.run_on_paper(self.graph, seconds)
        sent = count * (one.collective_seconds + waited)
        if machine.cores is not None:
            devices = min(links.devices_per_host, math.prod(mesh_axes.values()))
            work = Work.total([*count * [self.total, synchronizing], updates])
            computing = machine.seconds(machine.in_turns(work, devices))
            return StepTime(seconds=computing + sent, compute_seconds=computing, collective_seconds=sent)
        last, besides = machine.seconds(updates), machine.seconds(synchronizing)
        return StepTime(
            seconds=count * (one.seconds + waited + besides) + last,
            compute_seconds=count * (one.compute_seconds + besides) + last,
            collective_seconds=sent,
        )


def updated_bytes_of(placement: ModelPlacement, slots: Sequence[SlotSpec]) -> int:
    """Return the bytes of weights and slots that an optimizer writes on one device."""
    weights = variable_traffic.updated_bytes(placement.variables, mesh_shape=placement.mesh_shape)
    return weights + sum(slot_bytes_of(placement, slots).values())
