"""What a device holds at the peak of a training step, predicted from layouts and from the turns of a step."""

import dataclasses
from collections.abc import Sequence

from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning import variable_traffic
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.storage import turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of the fullest device at the peak of a step. A *unit* is a variable that stands alone, or a group.

    Attributes:
        stored_bytes: Parameters, untrained state and slots at rest.
        gathered_bytes: What is gathered over the batch axis. Stage 3: the two largest units, of which one is used and
            the next comes, and all that stays gathered; stages 1 and 2: the new values of three.
        gradient_bytes: Gradients: that of the largest unit, whole, and what waits for the update. From stage 1 on a
            unit is updated as soon as its gradient is there, unless the optimizer needs all first.
        reduced_bytes: The buffers of reductions: as large as what they reduce, the largest unit; at stage 1 twice all,
            if they are reduced as one, since the optimizer needs all.
        updated_bytes: New values of parameters and slots: of the largest unit; at stage 0 of all.
        activation_bytes: Of the device's share of the batch; as given by the user.
    """

    stored_bytes: int = 0
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    updated_bytes: int = 0
    activation_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """All together."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(Peak))


def peak_of(
    placement: ModelPlacement,
    plan: ShardingPlan,
    *,
    gathering: turns.Gathering,
    needs_all_gradients: bool,
    activation_bytes: int = 0,
) -> Peak:
    """The peak of a step.

    Args:
        placement: Where the variables go.
        plan: What is stored of them.
        gathering: How steps gather.
        needs_all_gradients: Whether no variable can be updated before all gradients are there (`global_clipnorm`).
        activation_bytes: Of the device's share of the batch.
    """
    mesh_shape, stage = placement.mesh_shape, placement.zero_stage
    stored = sum(plan.bytes_per_device(kind) for kind in ("parameter", "state", "slot"))
    waiting = plan.bytes_per_device("gradient")
    if stage == 0 or mesh_shape.data_size == 1:
        updated = plan.bytes_per_device("slot") + plan.bytes_per_device("parameter")
        return Peak(
            stored_bytes=stored, updated_bytes=updated, gradient_bytes=waiting, activation_bytes=activation_bytes
        )  # fmt: skip
    units = variable_traffic.units(placement.variables)
    whole = {id(unit): variable_traffic.whole_bytes(unit, mesh_shape) for unit in units}

    def largest(some: Sequence[VariableLayout], count: int) -> int:
        return sum(sorted((whole[id(unit)] for unit in some), reverse=True)[:count])

    trained = [unit for unit in units if unit.spec.trainable]
    moved = [unit for unit in units if variable_traffic.is_gathered(unit, stage)]
    members = variable_traffic.members_of(placement.variables)
    paths = {name: [each.spec.path for each in of] for name, of in members.items()}
    kept = [unit for unit in moved if stage == 3 and gathering.keeps(paths[variable_traffic.unit_name(unit)])]
    if not needs_all_gradients:
        # Those of groups and of padded variables are cut when they are packed.
        waiting = sum(
            variable_traffic.gradient_bytes(unit, mesh_shape, scattered=False)
            for unit in trained
            if unit.flat is not None
        )
    reduced = largest(trained, 1)
    if needs_all_gradients and stage == 1:
        reduced = 2 * largest(trained, len(trained))
    shards = variable_traffic.updated_bytes(trained, mesh_shape=mesh_shape)
    share = largest(trained, 1) / max(1, sum(whole[id(unit)] for unit in trained))
    return Peak(
        stored_bytes=stored,
        gathered_bytes=largest([unit for unit in moved if unit not in kept], 2 if stage == 3 else 3)
        + largest(kept, len(kept)),
        gradient_bytes=largest(trained, 1) + waiting,
        reduced_bytes=reduced,
        updated_bytes=int(share * (shards + plan.bytes_per_device("slot"))),
        activation_bytes=activation_bytes,
    )
