"""Models, with their optimizers and metrics, brought to the mesh.

That is done when a model is compiled, before each step for what it has got since, and at the end of a
`strategy.scope()` for models that were born in it.
"""

import collections
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, transfer
from tfshard.errors import StrategyError
from tfshard.graph import inventory
from tfshard.layouts import placement
from tfshard.layouts.config import ShardingConfig
from tfshard.layouts.layout_map import VariableSpec
from tfshard.operations import (
    adapters,
    averages,
    blocks,
    convolution,
    embedding_lookups,
    embedding_updates,
    layer_patch,
    lookups,
    loops,
    sequence,
    unsupported,
    vocabulary,
)
from tfshard.storage.initial_values import HostValue
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import kept_errors, reshard
from tfshard.training.placements import Placer

# models.py adds the function that gives a model a compile() with strategy= and on-mesh step functions.
model_adopters: list[Callable[[keras.Model], keras.Model]] = []


class Adopter(Placer):
    """The part of a strategy that brings models to where their placements have them.

    Args:
        mesh: The mesh.
        config: The settings.

    Attributes:
        moves: How often variables went to other storages: functions that were traced before read the old ones.
        given_up: How many models another strategy has taken over: others may have had variables in common with them.
    """

    def __init__(self, mesh: dtensor.Mesh, config: ShardingConfig):
        super().__init__(mesh, config)
        self.moves = 0
        self.given_up = 0
        # Functions that run a step, by the user's own: forgotten when variables move.
        self._functions: weakref.WeakKeyDictionary[Callable[..., object], Callable[..., object]] = (
            weakref.WeakKeyDictionary()
        )
        self._has_births = False
        # Variables that were born while a step was traced, by id.
        self._born_in_steps: weakref.WeakValueDictionary[int, ShardedVariable] = weakref.WeakValueDictionary()
        # Models that a pipeline computes in parts, and those parts that are on this mesh.
        self.in_parts: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self.own_parts: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def distribute(self, model: keras.Model) -> None:
        """Reshards the variables of a built model in place, keeping their values.

        Raises:
            StrategyError: The model was built under another strategy.
            LayoutError: The layout map does not fit; the model is unchanged.
            UnsupportedLayerError: The model has a layer that DTensor cannot expand.
        """
        self.check_takes(model)
        check_not_elsewhere(model, self)
        unsupported.check_layers(model)
        self.check_layouts(model)
        if reshard.to_mesh(self._placed(model), self.mesh):
            _forget_functions(model)

    def check_takes(self, model: keras.Model) -> None:
        """Raises `StrategyError` for a model that this strategy cannot take whole; none without a pipeline axis."""

    def _placed(self, model: keras.Model, *, anew: bool = False) -> list[reshard.Placed]:
        """The variables of a model that have values, and where they go.

        Raises:
            LayoutError: The layout map does not fit.
        """
        placed = self._placement(model, anew=anew)
        placed.check_faults()
        owned = [variable for variable, _ in inventory.owned_variables(model)]
        return [
            (variable, layout)
            for variable, layout in zip(owned, placed.variables, strict=True)
            if _private.backend_variable(variable) is not None
        ]

    def adopt(self, variables: Iterable[keras.Variable]) -> None:
        """Reshards variables that belong neither to a layer nor to a parameter: of a metric or an optimizer."""
        for variable in variables:
            current = _private.backend_variable(variable)
            if current is not None and not (isinstance(current, ShardedVariable) and current.mesh == self.mesh):
                layout = self.plan_variable(inventory.variable_spec(variable, None))
                reshard.replace(variable, layout=layout, mesh=self.mesh)

    def adopt_global_seed(self) -> None:
        """Brings Keras's generator of seeds for random operations without one to the mesh, if it was made elsewhere.

        Left on the host, every device would draw from it by itself, in no certain order.
        """
        generator = _private.global_seed_generator()
        if generator is None:
            return
        current = _private.backend_variable(generator.state)
        if current is not None and not (isinstance(current, ShardedVariable) and current.mesh == self.mesh):
            layout = self.plan_variable(inventory.variable_spec(generator.state, None))
            # The one on the host keeps its value: functions that no strategy runs may draw from it.
            seed = reshard.sharded(transfer.to_host(current), current, layout=layout, mesh=self.mesh)
            _private.set_backend_variable(generator.state, seed)

    def adopt_model(self, model: keras.Model) -> None:
        """Brings to the mesh whatever a step of a model uses and is not there yet, and to its place what is elsewhere:
        variables, optimizers with their slots, metrics.

        Raises:
            StrategyError, LayoutError, UnsupportedLayerError: As `distribute`.
        """
        self.distribute(model)
        self.adopt(loops.states(model))
        for optimizer in inventory.own_optimizers(model):
            embedding_updates.check(optimizer, [variable for variable, _ in inventory.owned_variables(model)])
            self.adopt_optimizer(optimizer)
        for metric in _private.compiled_metrics(model):
            self.adopt(metric.variables)
        if inventory.has_no_call(model) and model.layers and all(layer.built for layer in model.layers):
            model.built = True  # Keras builds a model by calling it.
        if model.built:
            self.group_variables(model)

    def adopt_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Brings an optimizer that was made outside the scope, perhaps trained already, to the mesh.

        Slots of variables that are on the mesh come to the layouts of their variables.
        """
        for part in _private.optimizer_chain(optimizer):
            averages.install(part)
            _private.set_distribute_strategy(part, self)
            references: dict[str, list[tf.Variable]] = {}
            for variable in _private.optimizer_references(part):
                references.setdefault(variable.path.replace("/", "_"), []).append(_private.backend_variable(variable))
            seen: collections.Counter[str] = collections.Counter()
            for variable in _private.optimizer_own_variables(part):
                current = _private.backend_variable(variable)
                owner = _private.slot_owner(variable.name, references)
                # Variables of one path have slots of one name, in the same order.
                reference = None if owner is None else references[owner][seen[variable.name] % len(references[owner])]
                seen[variable.name] += 1
                if not isinstance(reference, ShardedVariable):
                    reference = None
                mesh = self.mesh if reference is None else reference.mesh
                if current is None or (
                    # A slot may have been born on the mesh before its variable came there.
                    isinstance(current, ShardedVariable)
                    and current.mesh == mesh
                    and (reference is None or self._is_slot_of(current, reference))
                ):
                    continue
                spec = inventory.variable_spec(variable, None)
                options = reshard.options_of(current)
                make = functools.partial(self.create_slot, spec=spec, reference=reference, optimizer=part, **options)
                reshard.exchange(variable, make)

    @staticmethod
    def _is_slot_of(slot: ShardedVariable, reference: ShardedVariable) -> bool:
        """Whether a slot is where `create_slot` puts it."""
        follows = placement.follows(slot.layout.spec, reference.layout)
        return not follows or any(known is slot for known in reference.slots.values())

    def create_slot(
        self,
        value: HostValue,
        spec: VariableSpec,
        reference: ShardedVariable | None,
        optimizer: keras.optimizers.Optimizer,
        **options: Any,
    ) -> ShardedVariable:
        """A variable of an optimizer; as the parameter it belongs to, when it has its shape."""
        owner = None if reference is None else reference.layout
        layout = placement.slot_layout(spec, owner, self.config, mesh_shape=self.mesh_shape)
        # Of a model that is cut into parts, parameters are on several meshes.
        mesh = self.mesh if reference is None else reference.mesh
        if reference is None or not placement.follows(spec, reference.layout):
            return ShardedVariable(value, layout=layout, mesh=mesh, trainable=False, **options)
        number = sum(owner == id(optimizer) for owner, _ in reference.slots)
        key = (id(optimizer), number)
        place = reshard.slot_storage(reference, key, layout)
        slot = ShardedVariable(value, layout=layout, mesh=mesh, trainable=False, storage=place, **options)
        reference.slots[key] = slot
        return slot

    def place_waiting(self, variable: ShardedVariable) -> None:
        """Finds the model of a variable that waits on the host, and with it where its variables go, before the first
        value is set: files of weights are loaded before the scope ends. Does nothing if there is no such model yet."""
        if not self._has_births or variable.layout.spec.layer is None:
            return  # It is a metric's, or was made by itself: looking for models takes half a second.
        for model in _outside_in(_private.live_models(self)):
            if model in self.in_parts:
                continue
            owned = [_private.backend_variable(owned) for owned, _ in inventory.owned_variables(model)]
            if model.built and any(each is variable for each in owned):
                reshard.settle(self._placed(model), self.mesh, waiting=True)
                return

    def group_variables(self, model: keras.Model) -> None:
        """Brings the variables of a built model that are on the mesh, and their slots, to where its placement has them:
        to the layouts of their paths, and small ones into their groups.

        With `layout_map="auto"`, variables that were born before the model's map was known come to their layouts too.
        Does nothing for those that are there already. Those that are in a group, of another model that has them too,
        stay in it, so that functions that were traced before go on.
        """
        # Before the first collective: clients with other variables would hang in it.
        self._agree_on_values(model)
        self._forget_left(reshard.settle(self._placed(model), self.mesh), model)
        kept_errors.make(model, self.mesh)
        self._install(model)

    def _install(self, model: keras.Model) -> None:
        """Gives layers and metrics what they need over sharded variables. After the variables are in their places."""
        embedding_lookups.install([variable for variable, _ in inventory.owned_variables(model)])
        vocabulary.install(model, [variable for variable, _ in inventory.owned_variables(model)], self.mesh)
        convolution.install(model, self.mesh)
        loops.install(model, self.mesh)
        lookups.install(model)
        adapters.install(model)
        blocks.install_remat(model)
        if self.config.sequence_parallel:
            sequence.install(model, self.mesh)
        for layer in _private.flatten_layers(model):
            # Plain models around them: XLA takes no variables that are on several devices.
            layer.supports_jit = False

    def _forget_left(self, left: set[Storage], model: keras.Model) -> None:
        """Makes sure that nothing goes on with storages that variables have left."""
        if not left:
            return
        self.moves += 1
        self._functions.clear()
        _forget_functions(model)
        for each in left:
            if not each.members:
                each.spoil()

    def _agree_on_values(self, model: keras.Model) -> None:
        """Checks that all clients of a launched run made the same variables with the same initial values."""
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

    # --- models that are born under `strategy.scope()`

    def note_birth(self, variable: ShardedVariable, *, in_step: bool) -> None:
        """Remembers that a variable was born under the strategy, so that its model is looked for: not if that was in a
        step that is traced, whose function has it where it is."""
        if in_step:
            self._born_in_steps[id(variable)] = variable
        else:
            self._has_births = True

    def _is_in_functions(self, model: keras.Model) -> bool:
        """Whether functions may read a model's variables where they are that nobody here can make anew: those of a
        loop of the user's, whose first step built the model."""
        variables = (_private.backend_variable(variable) for variable, _ in inventory.owned_variables(model))
        return not model.compiled and any(self._born_in_steps.get(id(each)) is each for each in variables)

    def adopt_born(self) -> None:
        """Gives the models that were born under the strategy the behaviour of `as_distributed`.

        They are looked for because no hook of Keras's names them. A model's constructor keeps what
        `tf.distribute.get_strategy` gives (`TensorFlowTrainer.__init__`) and calls nothing on it; the trackers of its
        attributes ask for the type of the strategy only; and a functional model comes after its layers, so it is not
        among the callers when their variables are made. The first call that a strategy gets with a model in it is
        `run`, in fit, after compile.
        """
        if not self._has_births or not _private.is_eager():
            return
        self._has_births = False
        models = [
            model
            for model in _private.live_models(self)
            if model not in self.in_parts and not self._is_in_functions(model)
        ]
        # Variables in a group of a model that is in another one would stay there.
        for model in _outside_in(models):
            for adopt in model_adopters:
                adopt(model)
            self.adopt_model(model)


def _outside_in(models: Iterable[keras.Model]) -> list[keras.Model]:
    """Models in an order in which each comes before those that it has in it."""
    return sorted(models, key=lambda model: -len(_private.flatten_layers(model)))


def check_not_elsewhere(model: keras.Model, strategy: Adopter) -> None:
    """Raises `StrategyError` when the model belongs to another strategy."""
    other = _private.distribute_strategy(model)
    if other is not None and not isinstance(other, Adopter):
        raise StrategyError(
            f"Model '{model.name}' was built under another strategy, {type(other).__name__}, which holds its "
            "variables. Build the model outside of that strategy's scope, or under this strategy's scope(), and bring "
            f"the weights along: new_model.set_weights(model.get_weights()). Received: strategy={strategy!r}"
        )
    if other is not None and other is not strategy:
        raise StrategyError(
            f"Model '{model.name}' was built or compiled under another strategy. Compile it with this one: "
            "model.compile(..., strategy=strategy) takes it over from another ShardedStrategy. "
            f"Its strategy: {other!r}. Received: strategy={strategy!r}"
        )
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable) and current.mesh != strategy.mesh:
            raise StrategyError(
                f"Variable '{variable.path}' of model '{model.name}' lives on another mesh, of another model that has "
                "it, too. Compile that one with this strategy, or build a new model. "
                f"Its mesh: {current.mesh}. Received: strategy={strategy!r}"
            )


def take_over(model: keras.Model, strategy: Adopter) -> None:
    """Reshards a model that another strategy has, keeping its values: it is this one's then. Does nothing for others.

    What it has in common with models of the other strategy goes with it; these cannot be trained any more before they
    are compiled with this one, too.

    Raises:
        StrategyError, LayoutError, UnsupportedLayerError: As `distribute`; the model stays with its strategy.
    """
    other: Any = _private.distribute_strategy(model)
    if not isinstance(other, Adopter) or other is strategy:
        return
    if model in other.in_parts or model in other.own_parts:
        return  # `distribute` says why it cannot be.
    strategy.check_takes(model)
    unsupported.check_layers(model)
    placed = strategy._placed(model, anew=True)
    strategy.check_layouts(model)
    before = [_private.backend_variable(variable) for variable, _ in placed]
    reshard.to_mesh(placed, strategy.mesh, anew=True)
    for each in (model, *_private.flatten_layers(model)):
        if isinstance(each, keras.Model) and _private.distribute_strategy(each) is other:
            _private.set_distribute_strategy(each, strategy)
    _give_up(model, other, before)


def _give_up(model: keras.Model, strategy: Adopter, before: Sequence[tf.Variable]) -> None:
    """Forgets, in a strategy, a model that another one has taken over.

    Args:
        model: The model.
        strategy: The one that had it.
        before: The variables that it had there.
    """
    strategy.given_up += 1
    layer_patch.undo(model, layer_patch.OF_MESHES)
    now = {id(_private.backend_variable(variable)) for variable, _ in inventory.owned_variables(model)}
    left = [each for each in before if isinstance(each, ShardedVariable) and id(each) not in now]
    for each in left:
        del each.storage.members[each.member]
    strategy._forget_left({each.storage for each in left}, model)


def _forget_functions(model: keras.Model) -> None:
    """Has other models that share layers with a model, inside of it or around it, make their functions anew: what
    those read has moved."""
    shared = {id(layer) for layer in _private.flatten_layers(model)}
    for other in _private.traced_models():
        if other is not model and any(id(layer) in shared for layer in _private.flatten_layers(other)):
            other.train_function = other.test_function = other.predict_function = None
