"""ShardingConfig: every setting of a `ShardedStrategy`, in one frozen object.

A setting is written down here once. `ShardedStrategy(...)` and `tfshard.plan(...)` pack their keyword arguments into a
`ShardingConfig`; all code below them takes the object. To add a setting, add a field and use the field.
"""

import dataclasses
import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tfshard.errors import StrategyError
from tfshard.layouts import option_checks, variable_kind
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.dtype_rules import DtypeByPath
from tfshard.layouts.gather_dtypes import GatherDtypes
from tfshard.layouts.gradient_reduction import OPTION_NAME, GradientReduction
from tfshard.layouts.layout_map import LayoutMap
from tfshard.layouts.slot_dtypes import SlotDtypes
from tfshard.layouts.variable_kind import VariableKind

REDUCE_DTYPES = ("float32", "bfloat16")


class ZeroStage(enum.IntEnum):
    """The tensors that the batch axis shards (Rajbhandari et al. 2020, "ZeRO").

    This table is the only list of stages. To add a variant, add a member with a new number. Code asks for the three
    facts, never for the number. `advise` tries the members in this order.

    Attributes:
        adds: The tensors that the stage shards in addition to the stage before, for messages.
        shard_slots: The batch axis shards optimizer slots, and each device updates its local shard. The other two facts
            need this one.
        shard_grads: Each device holds only its local shard of each gradient.
        shard_params: The batch axis shards parameters; a step gathers them before use.

    Example:

    >>> from tfshard.layouts import ZeroStage
    >>> stage = ZeroStage.from_number(2)
    >>> stage.shard_slots, stage.shard_grads, stage.shard_params
    (True, True, False)
    """

    # The columns: number, adds, shard_slots, shard_grads, shard_params.
    NOTHING = 0, "nothing sharded over the batch axis", False, False, False
    SLOTS = 1, "optimizer slots", True, False, False
    GRADIENTS = 2, "and gradients", True, True, False
    PARAMETERS = 3, "and parameters", True, True, True

    adds: str
    shard_slots: bool
    shard_grads: bool
    shard_params: bool

    def __new__(cls, number: int, adds: str, shard_slots: bool, shard_grads: bool, shard_params: bool) -> "ZeroStage":
        stage = int.__new__(cls, number)
        stage._value_ = number
        stage.adds = adds
        stage.shard_slots, stage.shard_grads, stage.shard_params = shard_slots, shard_grads, shard_params
        return stage

    # A stage prints as its number.
    __repr__ = __str__ = int.__repr__

    @classmethod
    def from_number(cls, number: Any) -> "ZeroStage":
        """Return the stage with a number.

        Raises:
            StrategyError: No stage has the number.
        """
        found = None if isinstance(number, bool) else next((stage for stage in cls if stage == number), None)
        if found is None:
            known = ", ".join(f"{stage} ({stage.adds})" for stage in cls)
            is_integer = isinstance(number, int) and not isinstance(number, bool)
            remedy = "" if is_integer else ". Give an integer"
            raise StrategyError(f"Unknown ZeRO stage. Stages: {known}. Received: zero_stage={number!r}{remedy}")
        return found


@dataclasses.dataclass(frozen=True)
class GroupPolicy:
    """The sizes of variables that share a buffer, which a step gathers, reduces and updates as one tensor.

    Args:
        group_threshold_bytes: Variables of fewer bytes are grouped. 0: no groups.
        max_group_bytes: The largest size of a group's buffer, with padding and over all model shards.
        min_group_bytes: A group whose variables have fewer bytes joins the group before it, which may then exceed the
            maximum. If no other group has the same kind of variables, the variables stand alone. 0: groups of any size.

    Raises:
        StrategyError: A size that is not an integer or is negative, or a minimum that exceeds the maximum.
    """

    group_threshold_bytes: int = 1 << 20
    max_group_bytes: int = 25 << 20
    min_group_bytes: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise StrategyError(
                    f"{field.name} must be a number of bytes: an integer, 0 or larger. Received: {field.name}={size!r}"
                )
        if self.min_group_bytes > self.max_group_bytes:
            raise StrategyError(
                "min_group_bytes must not exceed max_group_bytes: no group could be made. Received: "
                f"min_group_bytes={self.min_group_bytes}, max_group_bytes={self.max_group_bytes}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardPolicy:
    """When a step gathers sharded parameters, and when it frees them.

    Attributes:
        reshard_after_forward: True: a step frees gathered parameters after use, and gathers them again for the backward
            pass. Parameters of up to the bytes of the largest variable or group stay gathered. Regular expressions: the
            step frees variables with a full path that an expression matches, and groups if all members match.
            False: the step gathers once.
        prefetch: How many variables or groups before its use a gather may start. The backward pass holds at most
            `max(prefetch, 1)` full gradients at once.
    """

    reshard_after_forward: bool | tuple[str, ...] = True
    prefetch: int = 1

    @classmethod
    def from_options(cls, reshard_after_forward: bool | str | Sequence[str], prefetch: int = 1) -> "ReshardPolicy":
        """Check and pack a user's options.

        Raises:
            StrategyError: A wrong type, an invalid regular expression, or a number below 0.
        """
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise StrategyError(f"prefetch must be a number of variables, 0 or more. Received: prefetch={prefetch!r}")
        if isinstance(reshard_after_forward, bool):
            return cls(reshard_after_forward=reshard_after_forward, prefetch=prefetch)
        given = reshard_after_forward
        patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else None
        try:
            if patterns is None or not all(isinstance(each, str) and re.compile(each) for each in patterns):
                raise TypeError
        except (TypeError, re.error) as error:
            raise StrategyError(
                "reshard_after_forward must be True, False, or regular expressions of variables' paths. "
                f"Received: reshard_after_forward={reshard_after_forward!r}"
            ) from error
        return cls(reshard_after_forward=patterns, prefetch=prefetch)

    def keeps(self, paths: Iterable[str]) -> bool:
        """Return True if a step keeps the variables at `paths`, which share a buffer, gathered until their last use."""
        if isinstance(self.reshard_after_forward, bool):
            return not self.reshard_after_forward
        patterns = self.reshard_after_forward
        return not all(any(re.fullmatch(pattern, path) for pattern in patterns) for path in paths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of reductions, of stored slots and of gathers.

    Attributes:
        reduce_dtype: The dtype in which devices add up bfloat16 gradients.
        slot_dtypes: The dtype in which each variable's optimizer slots are stored.
        gather_dtypes: The dtype in which each parameter is gathered.
    """

    reduce_dtype: str = "float32"
    slot_dtypes: SlotDtypes = SlotDtypes()
    gather_dtypes: GatherDtypes = GatherDtypes()

    @classmethod
    def from_options(
        cls, reduce_dtype: str = "float32", slot_dtype: DtypeByPath = None, gather_dtype: DtypeByPath = None
    ) -> "Precision":
        """Check and pack a user's options.

        Raises:
            StrategyError: An unknown dtype, or an invalid regular expression.
        """
        if reduce_dtype not in REDUCE_DTYPES:
            raise StrategyError(f"reduce_dtype must be one of {REDUCE_DTYPES}. Received: {reduce_dtype!r}")
        return cls(
            reduce_dtype=reduce_dtype,
            slot_dtypes=SlotDtypes.of(slot_dtype),
            gather_dtypes=GatherDtypes.of(gather_dtype),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
    """How a training step divides its batch.

    Attributes:
        count: Microbatches of a step.
        reduce_once: True: devices add up the gradients of microbatches locally, in full, and reduce the sums once.

    Raises:
        StrategyError: `count` is not an integer of 1 or more.
    """

    count: int = 1
    reduce_once: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise StrategyError(f"microbatches must be an integer, 1 or more. Received: microbatches={self.count!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Tensors that devices store in the memory of their host.

    Attributes:
        slots: Optimizer slots that the batch axis shards.
    """

    slots: bool = False

    @classmethod
    def from_option(cls, offload: str | None) -> "Offload":
        """Check and pack a user's option.

        Raises:
            StrategyError: `offload` is not None or `"slots"`.
        """
        if offload not in (None, "slots"):
            raise StrategyError(f"offload must be None or 'slots'. Received: offload={offload!r}")
        return cls(slots=offload is not None)


class AttentionChoice(enum.Enum):
    """How attention is computed.

    Attributes:
        AUTO: In blocks, from a number of pairs of a query and a key.
        FLASH: In blocks where that is possible.
        MATH: With the full scores, as in Keras.
    """

    AUTO = "auto"
    FLASH = "flash"
    MATH = "math"

    @classmethod
    def from_option(cls, attention: Any) -> "AttentionChoice":
        """Return the choice with a name.

        Raises:
            StrategyError: No choice has the name.
        """
        return option_checks.choice(cls, "attention", attention)


class ContextAttention(enum.Enum):
    """How the devices of a context axis compute attention of full sequences.

    Attributes:
        ULYSSES: They exchange heads for positions, by all-to-alls.
        GATHER: They gather keys and values.
    """

    ULYSSES = "ulysses"
    GATHER = "gather"

    @classmethod
    def from_option(cls, context_attention: Any) -> "ContextAttention":
        """Return the choice with a name.

        Raises:
            StrategyError: No choice has the name.
        """
        return option_checks.choice(cls, "context_attention", context_attention)


AUTO_CHUNKS = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy:
    """How a step computes the cross entropy of a model's last projection by chunks of tokens.

    Attributes:
        chunk: The tokens of a chunk; `"auto"` to choose them, and to use chunks only where they save memory.
    """

    chunk: int | str

    @classmethod
    def from_option(cls, chunked: int | str | None) -> "ChunkedCrossEntropy | None":
        """Check and pack a user's option.

        Raises:
            StrategyError: `chunked` is not None, `"auto"` or a number of tokens of 1 or more.
        """
        if chunked is None:
            return None
        is_number = isinstance(chunked, int) and not isinstance(chunked, bool) and chunked >= 1
        if not is_number and not (isinstance(chunked, str) and chunked == AUTO_CHUNKS):
            raise StrategyError(
                "chunked_cross_entropy must be None, 'auto', or the tokens of a chunk: an integer, 1 or more. "
                f"Received: chunked_cross_entropy={chunked!r}"
            )
        return cls(chunk=chunked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Every setting of a strategy except its mesh.

    `tfshard.ShardedStrategy` documents the settings.

    Attributes:
        layout_map: The dims that model axes shard. None: tfshard finds a map for each model (`layout_map="auto"`).
        zero_stage: The tensors that the batch axis shards.
        analyzer: The sizes of variables that share a buffer; None: no groups. Users pass a `ParameterAnalyzer`.
        reshard: When a step gathers and frees sharded parameters.
        precision: The dtypes of reductions and of stored slots.
        microbatches: How a training step divides its batch.
        offload: Tensors that devices store in the memory of their host.
        sequence_parallel: True: the model axis shards activations along the sequence between tensor-parallel blocks.
        already_sharded: True: each client of a launched run feeds its local rows of every batch.
        reduction: How devices reduce some gradients, in place of DTensor's reductions. Users call it `compression`.
        attention: How attention is computed.
        context_attention: How the devices of a context axis compute attention of full sequences.
        kinds: The kinds of variables that no step reads in full, each with the user's settings for the kind.
        chunked_cross_entropy: How a step computes the cross entropy of a model's last projection by chunks of tokens;
            None to compute it from whole logits.

    Example:

    >>> from tfshard.layouts import ShardingConfig, ZeroStage
    >>> ShardingConfig(zero_stage=ZeroStage.from_number(1)).as_dict()["zero_stage"]
    1
    """

    layout_map: LayoutMap | None = dataclasses.field(default_factory=LayoutMap)
    zero_stage: ZeroStage = ZeroStage.PARAMETERS
    analyzer: GroupPolicy | None = None
    reshard: ReshardPolicy = ReshardPolicy()
    precision: Precision = Precision()
    microbatches: Microbatches = Microbatches()
    offload: Offload = Offload()
    sequence_parallel: bool = False
    already_sharded: bool = False
    reduction: GradientReduction | None = None
    attention: AttentionChoice = AttentionChoice.AUTO
    context_attention: ContextAttention = ContextAttention.ULYSSES
    kinds: tuple[VariableKind, ...] = ()
    chunked_cross_entropy: ChunkedCrossEntropy | None = None

    def __post_init__(self) -> None:
        if self.analyzer is not None and not isinstance(self.analyzer, GroupPolicy):
            raise StrategyError(
                "analyzer must be a tfshard.ParameterAnalyzer, or None for no groups. "
                f"Received: analyzer={self.analyzer!r} (of type {type(self.analyzer)})"
            )
        if self.precision.gather_dtypes.rounds and not self.zero_stage.shard_params:
            raise StrategyError(
                "gather_dtype needs zero_stage=3, where devices keep exact shards of parameters. At stage 0 nothing is "
                "gathered. At stages 1 and 2 the gathered parameters are the only copy: the roundings of all steps "
                f"would add up. Received: gather_dtype={dict(self.precision.gather_dtypes.rules)}, "
                f"zero_stage={self.zero_stage}"
            )

    def check_mesh(self, axes: MeshAxes) -> None:
        """Check that a mesh with `axes` can carry out the settings.

        Raises:
            LayoutError: The layout map names an axis that the mesh does not have.
            StrategyError: The mesh does not fit `reduction`, or `reduce_once` on a mesh with several axes of more than
                one device; a mesh with a context axis does not fit a setting.
        """
        if self.reduction is not None:
            self.reduction.check_mesh(axes)
        if self.layout_map is not None:
            self.layout_map.check_axes(axes)
        if axes.contexts > 1:
            self._check_context(axes)
        if self.microbatches.reduce_once and axes.shards_by_several:
            raise StrategyError(
                "reduce_once=True needs a mesh of only a batch axis: on other axes, each device holds only a part "
                f"of a gradient. Received: mesh={axes}"
            )

    def _check_context(self, axes: MeshAxes) -> None:
        refused = {
            "attention='math'": self.attention is AttentionChoice.MATH,
            "sequence_parallel=True": self.sequence_parallel,
            "already_sharded=True": self.already_sharded,
            **{f"{kind.option_name}=": True for kind in self.kinds},
            "compression=": self.reduction is not None,
        }
        for setting, is_set in refused.items():
            if is_set:
                raise StrategyError(
                    f"{setting} does not work on a mesh with a context axis, which splits the sequences of a batch "
                    f"between devices. Leave one of them out. Received: {setting}, mesh={axes}"
                )

    def kind_at(self, path: str) -> VariableKind | None:
        """Return the kind of the variable at `path`; None for an ordinary variable."""
        return next((kind for kind in self.kinds if kind.matches_path(path)), None)

    def as_dict(self) -> dict[str, Any]:
        """Return every setting by its name for users, in values that JSON can hold, to compare clients and to record in
        files."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (ZeroStage, AttentionChoice, ContextAttention)):
                found[field.name] = value.value
            elif isinstance(value, (ReshardPolicy, Precision, Microbatches, Offload)):
                found |= {
                    f"{field.name}.{part.name}": _plain(getattr(value, part.name)) for part in dataclasses.fields(value)
                }
            elif isinstance(value, ChunkedCrossEntropy):
                found[field.name] = value.chunk
            elif field.name == "reduction":
                found[OPTION_NAME] = _plain(None if self.reduction is None else self.reduction.option)
            elif field.name != "kinds":
                found[field.name] = _plain(value)
        return found | variable_kind.settings(self.kinds)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, str)) or value is None else repr(value)
