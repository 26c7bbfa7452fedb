"""What a model consists of: its variables and the optimizers that train it."""

import gc
import weakref
from collections.abc import Iterable, Iterator

import keras

from tfshard import _private
from tfshard.devices import clients
from tfshard.layouts.layout_map import VariableSpec


def owned_variables(model: keras.Model) -> list[tuple[keras.Variable, keras.Layer]]:
    """Each variable of a model once, with the layer that owns it."""
    owned, seen = [], set()
    for layer in _private.flatten_layers(model):
        for variable in _private.own_variables(layer):
            if id(variable) not in seen:
                seen.add(id(variable))
                owned.append((variable, layer))
    return owned


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of the optimizers that train a model, and of those that they wrap."""
    parts = [part for optimizer in optimizers_of(model) for part in _private.optimizer_chain(optimizer)]
    return [variable for part in parts for variable in _private.optimizer_own_variables(part)]


# --- The optimizers of a model ----------------------------------------------------------------------

# Optimizers that have updated sharded variables or hold slots of them, in the order in which they came.
_seen_optimizers: "weakref.WeakKeyDictionary[keras.optimizers.Optimizer, None]" = weakref.WeakKeyDictionary()
# Those with which some model was compiled: they belong to that one, also after it was compiled with another.
_compiled_optimizers: "weakref.WeakSet[keras.optimizers.Optimizer]" = weakref.WeakSet()


def note_optimizer(callers: Iterable[object]) -> None:
    """Remembers the outermost optimizer among those that are running."""
    optimizer = next((caller for caller in callers if isinstance(caller, keras.optimizers.Optimizer)), None)
    if optimizer is not None and optimizer not in _seen_optimizers:
        _seen_optimizers[optimizer] = None


def note_compiled(optimizer: keras.optimizers.Optimizer | None) -> None:
    """Remembers that a model was compiled with an optimizer."""
    _compiled_optimizers.update(_private.optimizer_chain(optimizer))


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers that train a model: its own, and those of custom loops."""
    return [*own_optimizers(model), *loop_optimizers(model)]


def own_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizer that a model is compiled with, if it is, and those that are its attributes."""
    compiled = getattr(model, "optimizer", None)
    return [*([] if compiled is None else [compiled]), *attribute_optimizers(model).values()]


def attribute_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return the optimizers that are attributes of a model or of its layers, by name, without the compiled one.

    Examples are the two of a GAN, and those of layers that train by themselves (Hinton 2022, Forward-Forward). The
    optimizer that a nested model is compiled with counts only if it is an attribute of another name, too.
    """
    layers = _private.flatten_layers(model)
    seen = {id(part) for part in _private.optimizer_chain(getattr(model, "optimizer", None))}
    found: dict[str, keras.optimizers.Optimizer] = {}
    for number, layer in enumerate(layers):
        # Keras numbers the layers of a process: a name has to be the same in the next one.
        place = f"layer_{number}/" if number else ""
        for name, optimizer in _optimizers_in(layer):
            is_compiled = name == "optimizer" and isinstance(layer, keras.Model)
            if id(optimizer) not in seen and not is_compiled:
                seen |= {id(part) for part in _private.optimizer_chain(optimizer)}
                found[f"{place}{name}"] = optimizer
    return found


def _optimizers_in(owner: keras.Layer) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """The attributes of a layer that are optimizers, or lists or dicts of optimizers."""
    for name, value in sorted(vars(owner).items()):
        if name.startswith(_private.TRACKING_ATTRIBUTE):
            continue
        members: Iterable[tuple[object, object]] = ()
        if isinstance(value, keras.optimizers.Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            members = enumerate(value)
        elif isinstance(value, dict):
            members = value.items()
        for key, member in members:
            if isinstance(member, keras.optimizers.Optimizer):
                yield f"{name}/{key}", member


def loop_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Optimizers of custom training loops that were built for variables of a model; without its attributes."""
    taken = {id(part) for optimizer in own_optimizers(model) for part in _private.optimizer_chain(optimizer)}
    owned = {id(variable) for variable, _ in owned_variables(model)}

    def find() -> list[keras.optimizers.Optimizer]:
        return [
            optimizer
            for optimizer in list(_seen_optimizers)
            if optimizer not in _compiled_optimizers
            and id(optimizer) not in taken
            and any(
                id(variable) in owned
                for part in _private.optimizer_chain(optimizer)
                for variable in _private.optimizer_references(part)
            )
        ]

    found = find()
    if len(found) > 1 or (found and clients.here().is_launched):
        # One that is not used any more may still be there, for as long as Python likes.
        found.clear()
        gc.collect()
        found = find()
    return found


def variable_spec(variable: keras.Variable, layer: keras.Layer | None) -> VariableSpec:
    """What a layout is decided from, for a Keras variable."""
    current = _private.backend_variable(variable)  # None in an abstract model.
    return VariableSpec(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=keras.backend.standardize_dtype((variable if current is None else current).dtype),
        trainable=variable.trainable,
        layer=layer,
    )


def has_no_call(model: keras.Model) -> bool:
    """Whether a model cannot be called: its `train_step` calls the models inside of it (a VAE, a GAN)."""
    return type(model).call is keras.Model.call
