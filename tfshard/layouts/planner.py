"""The seam between the runtime and plans: the one module of the runtime that calls `tfshard.planning`.

A training step needs no plan. `ShardedStrategy.plan`, `ParameterAnalyzer.analyze`, the lint of `compile` and
`strategy="auto"` do; they come here. tests/test_design.py checks that no other module of the runtime imports
`tfshard.planning`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.placement import ModelPlacement

if TYPE_CHECKING:
    import keras

    from tfshard.planning.advice import Advice as Advice
    from tfshard.planning.advice import Candidate as Candidate
    from tfshard.planning.links import LinksLike as LinksLike
    from tfshard.planning.machine import Machine as Machine
    from tfshard.planning.sharding_plan import ShardingPlan as ShardingPlan


def plan(model_or_specs: "keras.Model | Sequence[VariableSpec]", mesh: Any, **settings: Any) -> "ShardingPlan":
    """Return `tfshard.plan(model_or_specs, mesh, **settings)`."""
    from tfshard.planning import analyzer

    return analyzer.plan(model_or_specs, mesh, **settings)


def plan_placement(placement: ModelPlacement, model: "keras.Model", **settings: Any) -> "ShardingPlan":
    """Return the plan of a model that is placed: `tfshard.planning.analyzer.plan_placement`."""
    from tfshard.planning import analyzer

    return analyzer.plan_placement(placement, model, **settings)


def advise(model: "keras.Model", devices: int, memory: int, batch: int, **settings: Any) -> "Advice":
    """Return `tfshard.advise(model, devices, memory, batch, **settings)`."""
    from tfshard.planning import advice

    return advice.advise(model, devices, memory, batch, **settings)


def known_machine() -> "Machine | None":
    """Return the described machine that is most like the devices of this process, or None."""
    from tfshard.planning import known_machines

    return known_machines.here()


def check_layouts(model: "keras.Model", placement: ModelPlacement, *, automatic: bool) -> None:
    """Lint a model as `compile` does.

    Args:
        model: A built model.
        placement: The layouts of its variables.
        automatic: True if tfshard found the layout map for the model.

    Raises:
        LayoutError: The layout map does not fit the model.
    """
    from tfshard.planning import linter

    (linter.check_found if automatic else linter.check)(model, placement)
