"""VariableKind: an extension point for variables that no device reads in full.

A step gathers an ordinary variable, computes with the full value, and updates all of it. An extension may define
another kind of variable: a subclass of `VariableKind` says which variables are of the kind, and a `PartialKind` also
how devices store, read and update them. `register` gives the kind an option of `tfshard.ShardedStrategy` and
`tfshard.plan`.

`ShardingConfig.kinds` holds the kinds that a user chose. `VariableLayout.kind` is the kind of one variable. The core
asks only whether a layout has a kind, and calls the methods of the kind. Some arguments and results belong to packages
above this one, so their type here is `Any`, and the docstrings name their classes.
"""

import abc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tfshard.errors import StrategyError
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.layout_map import LayoutMap, VariableSpec


class VariableKind(abc.ABC):
    """A kind of variable, with the settings that a user chose for it.

    Subclasses are frozen dataclasses, because layouts are compared. `str(kind)` gives the settings for messages and
    files.

    The batch axis shards the first dim of every variable of a kind at every ZeRO stage, and of the slots of the same
    shape. The variable joins no group, and no device reduces its gradient over the batch axis.

    A step reads a variable of a plain `VariableKind` as a tensor that the batch axis shards, and each device computes
    with its local shard. The gradient and the update have the same layout. A `PartialKind` reads and updates parts of
    the local shards.

    Attributes:
        option_name: The name of the option that chooses the kind, such as `"tables"`.
        noun: The variables of the kind, in the plural, for messages.
    """

    option_name: ClassVar[str]
    noun: ClassVar[str]

    # --- which variables

    @classmethod
    @abc.abstractmethod
    def from_option(cls, given: Any) -> "VariableKind":
        """Check and convert a user's option, which is not None.

        Raises:
            StrategyError: `given` has another type.
        """

    @abc.abstractmethod
    def matches_path(self, path: str) -> bool:
        """Return True if the variable at `path` is of this kind."""

    @abc.abstractmethod
    def check_used(self, paths: Sequence[str]) -> None:
        """Raise `StrategyError` if the option names variables that are not among the paths of a model."""

    def check_patterns(self, patterns: Sequence[str], paths: Sequence[str]) -> None:
        """Raise `StrategyError` if one of the option's patterns matches no path of a model."""
        unmatched = [each for each in patterns if not any(re.fullmatch(each, path) for path in paths)]
        if unmatched:
            raise StrategyError(
                f"Patterns of {self.option_name}= match no variable: {unmatched}. A pattern must match the full path "
                f"(re.fullmatch). First variable paths: {sorted(paths)[:12]}"
            )

    # --- how devices store a variable

    @property
    @abc.abstractmethod
    def for_layouts(self) -> "VariableKind":
        """The kind for `VariableLayout.kind`: equal for variables that steps read and update alike."""

    @abc.abstractmethod
    def check_variable(
        self, spec: VariableSpec, rule: tuple[str, Sequence[str | None]] | None, axes: MeshAxes, slot_dtype: str | None
    ) -> None:
        """Raise `StrategyError` if a matching variable cannot be of this kind.

        Args:
            spec: The variable.
            rule: The pattern and the axes of the variable's rule in the layout map, or None.
            axes: The mesh.
            slot_dtype: The dtype in which the slots would be stored; None for the dtype of the slots.
        """

    def check_batch_axis(self, subject: str, variable: str, axes: MeshAxes) -> None:
        """Raise `StrategyError` if a mesh has no batch axis, or replicas.

        Args:
            subject: The variables of the kind, at the begin of a sentence.
            variable: The variable, in words.
            axes: The mesh.
        """
        if axes.data is None:
            raise StrategyError(
                f"{subject} are sharded over the batch axis, but the mesh has no batch axis. Add batch=... to "
                f"create_mesh(). Received: mesh={axes.given} for {variable}"
            )
        if axes.replicas > 1:
            raise StrategyError(
                f"{subject} are sharded over all devices of the batch axis, which a mesh with replicas does not allow. "
                f"Use a mesh without an axis of replicas, or leave out {self.option_name}=. "
                f"Received: mesh={axes.given} for {variable}"
            )

    # --- how steps use a variable

    @abc.abstractmethod
    def install(self, variable: Any) -> None:
        """Patch a Keras variable, so that layers read the variable through this kind (layer_patch.py)."""

    @abc.abstractmethod
    def check_optimizer(self, optimizer: Any, variable: Any) -> None:
        """Raise `StrategyError` if an optimizer cannot update a variable.

        Args:
            optimizer: The Keras optimizer.
            variable: The Keras variable.
        """

    # --- what plans and checks ask

    @abc.abstractmethod
    def collectives(
        self, model: Any, planned: Sequence[Any], mesh_shape: Mapping[str, int], *, optimizer: Any, inputs: Any
    ) -> Sequence[Any]:
        """Predict the collectives of a step for the variables of this kind, as `planning` collectives.

        Args:
            model: A built model, or a list of specs.
            planned: The `VariableLayout` of each variable of this kind.
            mesh_shape: Axis name to size.
            optimizer: As for `tfshard.plan`.
            inputs: As for `tfshard.plan`.
        """

    @abc.abstractmethod
    def check_verifiable(self) -> None:
        """Raise `StrategyError` if a step of this kind never matches Keras on one device (`tfshard.verify`)."""


class PartialKind(VariableKind):
    """A kind of variable that steps read and update by parts, and never as one tensor."""

    @abc.abstractmethod
    def stored_shape(self, shape: tuple[int, ...], axes: MeshAxes) -> tuple[int, ...]:
        """Return the shape of the stored tensor, with padding so that the batch axis divides the first dim.

        Args:
            shape: The shape of the variable.
            axes: The mesh.
        """

    @abc.abstractmethod
    def format(self, layout: Any, mesh: Any) -> Any:
        """Return the `StorageFormat` of a variable or a slot.

        Args:
            layout: Its `VariableLayout`.
            mesh: The DTensor mesh.
        """

    @abc.abstractmethod
    def begin_step(self, record: Any) -> Any:
        """Return the `KindState` of a step, before the step uses a variable of this kind.

        Args:
            record: The `StepRecord`.
        """

    @abc.abstractmethod
    def update(self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], optimizer: Any) -> Any:
        """Run an optimizer's update of a variable in a step, and return the result of `fn`.

        Args:
            variable: The `ShardedVariable`.
            fn: The update function. It takes the variable and `args`.
            args: The gradient and other arguments. Empty for weight decay.
            optimizer: The Keras optimizer; None if the caller is no optimizer.

        Raises:
            StrategyError: The optimizer or the gradient does not fit.
        """

    @abc.abstractmethod
    def assign(self, variable: Any, value: Any) -> None:
        """Record a full value that a step assigns to a variable, outside of an optimizer's update.

        Raises:
            StrategyError: A step cannot assign variables of this kind.
        """


# Extension point: the kind of each option of `tfshard.ShardedStrategy` and `tfshard.plan`.
_registered: dict[str, type[VariableKind]] = {}


def register(kind: type[VariableKind]) -> None:
    """Let users choose a kind by its option, a keyword argument of `tfshard.ShardedStrategy` and `tfshard.plan`."""
    _registered[kind.option_name] = kind


def from_options(**options: Any) -> tuple[VariableKind, ...]:
    """Return the kinds that a user chose, by the names of their options. None and False choose no kind.

    Raises:
        StrategyError: A value does not fit its option.
    """
    chosen = {name: given for name, given in options.items() if not (given is None or given is False)}
    return tuple(_registered[name].from_option(given) for name, given in chosen.items())


def keeps_gradients(option: str) -> bool:
    """Return whether no device reduces or sends the gradients of an option's variables (a plain `VariableKind`)."""
    return not issubclass(_registered.get(option, PartialKind), PartialKind)


def without_kinds(layout_map: LayoutMap, kinds: Sequence[VariableKind]) -> LayoutMap:
    """Remove the rules for variables of the kinds from an automatic layout map, and return the map."""
    for pattern in list(layout_map):
        path = re.sub(r"\\(.)", r"\1", pattern)
        if any(kind.matches_path(path) for kind in kinds):
            del layout_map[pattern]
    return layout_map


def settings(kinds: Iterable[VariableKind]) -> dict[str, str | None]:
    """Return the settings of each registered option as text, to record in files; None for an option without a kind."""
    chosen = {kind.option_name: str(kind) for kind in kinds}
    return {option: chosen.get(option) for option in _registered}
