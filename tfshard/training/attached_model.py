"""AttachedModel: a Keras model whose variables a strategy shards."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.devices import clients
from tfshard.errors import StrategyError
from tfshard.graph import auto_layout, inventory
from tfshard.layouts import planner, variable_kind
from tfshard.layouts.config import GroupPolicy
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_kind import VariableKind
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.operations import (
    adapters,
    attention,
    blocks,
    compiled_blocks,
    compiled_updates,
    context_parallel,
    convolution,
    layer_patch,
    lookups,
    loops,
    projection_heads,
    sequence,
    unsupported,
    vocabulary,
)
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import decisions, reduction_state, reshard
from tfshard.training.attached_variables import attach_global_seed, attach_optimizer, attach_variables
from tfshard.training.strategy_base import StrategyBase

# Functions that patch a model whose variables have their final layouts (checkpoints).
model_patchers: list[Callable[[keras.Model], object]] = []

# The storage of each variable of a model and its optimizers, by the id of the variable.
Storages = dict[int, Storage | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Basis:
    """The inputs of a placement. A placement is made again when one of them changes.

    Attributes:
        specs: The variables, without their layers.
        layers: The ids of the layers of the variables.
        layout_map: The entries of the model's layout map.
        groups: The policy for groups.
    """

    specs: list[VariableSpec]
    layers: list[int]
    layout_map: list[tuple[str, object]]
    groups: GroupPolicy | None


class AttachedModel:
    """A Keras model and the strategy that shards its variables.

    `attach` reshards the model, its optimizers and its metrics. `refresh` does so before a step, for all that the model
    got since. `move_from_other` takes the model over, and calls `detach` of the other strategy's `AttachedModel`.

    Args:
        model: The model. It is held weakly.
        strategy: The strategy, which holds this object.
    """

    def __init__(self, model: keras.Model, strategy: StrategyBase):
        self._model = weakref.ref(model)
        self._strategy = weakref.ref(strategy)
        # Without the layers: they would keep the model alive, and with it this object.
        self._placed: tuple[_Basis, ModelPlacement] | None = None
        self._found_map: LayoutMap | None = None
        self._layouts_are_checked = False
        # True if the model was compiled with `jit_compile=True`, or with "auto" on GPUs.
        self.compiles_blocks = False
        # True if warnings tell what is not compiled.
        self.warns_of_blocks = True
        # The structure of the model when `refresh` last ran.
        self._refreshed: tuple[object, ...] | None = None
        # True once the model is known to combine positions of a sequence in attention layers only.
        self._splits_sequences = False
        # True once the decisions since the last `compile` are logged.
        self._is_told = False

    @property
    def model(self) -> keras.Model:
        """The model."""
        model = self._model()
        assert model is not None, "The model was garbage-collected."
        return model

    @property
    def strategy(self) -> StrategyBase:
        """The strategy."""
        strategy = self._strategy()
        assert strategy is not None, "The strategy was garbage-collected."
        return strategy

    # --- layouts

    def layout_map(self) -> LayoutMap:
        """Return the layout map of the model. With `layout_map="auto"` it is empty until the model is built."""
        strategy = self.strategy
        if not strategy.auto or not self.model.built:
            return strategy.layout_map
        if self._found_map is None:
            found = auto_layout.auto_layout_map(self.model, strategy.mesh)
            self._found_map = variable_kind.without_kinds(found, strategy.config.kinds)
        return self._found_map

    def placement(self, *, ignore_stored: bool = False) -> ModelPlacement:
        """Return the layouts of the variables of a built model, groups included.

        The placement is kept until the model's variables, its layout map or the policy for groups change.

        Args:
            ignore_stored: True to ignore the layouts in which variables are stored now.
        """
        owned = inventory.owned_variables(self.model)
        specs, stored = [], []
        for variable, layer in owned:
            current = _private.backend_variable(variable)
            spec, layout = inventory.variable_spec(variable, layer), None
            if isinstance(current, ShardedVariable) and not ignore_stored:
                # The first step of a model creates variables outside of the model's name scopes, and a frozen variable
                # does not move.
                layout = current.layout
                spec = dataclasses.replace(layout.spec, path=variable.path, layer=layer)
            specs.append(spec)
            stored.append(layout)
        layout_map = self.layout_map()
        basis = _Basis(
            specs=[dataclasses.replace(spec, layer=None) for spec in specs],
            layers=[id(layer) for _, layer in owned],
            layout_map=list(layout_map.items()),
            groups=self.strategy.config.analyzer,
        )
        if self._placed is not None and self._placed[0] == basis and _still_holds(self._placed[1], stored):
            # The number of microbatches may have changed since.
            config = dataclasses.replace(self.strategy.config, layout_map=layout_map)
            return _with_layers(dataclasses.replace(self._placed[1], config=config), owned)
        placement = self.strategy.place(specs, layout_map, stored)
        self._placed = basis, _with_layers(placement, [(variable, None) for variable, _ in owned])
        return placement

    def check_layouts(self) -> None:
        """Check the layout map of a built model, once (`tfshard.lint`).

        Raises:
            LayoutError: The layout map does not fit the model, or names no rule for a large matrix that stays
                replicated. With `layout_map="auto"`: no layout was found that shards over a model axis.
        """
        if not self.model.built or self._layouts_are_checked:
            return
        strategy = self.strategy
        for kind in strategy.config.kinds:
            kind.check_used([spec.path for spec in self.placement().specs])
        planner.check_layouts(self.model, self.placement(), automatic=strategy.auto)
        self._layouts_are_checked = True

    def _layouts(self, *, ignore_stored: bool = False) -> list[reshard.Placed]:
        """Return the variables of the model that have values, with their layouts.

        Raises:
            LayoutError: The layout map does not fit.
        """
        placed = self.placement(ignore_stored=ignore_stored)
        placed.check_faults()
        owned = [variable for variable, _ in inventory.owned_variables(self.model)]
        return [
            (variable, layout)
            for variable, layout in zip(owned, placed.variables, strict=True)
            if _private.backend_variable(variable) is not None
        ]

    def _variables_of_kinds(self) -> Iterator[tuple[keras.Variable, VariableKind]]:
        """Yield the variables on the mesh that have a kind, with the kind."""
        for variable, _ in inventory.owned_variables(self.model):
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable) and current.layout.kind is not None:
                yield variable, current.layout.kind

    # --- attach, refresh, move, detach

    def reshard_layers(self) -> None:
        """Reshard the variables of the layers of a built model in place. They keep their values.

        Raises:
            StrategyError: The model was built under another strategy.
            LayoutError: The layout map does not fit; the model is unchanged.
            UnsupportedLayerError: The model has a layer that DTensor cannot expand.
        """
        self.strategy.check_accepts(self.model)
        check_not_elsewhere(self.model, self.strategy)
        unsupported.check_layers(self.model)
        self.check_layouts()
        self.check_splits_sequences()
        if reshard.to_mesh(self._layouts(), self.strategy.mesh):
            _forget_functions(self.model)

    def attach(self) -> None:
        """Put everything that a step of the model uses on the mesh, in its layout: variables, optimizers, metrics.

        Does nothing for values that are stored in their layouts already.

        Raises:
            StrategyError, LayoutError, UnsupportedLayerError: As `reshard_layers`.
        """
        model, strategy = self.model, self.strategy
        self.reshard_layers()
        attach_variables(loops.states(model), strategy)
        of_kinds = list(self._variables_of_kinds())
        for optimizer in inventory.model_optimizers(model):
            for variable, kind in of_kinds:
                kind.check_optimizer(optimizer, variable)
            attach_optimizer(optimizer, strategy)
        for metric in _private.compiled_metrics(model):
            attach_variables(metric.variables, strategy)
        if inventory.has_no_call(model) and model.layers and all(layer.built for layer in model.layers):
            model.built = True  # Keras builds a model by calling it, and this model has no `call`.
        if model.built:
            self.group_variables()
            if not self._is_told and model.compiled:
                self._is_told = True
                decisions.tell(model, strategy, self.placement())

    def refresh(self) -> None:
        """Check the model before a step, and attach what it got since: variables, optimizers, metrics.

        Attaches nothing in a graph, and nothing but the global seed if the model has not changed.

        Raises:
            StrategyError, LayoutError, UnsupportedLayerError: As `check`.
        """
        model = self.model
        if _private.is_eager():
            attach_global_seed(self.strategy)
        owned = [*inventory.model_optimizers(model), *_private.listed_metrics(model)]
        seen = (self.strategy.detached, *_private.structure(model), *map(id, owned))
        if self._refreshed == seen:
            return
        inventory.note_compiled(getattr(model, "optimizer", None))
        self.check()
        if _private.is_eager():
            self.attach()
            self._refreshed = seen

    def check(self) -> None:
        """Raise an error unless the model can run under the strategy.

        Raises:
            UnsupportedLayerError: A layer cannot run.
            StrategyError, LayoutError: As `check_layouts`.
        """
        unsupported.check_layers(self.model)
        self.check_layouts()

    def check_splits_sequences(self, inputs: Any = None) -> None:
        """Check, once, that the model works on chunks of sequences, if the mesh has a context axis.

        Args:
            inputs: The inputs of a step, or specs of them. By default the inputs that the model was built for.

        Raises:
            UnsupportedLayerError: A layer does not work on chunks.
        """
        strategy = self.strategy
        if strategy.mesh_shape.contexts > 1 and self.model.built and not self._splits_sequences:
            self._splits_sequences = context_parallel.check(self.model, strategy.mesh, inputs)

    def take_jit_compile(self) -> None:
        """Compile the blocks of a model that was compiled with `jit_compile=True`, and not the whole step.

        XLA does not see the mesh, and cannot compile a step.
        """
        if self.model.compiled and self.model.jit_compile:
            check_can_compile_blocks(self.strategy)
            self.compiles_blocks, self.model.jit_compile = True, False
            self.compiled_again()

    def compiles(self) -> None:
        """Log nothing until `compiled_again`: decisions are known once the model is compiled."""
        self._is_told = True
        self._splits_sequences = False

    def compiled_again(self) -> None:
        """Have the next `refresh` look at the model again, and log what is decided for it."""
        self._refreshed = None
        self._is_told = False

    def move_from_other(self) -> None:
        """Reshard a model of another strategy. It belongs to this strategy then. Does nothing for other models.

        Models inside this model move, too. Other models that share layers with this model keep their strategy. If both
        strategies have the same mesh, these models run on, with the shared layers in the layouts of this strategy.
        Otherwise they cannot be used before they are compiled with this strategy.

        Raises:
            StrategyError, LayoutError, UnsupportedLayerError: As `reshard_layers`. The model keeps its strategy.
        """
        model, strategy = self.model, self.strategy
        other: Any = _private.distribute_strategy(model)
        if not isinstance(other, StrategyBase) or other is strategy:
            return
        if model in other.pipelined_models or model in other.stage_models:
            return  # The later call of `reshard_layers` raises the error.
        strategy.check_accepts(model)
        unsupported.check_layers(model)
        placed = self._layouts(ignore_stored=True)
        self.check_layouts()
        self.check_splits_sequences()
        before = [_private.backend_variable(variable) for variable, _ in placed]
        reshard.to_mesh(placed, strategy.mesh, anew=True)
        for each in (model, *_private.flatten_layers(model)):
            if isinstance(each, keras.Model) and _private.distribute_strategy(each) is other:
                _private.set_distribute_strategy(each, strategy)
        attached(model, other).detach(before)

    def detach(self, before: Sequence[tf.Variable]) -> None:
        """Release a model that moved to another strategy.

        Args:
            before: The variables that the model had under this strategy.
        """
        model, strategy = self.model, self.strategy
        strategy.detached += 1
        layer_patch.undo(model, [change for change in layer_patch.CHANGES if change.knows_mesh])
        now = {id(_private.backend_variable(variable)) for variable, _ in inventory.owned_variables(model)}
        left = [each for each in before if isinstance(each, ShardedVariable) and id(each) not in now]
        for each in left:
            del each.storage.members[each.member]
        self._invalidate({each.storage for each in left})

    def move_waiting(self) -> None:
        """Give variables that have no buffer yet their final layouts, without making the buffers."""
        reshard.materialize(self._layouts(), self.strategy.mesh, waiting=True)
        for patch in model_patchers:
            patch(self.model)

    def group_variables(self) -> None:
        """Move the variables of a built model, and their slots, to the layouts of the placement, groups included.

        Then patch the layers. In a launched run, first compare the initial values of all clients.

        With `layout_map="auto"`, this moves also variables that were created before the map was known. A variable in a
        group of another model that shares it stays there, so that functions which read it stay valid.
        """
        # Before the first collective: clients with other variables would hang in it.
        self._agree_on_values()
        self._invalidate(reshard.materialize(self._layouts(), self.strategy.mesh))
        reduction_state.update(self.model, self.strategy.mesh)
        self._patch_layers()

    def _patch_layers(self) -> None:
        """Patch layers and metrics that read sharded variables. Call this when the variables are in their layouts."""
        model, mesh = self.model, self.strategy.mesh
        variables = [variable for variable, _ in inventory.owned_variables(model)]
        for variable, kind in self._variables_of_kinds():
            kind.install(variable)
        vocabulary.install(model, variables, mesh)
        convolution.install(model, mesh)
        loops.install(model, mesh)
        lookups.install(model)
        adapters.install(model)
        attention.install(model, mesh)
        if self.strategy.mesh_shape.contexts > 1:
            context_parallel.install(model, mesh)
        blocks.install_remat(model)
        if self.strategy.config.sequence_parallel:
            sequence.install(model, mesh)
        if self.strategy.config.chunked_cross_entropy is not None:
            projection_heads.install(
                model, mesh, self.strategy.config.chunked_cross_entropy, compiled=self.compiles_blocks
            )
        if self.compiles_blocks:
            compiled_blocks.install(model, mesh, warns=self.warns_of_blocks)
        else:
            layer_patch.undo(model, [layer_patch.COMPILED])
        for patch in model_patchers:
            patch(model)
        for optimizer in inventory.model_optimizers(model):
            compiled_updates.choose(optimizer, is_compiled=self.compiles_blocks)
        for layer in _private.flatten_layers(model):
            # For plain models around these layers: XLA takes no variables that are on several devices.
            layer.supports_jit = False

    def _invalidate(self, left: set[Storage]) -> None:
        """Invalidate storages that variables have left, and the functions that read them."""
        if not left:
            return
        self.strategy.moves += 1
        self.strategy.functions.clear()
        _forget_functions(self.model)
        for each in left:
            if not each.members:
                each.invalidate(f"variables of model '{self.model.name}'")

    def _agree_on_values(self) -> None:
        """Check that all clients of a launched run created the same variables with the same initial values."""
        model = self.model
        values: dict[str, object] = {}
        for variable in [v for v, _ in inventory.owned_variables(model)] + inventory.optimizer_variables(model):
            current = _private.backend_variable(variable)
            if not isinstance(current, ShardedVariable):
                continue
            found = current.storage.pop_checksum(current.member)
            if found is not None:
                spec = current.layout.spec
                values[f"variable {len(values)}"] = [spec.path, list(spec.shape), spec.dtype, found]
        if values:
            clients.here().agree(
                f"the initial values of model '{model.name}'",
                {"number of variables": len(values), **values},
                error=StrategyError,
                hint="Build the same model on all clients, after keras.utils.set_random_seed with the same number.",
            )

    # --- traced functions

    def storages(self) -> Storages:
        """Return the storage of each variable of the model and of its optimizers.

        Storages, and not their ids, so that no id is used again.
        """
        model = self.model
        variables = [variable for variable, _ in inventory.owned_variables(model)]
        variables += inventory.optimizer_variables(model)
        return {id(v): getattr(_private.backend_variable(v), "storage", None) for v in variables}


class TracedStorages:
    """The storages of a model when a function was traced, to find out later whether variables moved.

    Args:
        attached: The model.
    """

    def __init__(self, attached: AttachedModel):
        self._attached = attached
        self._moves = -1
        self._storages: Storages = {}

    def have_changed(self) -> bool:
        """Return True if a variable moved since the last call of this method or of `note`."""
        if self._attached.strategy.moves == self._moves:
            return False
        before = self._storages
        self.note()
        return any(self._storages.get(key, storage) is not storage for key, storage in before.items())

    def note(self) -> None:
        """Record the storages. Call this after a trace, which may create variables."""
        self._moves = self._attached.strategy.moves
        self._storages = self._attached.storages()


def attached(model: keras.Model, strategy: StrategyBase) -> AttachedModel:
    """Return the `AttachedModel` of a model and a strategy. The first call creates it; no variable is changed."""
    found: AttachedModel | None = strategy.attached.get(model)
    if found is None:
        found = strategy.attached[model] = AttachedModel(model, strategy)
    return found


def check_can_compile_blocks(strategy: StrategyBase) -> None:
    """Raise `StrategyError` if the mesh has a context axis, on which XLA cannot compile blocks."""
    if strategy.mesh_shape.contexts > 1:
        raise StrategyError(
            "jit_compile=True does not work on a mesh with a context axis: an XLA program of one device cannot "
            "exchange chunks of sequences. Leave one of them out. Received: jit_compile=True, "
            f"mesh={strategy.mesh_shape}"
        )


def refresh_model_of(function: object, strategy: StrategyBase) -> None:
    """Refresh the Keras model that a step function is a method of, if the function is a method of a model."""
    model = getattr(function, "__self__", None)
    if isinstance(model, keras.Model):
        attached(model, strategy).refresh()


def check_not_elsewhere(model: keras.Model, strategy: StrategyBase) -> None:
    """Raise `StrategyError` if the model belongs to another strategy."""
    other = _private.distribute_strategy(model)
    if other is not None and not isinstance(other, StrategyBase):
        raise StrategyError(
            f"Model '{model.name}' was built under another strategy, {type(other).__name__}, which holds its "
            "variables. Build the model outside of that strategy's scope, or under this strategy's scope(), and "
            f"copy the weights: new_model.set_weights(model.get_weights()). Received: strategy={strategy!r}"
        )
    if other is not None and other is not strategy:
        raise StrategyError(
            f"Model '{model.name}' was built or compiled under another strategy. Compile it with this one: "
            f"model.compile(..., strategy=strategy) moves it from another ShardedStrategy. Its strategy: {other!r}. "
            f"Received: strategy={strategy!r}"
        )
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable) and current.mesh != strategy.mesh:
            raise StrategyError(
                f"Variable '{variable.path}' of model '{model.name}' is on another mesh, because another model "
                f"shares it. Compile that model with this strategy, or build a new model. Its mesh: {current.mesh}. "
                f"Received: strategy={strategy!r}"
            )


def outermost_first(models: Iterable[keras.Model]) -> list[keras.Model]:
    """Sort models so that each comes before the models that it contains."""
    return sorted(models, key=lambda model: -len(_private.flatten_layers(model)))


def _forget_functions(model: keras.Model) -> None:
    """Drop the traced functions of other models that share layers with a model whose variables moved."""
    shared = {id(layer) for layer in _private.flatten_layers(model)}
    for other in _private.traced_models():
        if other is not model and any(id(layer) in shared for layer in _private.flatten_layers(other)):
            other.train_function = other.test_function = other.predict_function = None


def _still_holds(placement: ModelPlacement, stored: Sequence[VariableLayout | None]) -> bool:
    """Return True if the variables that are stored in groups are in the groups of the placement."""
    pairs = zip(placement.variables, stored, strict=True)
    return all(each is None or not each.grouped or each == layout for layout, each in pairs)


def _with_layers(
    placement: ModelPlacement, owned: Sequence[tuple[keras.Variable, keras.Layer | None]]
) -> ModelPlacement:
    """Return a placement whose specs have the layers of the variables."""
    variables = tuple(
        dataclasses.replace(layout, spec=dataclasses.replace(layout.spec, layer=layer))
        for layout, (_, layer) in zip(placement.variables, owned, strict=True)
    )
    return dataclasses.replace(placement, variables=variables)
