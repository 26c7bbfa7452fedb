"""Plan a model: decide from the layouts of its variables what devices store and send."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfshard.graph import auto_layout, model_specs
from tfshard.graph.model_specs import MeshLike, ModelOrSpecs, OptimizerLike, SlotSpec
from tfshard.layouts import gradient_reduction, variable_kind
from tfshard.layouts.config import (
    Microbatches,
    Offload,
    Precision,
    ReshardPolicy,
    ShardingConfig,
    ZeroStage,
)
from tfshard.layouts.dtype_rules import DtypeByPath
from tfshard.layouts.parameter_analyzer import DEFAULT, ParameterAnalyzer
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_kind import VariableKind
from tfshard.planning import (
    activation_traffic,
    context_traffic,
    gather_counts,
    gradient_dtypes,
    linter,
    statistics_traffic,
    step_collectives,
    step_graph,
    variable_traffic,
)
from tfshard.planning.links import Links, LinksLike
from tfshard.planning.overlap import overlap_of
from tfshard.planning.peak import UpdateTiming, peak_of
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.step_graph import StepGraph


def plan(
    model_or_specs: ModelOrSpecs,
    mesh_shape: MeshLike,
    layout_map: Any = None,
    zero_stage: int = 3,
    analyzer: ParameterAnalyzer | None = DEFAULT,
    optimizer: OptimizerLike = None,
    inputs: Any = None,
    reshard_after_forward: bool | str | Sequence[str] = True,
    slot_dtype: DtypeByPath = None,
    microbatches: int = 1,
    reduce_once: bool = False,
    offload: str | None = None,
    links: LinksLike | None = None,
    compute_seconds: float | None = None,
    compression: Any = None,
    tables: VariableKind | str | Sequence[str] | None = None,
    gather_dtype: DtypeByPath = None,
    experts: bool | str | Sequence[str] = False,
) -> ShardingPlan:
    """Plan a model on a mesh, without a device and without a step.

    Args:
        model_or_specs: A built `keras.Model`, also one from `tfshard.abstract_model`, or a list of `VariableSpec`.
        mesh_shape: Axis name to size, such as `{"batch": 64, "model": 8}`, of any size; or a mesh.
        layout_map: As for `tfshard.ShardedStrategy`.
        zero_stage: 0 to 3.
        analyzer: Makes the groups; None for none.
        optimizer: An optimizer or its name, for the bytes of the slots. By default the optimizer that the model was
            compiled with; without one, no slots.
        inputs: The inputs of a step (a batch, or anything with shapes and dtypes). They give the peak of a step, and
            the bytes of activations over a model axis; without inputs, only the number of these collectives is
            predicted.
        reshard_after_forward: As for `tfshard.ShardedStrategy`.
        slot_dtype: As for `tfshard.ShardedStrategy`.
        microbatches: As for `tfshard.ShardedStrategy`. It divides the rows of a device.
        reduce_once: As for `tfshard.ShardedStrategy`.
        offload: As for `tfshard.ShardedStrategy` on GPUs: offloaded bytes of slots do not count for the devices.
        links: `tfshard.planning.Links`, or the file of `tfshard profile-network --save=FILE`. They give the time of the
            collectives of a step.
        compute_seconds: The time in which a device computes a step (`profile_step(...).timeline.computing_seconds`).
            With `links` and `inputs`, the plan tells how much of the sending time this computation hides.
        compression: As for `tfshard.ShardedStrategy`.
        tables: As for `tfshard.ShardedStrategy`. The plan gives the largest possible traffic of tables.
        gather_dtype: As for `tfshard.ShardedStrategy`.
        experts: As for `tfshard.ShardedStrategy`. The plan gives the largest possible traffic of tokens.

    Returns:
        The `ShardingPlan`. Its `refused` lists what `compile` would refuse in the model.

    Raises:
        MeshError: The mesh cannot exist.
        LayoutError: The layout map does not fit the mesh or the model.
        StrategyError: The model is not built; the stage, optimizer or compression is unknown; or the links cannot be
            read, or belong to other hosts.

    >>> import keras, tfshard
    >>> def build():
    ...     layers = [keras.layers.Dense(16384, name="up"), keras.layers.Dense(4096, name="down")]
    ...     return keras.Sequential([keras.Input((4096,)), *layers], name="mlp")
    >>> model = tfshard.abstract_model(build)
    >>> plan = tfshard.plan(model, {"batch": 64}, optimizer="adam")
    >>> plan.bytes_on_one_device("parameter") // plan.bytes_per_device("parameter")
    64
    >>> [(c.kind, c.what) for c in plan.collectives if c.kind == "all-gather"]
    [('all-gather', 'mlp/up/kernel'), ('all-gather', 'group 0'), ('all-gather', 'mlp/down/kernel')]
    """
    sizes = model_specs.mesh_sizes(mesh_shape)
    specs = model_specs.specs_of(model_or_specs)
    automatic, kinds = (
        auto_layout.is_auto(layout_map),
        variable_kind.from_options(tables=tables, experts=experts),
    )
    resolved = auto_layout.resolve(layout_map, model_or_specs, sizes)
    if automatic:
        resolved = variable_kind.without_kinds(resolved, kinds)
    config = ShardingConfig(
        layout_map=resolved,
        zero_stage=ZeroStage.from_number(zero_stage),
        analyzer=analyzer,
        reshard=ReshardPolicy.from_options(reshard_after_forward),
        precision=Precision.from_options(slot_dtype=slot_dtype, gather_dtype=gather_dtype),
        microbatches=Microbatches(count=microbatches, reduce_once=reduce_once),
        offload=Offload.from_option(offload),
        reduction=gradient_reduction.from_option(compression),
        kinds=kinds,
    )
    placement = ModelPlacement.of(specs, config, mesh_shape=sizes)
    return plan_placement(
        placement,
        model_or_specs,
        optimizer=optimizer,
        inputs=inputs,
        automatic=automatic,
        links=links,
        compute_seconds=compute_seconds,
    )


def plan_placement(
    placement: ModelPlacement,
    model_or_specs: ModelOrSpecs,
    *,
    optimizer: OptimizerLike = None,
    inputs: Any = None,
    automatic: bool = False,
    links: LinksLike | None = None,
    compute_seconds: float | None = None,
) -> ShardingPlan:
    """Predict what a placement stores and sends.

    Args:
        placement: The layouts of the model's variables.
        model_or_specs: As for `plan`.
        optimizer: As for `plan`.
        inputs: As for `plan`.
        automatic: True if the layout map was found for the model.
        links: As for `plan`.
        compute_seconds: As for `plan`.

    Raises:
        LayoutError: The layout map does not fit the model.
        StrategyError: The optimizer is unknown, or the links do not fit.
    """
    known = None if links is None else Links.from_any(links)
    placement.check()
    if optimizer is None:
        optimizer = getattr(model_or_specs, "optimizer", None)
    slots = model_specs.slots_of(optimizer, placement.specs)
    microbatches = placement.config.microbatches
    refused: list[linter.Finding] = []
    if isinstance(model_or_specs, keras.Model):
        refused = linter.refusals(model_or_specs, placement, automatic=automatic)
    is_called = inputs is not None and isinstance(model_or_specs, keras.Model)
    graph: StepGraph | None = None
    if is_called and not placement.kinds():
        called_on = variable_traffic.inputs_of_microbatch(microbatches, inputs, placement.mesh_shape)
        graph = step_graph.trace(model_or_specs, placement, inputs=called_on)
    planned = without_peak(
        placement,
        model_or_specs,
        slots=slots,
        optimizer=optimizer,
        inputs=inputs,
        refused=[str(finding) for finding in refused],
        graph=graph,
    )
    if known is not None:
        planned = planned.over(known)
    if not is_called:
        return planned
    if graph is None:
        nouns = (f"the peak of a step with {kind.noun}" for kind in placement.kinds())
        unknown = _joined(planned.unknown, *dict.fromkeys(nouns))
        return dataclasses.replace(planned, unknown=unknown)
    if known is not None and compute_seconds is not None and microbatches.count == 1:
        needs_all = UpdateTiming.of(optimizer).needs_all_gradients
        with_collectives = step_collectives.trace(
            model_or_specs, placement, inputs=inputs, needs_all_gradients=needs_all
        )
        overlap = overlap_of(with_collectives, known, placement.mesh_shape, compute_seconds)
        planned = dataclasses.replace(planned, overlap=overlap)
    peak = peak_of(
        graph,
        placement,
        stored_bytes=planned.resting_bytes(),
        slots=slots,
        timing=UpdateTiming.of(optimizer),
        waits_in_backward=bool(statistics_traffic.statistics_of(model_or_specs)),
    )
    return dataclasses.replace(planned, peak=peak)


def without_peak(
    placement: ModelPlacement,
    model_or_specs: ModelOrSpecs,
    *,
    slots: Sequence[SlotSpec],
    optimizer: OptimizerLike,
    inputs: Any,
    refused: Sequence[str] = (),
    graph: StepGraph | None = None,
) -> ShardingPlan:
    """Plan without the peak of a step.

    Args:
        placement: The layouts of the model's variables.
        model_or_specs: As for `plan`.
        slots: The optimizer's variables.
        optimizer: As for `plan`.
        inputs: As for `plan`.
        refused: The faults that `compile` would refuse.
        graph: The graph of the step or of one of its microbatches, if it is traced already.
    """
    microbatches = placement.config.microbatches
    called_on = variable_traffic.inputs_of_microbatch(microbatches, inputs, placement.mesh_shape)
    sent = activation_traffic.plan(model_or_specs, placement.variables, placement.mesh_shape, called_on)
    exchanged, why = context_traffic.plan(model_or_specs, placement, called_on)
    sent = dataclasses.replace(sent, unknown=_joined(sent.unknown, why))
    statistics: list[variable_traffic.Collective] = []
    if isinstance(model_or_specs, keras.Model) and (found := statistics_traffic.statistics_of(model_or_specs)):
        if placement.mesh_shape.has_tensor_parallelism:
            more = f"DTensor decides how '{found[0].path}' computes batch statistics on a mesh with a model axis"
            sent = dataclasses.replace(sent, unknown=_joined(sent.unknown, more))
        else:
            statistics = statistics_traffic.collectives(found, placement.mesh_shape)
    of_kinds = [
        each
        for kind, layouts in placement.kinds().items()
        for each in kind.collectives(
            model_or_specs, layouts, placement.mesh_shape, optimizer=optimizer, inputs=called_on
        )
    ]
    return ShardingPlan.from_placement(
        placement,
        slots=slots,
        activations=[
            dataclasses.replace(each, count=each.count * microbatches.count)
            for each in (*of_kinds, *sent.collectives, *exchanged, *statistics)
        ],
        unknown=sent.unknown,
        uses=sent.uses,
        gathers=gather_counts.gathers_of(model_or_specs, placement, inputs, graph=graph),
        reductions=gradient_dtypes.reductions_of(model_or_specs, placement.variables, optimizer, inputs),
        refused=refused,
    )


def _joined(*unknown: str) -> str:
    return "; ".join(text for text in unknown if text)
