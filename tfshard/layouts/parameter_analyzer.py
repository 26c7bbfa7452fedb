"""ParameterAnalyzer: the policy of groups that users choose; it can also plan a model with its groups."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfshard.layouts import network_sizes, planner
from tfshard.layouts.config import GroupPolicy
from tfshard.layouts.layout_map import VariableSpec

if TYPE_CHECKING:
    import keras

    from tfshard.layouts.planner import ShardingPlan


@dataclasses.dataclass(frozen=True)
class ParameterAnalyzer(GroupPolicy):
    """Decides which variables share a buffer, so that a step gathers, reduces and updates them as one tensor.

    A variable below the threshold joins a group with others of the same dtype, the same model axes and the same
    trainability, in the order of the model's layers. Larger variables stand alone: they gain nothing from a group, and
    a step would have to gather the whole group before it uses the first of them. Gradient buckets follow the same idea
    (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2).

    Args:
        group_threshold_bytes: Variables of fewer bytes are grouped. 0: none.
        max_group_bytes: A group is closed before its buffer, padding included and over all model shards, exceeds it.
        min_group_bytes: A group whose variables have fewer bytes joins the group before it, which may then exceed the
            maximum. If no other group has the same kind of variables, the variables stand alone. 0: groups of any size.

    Raises:
        StrategyError: A size that is not an integer or is negative, or a minimum that exceeds the maximum.

    Example:

    >>> import tfshard
    >>> from tfshard.layouts import VariableSpec
    >>> specs = [
    ...     VariableSpec(path="up/kernel", shape=(1024, 1024)),
    ...     VariableSpec(path="up/bias", shape=(1024,)),
    ...     VariableSpec(path="down/bias", shape=(10,)),
    ... ]
    >>> plan = tfshard.ParameterAnalyzer().analyze(specs, {"batch": 4})
    >>> [member.path for member in plan.groups[0].members], plan.groups[0].storage_shape
    (['up/bias', 'down/bias'], (4, 259))
    """

    @classmethod
    def for_network(cls, network: Any) -> "ParameterAnalyzer":
        """Return the analyzer for a measured network, by the rules of `tfshard.presets`.

        The all-gather over all devices decides: between the hosts if the file has several, else within the host.

        Args:
            network: The path of a file that `tfshard profile-network --save=FILE` wrote, or `tfshard.planning.Links`.

        Raises:
            StrategyError: The file cannot be read, or holds something else.

        Example:

        >>> import tfshard
        >>> from tfshard.planning import Link, Links
        >>> fast, slow = Link(latency=1e-5, bandwidth=1e10), Link(latency=13e-3, bandwidth=12.2e6)
        >>> tfshard.ParameterAnalyzer.for_network(Links.of(devices_per_host=4, inside=fast, between=slow))
        ParameterAnalyzer(group_threshold_bytes=524288, max_group_bytes=4194304, min_group_bytes=0)
        """
        return cls(**network_sizes.sizes_for(*network_sizes.link_of(network)))

    def analyze(
        self,
        model_or_specs: "keras.Model | Sequence[VariableSpec]",
        mesh: Any,
        zero_stage: int = 3,
        layout_map: Any = None,
        optimizer: "keras.optimizers.Optimizer | str | None" = None,
    ) -> "ShardingPlan":
        """Plan a model: groups, layouts, bytes and collectives. See `tfshard.plan`.

        Args:
            model_or_specs: A built `keras.Model`, also one from `tfshard.abstract_model`, or a list of
                `VariableSpec`.
            mesh: A mesh from `tfshard.create_mesh`, or a mapping from axis name to size.
            zero_stage: 0 to 3.
            layout_map: As for `tfshard.ShardedStrategy`.
            optimizer: As for `tfshard.plan`.
        """
        return planner.plan(
            model_or_specs, mesh, layout_map=layout_map, zero_stage=zero_stage, analyzer=self, optimizer=optimizer
        )


DEFAULT = ParameterAnalyzer()
