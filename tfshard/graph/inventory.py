"""The variables of a model, and the optimizers that train it."""

import gc
from collections.abc import Iterable, Iterator

import keras

from tfshard import _private
from tfshard.devices import clients
from tfshard.layouts.layout_map import VariableSpec


def owned_variables(model: keras.Model) -> list[tuple[keras.Variable, keras.Layer]]:
    """Return each variable of a model once, with its layer."""
    owned, seen = [], set()
    for layer in _private.flatten_layers(model):
        for variable in _private.layer_variables(layer):
            if id(variable) not in seen:
                seen.add(id(variable))
                owned.append((variable, layer))
    return owned


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of the optimizers that train a model, and of the optimizers that they wrap."""
    parts = [part for optimizer in optimizers_of(model) for part in _private.optimizer_chain(optimizer)]
    return [variable for part in parts for variable in _private.variables_of_optimizer(part)]


# --- The optimizers of a model ----------------------------------------------------------------------

# Optimizers that have updated sharded variables or hold slots of them, in order of their first use.
_seen_optimizers: _private.WeakIdentitySet[keras.optimizers.Optimizer] = _private.WeakIdentitySet()
# Optimizers that some model was compiled with. They belong to that model, even after another compile.
_compiled_optimizers: _private.WeakIdentitySet[keras.optimizers.Optimizer] = _private.WeakIdentitySet()


def note_optimizer(callers: Iterable[object]) -> None:
    """Record the outermost optimizer among the running callers."""
    optimizer = next((caller for caller in callers if isinstance(caller, keras.optimizers.Optimizer)), None)
    if optimizer is not None and optimizer not in _seen_optimizers:
        _seen_optimizers.add(optimizer)


def note_compiled(optimizer: keras.optimizers.Optimizer | None) -> None:
    """Record that a model was compiled with an optimizer."""
    _compiled_optimizers.update(_private.optimizer_chain(optimizer))


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that train a model: its optimizers, and the optimizers of custom loops."""
    return [*model_optimizers(model), *loop_optimizers(model)]


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the compiled optimizer of a model, if any, and the optimizers that are attributes of the model."""
    compiled = getattr(model, "optimizer", None)
    return [*([] if compiled is None else [compiled]), *attribute_optimizers(model).values()]


def attribute_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return the optimizers that are attributes of a model or of its layers, by name, without the compiled optimizer.

    Examples are the two optimizers of a GAN, and the optimizers of layers that train separately (Hinton 2022,
    Forward-Forward). The compiled optimizer of a nested model counts only if it is also an attribute of another name.
    """
    layers = _private.flatten_layers(model)
    seen = {id(part) for part in _private.optimizer_chain(getattr(model, "optimizer", None))}
    found: dict[str, keras.optimizers.Optimizer] = {}
    for number, layer in enumerate(layers):
        # Keras numbers the layers of a process, but the name must be the same in the next process.
        place = f"layer_{number}/" if number else ""
        for name, optimizer in _optimizers_in(layer):
            is_compiled = name == "optimizer" and isinstance(layer, keras.Model)
            if id(optimizer) not in seen and not is_compiled:
                seen |= {id(part) for part in _private.optimizer_chain(optimizer)}
                found[f"{place}{name}"] = optimizer
    return found


def _optimizers_in(owner: keras.Layer) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """Yield the optimizers in the attributes of a layer, also in lists and dicts, with their names."""
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
    """Return the optimizers of custom training loops that were built for variables of a model, without attributes."""
    taken = {id(part) for optimizer in model_optimizers(model) for part in _private.optimizer_chain(optimizer)}
    owned = {id(variable) for variable, _ in owned_variables(model)}

    def find() -> list[keras.optimizers.Optimizer]:
        return [
            optimizer
            for optimizer in _seen_optimizers
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
        # Python may still hold an optimizer that is no longer used.
        found.clear()
        gc.collect()
        found = find()
    return found


def variable_spec(variable: keras.Variable, layer: keras.Layer | None) -> VariableSpec:
    """Return the spec of a Keras variable."""
    current = _private.backend_variable(variable)  # None in an abstract model.
    return VariableSpec(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=keras.backend.standardize_dtype((variable if current is None else current).dtype),
        trainable=variable.trainable,
        layer=layer,
    )


def has_no_call(model: keras.Model) -> bool:
    """Return True if a model has no `call`: its `train_step` calls the models inside it (a VAE, a GAN)."""
    return type(model).call is keras.Model.call
