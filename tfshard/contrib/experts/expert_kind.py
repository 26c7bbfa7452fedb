"""ExpertKind: variables with a row for each expert of a mixture of experts, which the batch axis shards by experts."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras

from tfshard.contrib.experts import expert_traffic, parallel_experts
from tfshard.errors import StrategyError
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_kind import VariableKind
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Collective

# The variables of experts in the layers that tfshard knows (`_LAYERS`).
KNOWN = (
    r"(.*/)?expert_(up|gate|down)_(kernel|bias)",
    r"(.*/)?experts/expert_feedforward_(gate|intermediate|output)_dense",
    r"(.*/)?experts/(gate_up|down)_proj(_bias)?",
)
_LAYERS = (
    "tfshard.layers.MixtureOfExperts, and the experts of KerasHub's Mixtral, Qwen MoE, Qwen3 MoE, Qwen3.5 MoE and "
    "GPT-OSS models"
)


@dataclasses.dataclass(frozen=True)
class ExpertKind(VariableKind):
    """The kind of variable that `experts=` chooses.

    Attributes:
        patterns: Regular expressions of the variables' full paths.
    """

    option_name: ClassVar[str] = "experts"
    noun: ClassVar[str] = "experts of `experts=`"

    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return "True" if self.patterns == KNOWN else repr(self.patterns)

    @classmethod
    def from_option(cls, given: Any) -> "ExpertKind":
        if given is True:
            return cls(KNOWN)
        patterns = (given,) if isinstance(given, str) else given
        if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise StrategyError(
                "experts must be True, for the experts of all mixtures of experts that tfshard knows; regular "
                f"expressions of the paths of their variables; or False. Received: experts={given!r}"
            )
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise StrategyError(
                    f"A pattern of experts= is not a regular expression: {error}. Received: experts={given!r}"
                ) from error
        return cls(tuple(patterns))

    @property
    def for_layouts(self) -> "ExpertKind":
        return ExpertKind((".*",))

    def matches_path(self, path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in self.patterns)

    def check_used(self, paths: Sequence[str]) -> None:
        if self.patterns == KNOWN:
            if not any(self.matches_path(path) for path in paths):
                raise StrategyError(
                    f"experts=True finds no mixture of experts in the model. tfshard knows {_LAYERS}. Leave out "
                    f"experts=True. First variable paths: {sorted(paths)[:12]}"
                )
            return
        self.check_patterns(self.patterns, paths)

    def check_variable(
        self, spec: VariableSpec, rule: tuple[str, Sequence[str | None]] | None, axes: MeshAxes, slot_dtype: str | None
    ) -> None:
        if spec.layer is not None and not parallel_experts.is_known(spec.layer):
            raise StrategyError(
                f"A variable of experts= must belong to a layer that sends tokens to experts: {_LAYERS}. Correct the "
                f"patterns. Received: '{spec.path}' of layer '{spec.layer.name}' (of type {type(spec.layer).__name__})"
            )
        self.check_batch_axis("Experts", f"'{spec.path}'", axes)
        count = spec.shape[0] if spec.shape else 0
        if not count or count % axes.data_size:
            raise StrategyError(
                "The batch axis must divide the number of experts, because every device stores equally many experts. "
                "Choose another number of experts or a smaller batch axis, or leave out experts=. "
                f"Received: {count} experts in '{spec.path}' of shape={spec.shape}, mesh={axes.given}"
            )
        if rule is not None and any(rule[1]):
            raise StrategyError(
                f"'{spec.path}' belongs to experts that the batch axis shards, but the layout map has another layout "
                "for it. Remove the variable from the layout map or from experts=. "
                f"Received: axes={rule[1]} for pattern '{rule[0]}', experts={self}"
            )

    def install(self, variable: keras.Variable) -> None:
        """Do nothing: `hub_experts.install` patches the layers."""

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
        """Accept every optimizer: optimizers update local experts like variables that a model axis shards."""

    def collectives(
        self,
        model: ModelOrSpecs,
        planned: Sequence[VariableLayout],
        mesh_shape: Mapping[str, int],
        *,
        optimizer: Any,
        inputs: Any,
    ) -> list[Collective]:
        del optimizer
        return expert_traffic.collectives(model, planned, mesh_shape, inputs=inputs)

    def check_verifiable(self) -> None:
        """Accept: the results of a step match one device."""
