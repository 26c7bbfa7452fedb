"""The variables of a training run that a checkpoint holds, under keys that survive a restart."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import CheckpointError
from tfshard.graph import inventory, model_specs
from tfshard.storage.variables import ShardedVariable
from tfshard.training.attached_variables import attach_optimizer
from tfshard.training.strategy import ShardedStrategy

GLOBAL_SEED = "seed/global"
# The kind of the state that reductions of gradients keep, and the prefix of its keys.
REDUCTION = "compression"

Optimizers: TypeAlias = (
    keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] | Mapping[str, keras.optimizers.Optimizer] | None
)
"""What a user gives of optimizers: one, several, or several with names; None: those that are found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateVariable:
    """A variable of a training run.

    Attributes:
        key: The name in a checkpoint.
        kind: `"parameter"`, `"state"`, `"slot"`, `"seed"`, `"metric"` or `"compression"`.
        path: The Keras path.
        shape: The shape of the full variable.
        dtype: The name of the dtype.
        value: The `tf.Variable` inside; None until the optimizer is built.
    """

    key: str
    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    value: tf.Variable | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NamedOptimizer:
    """An optimizer of a training run.

    Attributes:
        name: The name in a checkpoint; empty for the compiled optimizer.
        optimizer: The `keras.optimizers.Optimizer`.
        variables: The variables to build an unbuilt optimizer for; None: the optimizer stays as it is.
    """

    name: str
    optimizer: keras.optimizers.Optimizer
    variables: tuple[keras.Variable, ...] | None

    def prefix(self) -> str:
        """Return the prefix of the optimizer's keys."""
        return f"{_OPTIMIZERS}{self.name}/" if self.name else "optimizer/"


_OPTIMIZERS = "optimizers/"


def optimizer_of(key: str) -> str | None:
    """Return the name of the optimizer of a key; empty for the compiled optimizer, None for other keys.

    >>> optimizer_of("optimizers/d_optimizer/dense_kernel_momentum")
    'd_optimizer'
    >>> optimizer_of("optimizer/iterations"), optimizer_of("model/dense/kernel")
    ('', None)
    """
    if key.startswith("optimizer/"):
        return ""
    return key.removeprefix(_OPTIMIZERS).rpartition("/")[0] if key.startswith(_OPTIMIZERS) else None


def optimizers(
    model: keras.Model, given: Optimizers = None, stored: Iterable[str] | None = None
) -> list[NamedOptimizer]:
    """Return the optimizers of a training run, under the names that they have in a checkpoint.

    An attribute of the model has the name of the attribute. Another optimizer has its name in the mapping `given`, or
    else the name that the user gave it, or the name of its class.

    Args:
        model: A built model.
        given: An optimizer, a list of optimizers, or a mapping from name to optimizer, without the model's attributes.
            None: the optimizers of custom loops that have slots of the model's variables. Empty: the compiled optimizer
            only.
        stored: The keys of a checkpoint, which tell for which variables to build an unbuilt optimizer.

    Raises:
        CheckpointError: An argument that is not an optimizer, or two optimizers of one name.
    """
    compiled = getattr(model, "optimizer", None)
    found: dict[str, keras.optimizers.Optimizer] = {} if compiled is None else {"": compiled}
    wanted = _given(given)
    if wanted is None or wanted:
        found |= inventory.attribute_optimizers(model)
    known = {id(part) for optimizer in found.values() for part in _private.optimizer_chain(optimizer)}
    if wanted is None or not isinstance(given, Mapping):
        others = inventory.loop_optimizers(model) if wanted is None else wanted.values()
        names: collections.Counter[str] = collections.Counter()
        wanted = {}
        for optimizer in others:
            if id(optimizer) in known:
                continue
            name = _private.given_name(optimizer)
            names[name] += 1
            if given is None and names[name] > 1:
                raise CheckpointError(
                    f"Model '{model.name}' has several optimizers named '{name}', so a checkpoint cannot tell them "
                    "apart. Make them attributes of the model (model.d_optimizer = ...), or name them: save(..., "
                    "optimizers={'discriminator': ..., 'generator': ...}), and the same in restore. Received: "
                    f"{[type(each).__name__ for each in others]}"
                )
            wanted[name if names[name] == 1 else f"{name}_{names[name] - 1}"] = optimizer
    for name, optimizer in wanted.items():
        if id(optimizer) in known:
            continue
        if name in found:
            raise CheckpointError(
                f"Two optimizers are called '{name}': an attribute of model '{model.name}' and one in optimizers=. "
                f"Give the second another name. Received: optimizers={list(wanted)}"
            )
        found[name] = optimizer
    return [
        NamedOptimizer(name=name, optimizer=optimizer, variables=_to_build(model, name, optimizer, stored))
        for name, optimizer in found.items()
    ]


def _given(given: Optimizers) -> dict[str, keras.optimizers.Optimizer] | None:
    """Return a user's optimizers by name, or by number if they have no names; None for None."""
    if given is None:
        return None
    if isinstance(given, keras.optimizers.Optimizer):
        given = [given]
    valid = isinstance(given, (list, tuple, Mapping))
    named = dict(given) if isinstance(given, Mapping) else dict(enumerate(given)) if valid else {}
    wrong = [value for value in named.values() if not isinstance(value, keras.optimizers.Optimizer)]
    if not valid or wrong or not all(isinstance(name, int) or (isinstance(name, str) and name) for name in named):
        raise CheckpointError(
            "optimizers must be a keras.optimizers.Optimizer, a list of them, a mapping from name to optimizer, or "
            f"None for the optimizers that tfshard finds. Received: optimizers={given!r}"
        )
    return {str(name): optimizer for name, optimizer in named.items()}


def _to_build(
    model: keras.Model, name: str, optimizer: keras.optimizers.Optimizer, stored: Iterable[str] | None
) -> tuple[keras.Variable, ...] | None:
    if optimizer.built:
        return None
    keys = _Keys(model)
    owners = {keys.path(variable.path).replace("/", "_"): variable for variable in model.trainable_variables}
    slots = [key.rpartition("/")[2] for key in stored or () if optimizer_of(key) == name]
    found = {_private.slot_owner(slot, owners) for slot in slots} - {None}
    # `compile` gives every model an optimizer, even a model that trains with its attributes.
    if not name and (found or not inventory.attribute_optimizers(model)):
        return tuple(model.trainable_variables)
    return tuple(variable for owner, variable in owners.items() if owner in found) or None


class _Keys:
    """Makes keys that are equal for equal models, even for a second model in the same process.

    Keras numbers layers without given names across the process: the kernel of the first model is "dense/kernel", the
    kernel of the second model "dense_1/kernel". `_Keys` numbers them within the model, and keeps given names.
    """

    def __init__(self, model: keras.Model):
        self._names: dict[str, str] = {}
        counts: collections.Counter[str] = collections.Counter()
        for layer in _private.flatten_layers(model):
            for named in (layer, *layer._seed_generators):
                base = _private.auto_name(named)
                if named.name not in self._names and re.fullmatch(rf"{re.escape(base)}(_\d+)?", named.name):
                    self._names[named.name] = base if counts[base] == 0 else f"{base}_{counts[base]}"
                    counts[base] += 1
        self._used: collections.Counter[str] = collections.Counter()

    def path(self, path: str) -> str:
        """Return a path with names that are numbered within the model."""
        return "/".join(self._names.get(part, part) for part in path.split("/"))

    def key(self, kind: str, name: str) -> str:
        """Return a unique key; the second key of a name gets a number."""
        key = f"{kind}/{name}"
        self._used[key] += 1
        return key if self._used[key] == 1 else f"{key}#{self._used[key]}"


def path_names(model: keras.Model) -> Callable[[str], str]:
    """Return a function of the paths of a model's variables: the same paths in an equal model of another process."""
    return _Keys(model).path


def check_built(model: keras.Model) -> None:
    """Raise `CheckpointError` unless `model` is a built `keras.Model`."""
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            "A checkpoint needs a keras.Model that is built. Give it a keras.Input, or call model.build(input_shape). "
            f"Received: model={model!r}"
        )


def collect(
    model: keras.Model, *, metrics: bool = True, named: Iterable[NamedOptimizer] | None = None
) -> list[StateVariable]:
    """Return the variables of a built model, of its optimizers (built or not), of seeds and of metrics.

    Args:
        model: A built model.
        metrics: True to include the state of metrics, also the mean of the loss over the epoch.
        named: The optimizers; by default the result of `optimizers`.

    Raises:
        CheckpointError: The model is not built.
    """
    check_built(model)
    keys = _Keys(model)
    trained = {id(variable) for variable in model.trainable_variables}
    of_metrics = {id(variable): metric for metric in model.metrics for variable in metric.variables}
    found = []
    owners = {}
    for variable, _ in inventory.owned_variables(model):
        if id(variable) in of_metrics:
            continue
        path = keys.path(variable.path)
        owners[variable.path.replace("/", "_")] = path.replace("/", "_")
        found.append(_of(variable, keys.key("model", path), "parameter" if id(variable) in trained else "state"))
    for each in optimizers(model) if named is None else named:
        found += _of_optimizer(model, each, keys, owners)
    found += [each for variable in found for each in _kept(variable)]
    generator = _private.global_seed_generator()
    if generator is not None:
        found.append(_of(generator.state, GLOBAL_SEED, "seed"))
    if metrics:
        # A nested layer gives its metrics to the outer layer, too.
        for variable_id, metric in of_metrics.items():
            variable = next(v for v in metric.variables if id(v) == variable_id)
            found.append(_of(variable, keys.key("metric", f"{metric.name}/{keys.path(variable.path)}"), "metric"))
    return found


def _of(variable: keras.Variable, key: str, kind: str) -> StateVariable:
    value = _private.backend_variable(variable)
    if value is None:
        raise CheckpointError(
            f"Variable '{variable.path}' has no value yet. Build the model first. Received: {variable}"
        )
    return StateVariable(
        key=key, kind=kind, path=variable.path, shape=tuple(value.shape), dtype=value.dtype.name, value=value
    )


def _kept(variable: StateVariable) -> Iterator[StateVariable]:
    """Yield the state that the reduction of a variable's gradient keeps between steps."""
    for name, kept in variable.value.kept.items() if isinstance(variable.value, ShardedVariable) else ():
        key = f"{REDUCTION}/{variable.key.partition('/')[2]}/{name}"
        yield StateVariable(
            key=key, kind=REDUCTION, path=kept.path, shape=tuple(kept.shape), dtype=kept.dtype.name, value=kept
        )


def _of_optimizer(
    model: keras.Model, named: NamedOptimizer, keys: _Keys, owners: dict[str, str]
) -> list[StateVariable]:
    """Return the variables of an optimizer. Their keys have parameter paths, not numbers, which freezing changes."""
    optimizer = named.optimizer

    def key(name: str) -> str:
        owner = _private.slot_owner(name, owners)
        return keys.key(named.prefix()[:-1], name if owner is None else owners[owner] + name[len(owner) :])

    if named.variables is not None:
        wanted = {variable.path for variable in named.variables}
        specs = [spec for spec in model_specs.specs_of(model) if spec.path in wanted]
        return [
            StateVariable(
                key=key(slot.spec.path), kind="slot", path=slot.spec.path, shape=slot.spec.shape, dtype=slot.spec.dtype,
                value=None,
            )
            for slot in model_specs.slots_of(optimizer, specs)
        ]  # fmt: skip
    parts = _private.optimizer_chain(optimizer)
    variables = [variable for part in parts for variable in _private.variables_of_optimizer(part)]
    return [_of(variable, key(variable.name), "slot") for variable in variables]


def build_optimizers(model: keras.Model, named: Iterable[NamedOptimizer]) -> None:
    """Build the optimizers that are not built and that have variables to build for."""
    strategy = _private.distribute_strategy(model)
    for each in named:
        if each.optimizer.built or each.variables is None:
            continue
        if isinstance(strategy, ShardedStrategy):
            attach_optimizer(each.optimizer, strategy)  # The optimizer may have been made outside of the scope.
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            each.optimizer.build(list(each.variables))


def build_optimizer(model: keras.Model) -> None:
    """Build the compiled optimizer of a model, if it is not built."""
    build_optimizers(model, [each for each in optimizers(model, ()) if not each.name])


def make_global_seed(model: keras.Model) -> StateVariable:
    """Make Keras's global seed generator, which the saved run had used, and return its state."""
    strategy = _private.distribute_strategy(model)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        generator = _private.global_seed_generator(create=True)
    return _of(generator.state, GLOBAL_SEED, "seed")
