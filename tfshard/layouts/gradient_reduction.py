"""GradientReduction: the extension point for reductions of gradients that DTensor does not have.

An extension subclasses `GradientReduction`, and appends `ReductionOptions` to `OPTIONS` when it is imported.
`tfshard/__init__.py` imports the extensions of `contrib`. A program imports any other extension before it makes a
strategy. docs/design.md, "Reductions of extensions", has an example, and the collectives that a reduction may use.

`from_option` makes the reduction from the user's option. `ShardingConfig.reduction` holds the reduction of a strategy,
and `VariableLayout.reduction` marks the variables with gradients that devices reduce by it.

The layouts of variables are typed as `Any` here: a `VariableLayout` holds a reduction. Nothing here imports TensorFlow.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfshard.errors import StrategyError
from tfshard.layouts.axes import MeshAxes

# Bytes of the float32 gradient on which `GradientReduction.encoder` works.
MEASURED_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentGradient:
    """A collective that reduces a gradient.

    Attributes:
        kind: The kind, as in a `Collective`.
        between_replicas: True if the collective runs between replicas. False if it runs over the data axis: inside a
            replica, or over all devices.
        bytes: Bytes of the full tensor on one device.
        what: A description for people.
    """

    kind: str
    between_replicas: bool
    bytes: int
    what: str


def text_of_dropped(paths: Sequence[str]) -> str:
    """Return the end of a warning: the state of variables that no longer have a reduction is dropped."""
    return (
        f"was trained with compressed gradients (compression=). The error-feedback residuals of {len(paths)} "
        f"variables, such as '{paths[0]}', are dropped: this run does not compress these gradients."
    )


class GradientReduction(abc.ABC):
    """How devices reduce the gradients of some variables, in place of DTensor's all-reduce or reduce-scatter.

    A reduction is immutable and hashable. Encoding is the work of a reduction on a gradient before and after the
    collectives.

    Attributes:
        option: The value of the user's option. Clients compare it, files record it, and messages print it.
    """

    option: Any

    @abc.abstractmethod
    def check_mesh(self, axes: MeshAxes) -> None:
        """Raise `StrategyError` if devices of the mesh cannot reduce gradients by this reduction."""

    @abc.abstractmethod
    def choose(self, layout: Any, axes: MeshAxes) -> Any:
        """Return the layout of a variable, with `reduction` set if devices reduce its gradient by this reduction.

        Args:
            layout: The `VariableLayout` without a reduction, in its group if the variable has one.
            axes: The mesh.
        """

    @abc.abstractmethod
    def state(self, layout: Any, axes: MeshAxes) -> dict[str, Any]:
        """Return the `VariableLayout` of each tensor that a variable keeps for the reduction between steps, by name.

        A checkpoint stores each tensor under its name.

        Args:
            layout: A layout that `choose` returned, with this reduction.
            axes: The mesh.
        """

    @abc.abstractmethod
    def first_value(self, name: str, layout: Any, axes: MeshAxes) -> np.ndarray | None:
        """Return the first value of a tensor of `state`, equal on all clients; None for zeros."""

    @abc.abstractmethod
    def restored(self, layout: Any, axes: MeshAxes, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the value of each tensor of `state` after a restore.

        Args:
            layout: A layout with this reduction.
            axes: The mesh.
            stored: The state in the checkpoint by name, of any mesh and of any reduction. It may lack names.
        """

    @abc.abstractmethod
    def sends(self, layout: Any, axes: MeshAxes) -> list[SentGradient]:
        """Return the collectives of the gradient in a step, in their order, for each use of the layer."""

    @abc.abstractmethod
    def encoded_bytes(self, layout: Any, axes: MeshAxes) -> int:
        """Return the float32 bytes that a device encodes, for each use of the layer."""

    @property
    @abc.abstractmethod
    def encoding(self) -> tuple[str, float]:
        """The name of the measured encoding time, and the factor to multiply the time by."""

    @abc.abstractmethod
    def encoder(self, devices: int) -> Callable[[], Any]:
        """Return a function that encodes a gradient of `MEASURED_BYTES` on several devices of this host at once."""

    @abc.abstractmethod
    def gain_text(self, *, link_seconds: float, encode_seconds: float) -> str:
        """Say whether the reduction pays: it saves `link_seconds` on links, and encodes for `encode_seconds`."""

    @abc.abstractmethod
    def meet(self, mesh: Any) -> None:
        """Make the devices of each group of `reduce_local` meet once, before the first step. Eager only."""

    @abc.abstractmethod
    def reduce_local(self, local: Any, variable: Any) -> Any:
        """Sum a gradient over the devices in a traced step. Called for each use of the layer.

        Args:
            local: The local gradient of each device, which DTensor treats as replicated.
            variable: The `ShardedVariable`. Its `kept` holds the state, as sharded variables: read one by
                `storage.update_value()`, and write it by `assign`.

        Returns:
            The sum, not the mean: the loss is the mean over the full batch. `ShardedVariable.reduced` brings a
            replicated sum to the right layout.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options with which users choose the reductions of an extension.

    Attributes:
        choices: The options, in a message.
        make: Returns the reduction for an option; None for an option of another extension. An option belongs to one
            extension only: `from_option` takes the first reduction.
        automatic: The options that `advise` considers with `"auto"`.
        measured: The reductions with an encoding time that `profile_network` measures.
    """

    choices: str
    make: Callable[[Any], GradientReduction | None]
    automatic: tuple[Any, ...] = ()
    measured: tuple[GradientReduction, ...] = ()


# The argument of `tfshard.ShardedStrategy`, `tfshard.plan` and `tfshard.advise` with which users choose a reduction.
OPTION_NAME = "compression"

# The options of each extension.
OPTIONS: list[ReductionOptions] = []


def from_option(option: Any) -> GradientReduction | None:
    """Return the reduction of a user's option; None without an option.

    Raises:
        StrategyError: No extension has this option.
    """
    if option is None:
        return None
    for each in OPTIONS:
        if (made := each.make(option)) is not None:
            return made
    choices = ", ".join(("None", *(each.choices for each in OPTIONS)))
    is_class = isinstance(option, type) and re.search(rf"\b{option.__name__}\b", choices)
    remedy = f". Call the class: {option.__name__}()" if is_class else ""
    raise StrategyError(
        f"{OPTION_NAME} must be {choices}. Received: {OPTION_NAME}={option!r} (of type {type(option)}){remedy}"
    )


def automatic_options() -> list[Any]:
    """Return the options that `advise` considers with `"auto"`."""
    return [option for each in OPTIONS for option in each.automatic]


def measured() -> dict[str, GradientReduction]:
    """Return the reductions with an encoding time that `profile_network` measures, by the name of the encoding."""
    return {reduction.encoding[0]: reduction for each in OPTIONS for reduction in each.measured}
