"""The seam between the runtime and plans: the one module of the runtime that calls `tfshard.planning`.

A training step needs no plan. `ShardedStrategy.plan`, `ParameterAnalyzer.analyze` and the lint of `compile` do; they
come here. tests/test_design.py checks that no other module of the runtime imports `tfshard.planning`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.placement import ModelPlacement

if TYPE_CHECKING:
    import keras

    from tfshard.planning.links import LinksLike as LinksLike
    from tfshard.planning.sharding_plan import ShardingPlan as ShardingPlan


def plan(model_or_specs: "keras.Model | Sequence[VariableSpec]", mesh: Any, **settings: Any) -> "ShardingPlan":
    """Return `tfshard.plan(model_or_specs, mesh, **settings)`."""
    from tfshard.planning import analyzer

    return analyzer.plan(model_or_specs, mesh, **settings)


def plan_placement(placement: ModelPlacement, model: "keras.Model", **settings: Any) -> "ShardingPlan":
    """Return the plan of a model that is placed: `tfshard.planning.analyzer.plan_placement`."""
    from tfshard.planning import analyzer

    return analyzer.plan_placement(placement, model, **settings)


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
