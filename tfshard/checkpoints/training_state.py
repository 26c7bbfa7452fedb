"""What a training run consists of: every variable that a checkpoint holds, under a key that survives a restart."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# The kind of what the compression of gradients keeps, and what the keys begin with.
COMPRESSION = "compression"

Optimizers: TypeAlias = (
    keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] | Mapping[str, keras.optimizers.Optimizer] | None
)
"""What a user gives of optimizers: one, several, or several with names; None: those that are found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateVariable:
    """A variable of a training run.

    Attributes:
        key: What it is called in a checkpoint.
        kind: `"parameter"`, `"state"`, `"slot"`, `"seed"`, `"metric"` or `"compression"`.
        path: Its Keras path.
        shape: Of the whole variable.
        dtype: Its name.
        value: The `tf.Variable` inside; None while the optimizer is not built.
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
        name: What it is called in a checkpoint; empty for the one that the model is compiled with.
        optimizer: The `keras.optimizers.Optimizer`.
        variables: What it is to be built for, if it is not built; None: it stays as it is.
    """

    name: str
    optimizer: keras.optimizers.Optimizer
    variables: tuple[keras.Variable, ...] | None

    def prefix(self) -> str:
        """What the keys of its variables begin with."""
        return f"{_OPTIMIZERS}{self.name}/" if self.name else "optimizer/"


_OPTIMIZERS = "optimizers/"


def optimizer_of(key: str) -> str | None:
    """The name of the optimizer that a key belongs to; empty for the compiled one, None for other keys.

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
    """The optimizers of a training run, by the names that they have in a checkpoint.

    Those that are attributes of the model are called like them. Others are called as in `given`, or else after their
    class, or by the name that they were given.

    Args:
        model: A built model.
        given: An optimizer, a list of them, or a mapping from name to optimizer: those that are not the model's
            attributes. None: those of custom loops that have slots of the model's variables. Empty: the compiled one
            only.
        stored: The keys of a checkpoint, from which is seen what an optimizer that is not built is to be built for.

    Raises:
        CheckpointError: Not optimizers, or two of one name.
    """
    own = getattr(model, "optimizer", None)
    found: dict[str, keras.optimizers.Optimizer] = {} if own is None else {"": own}
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
                    f"Model '{model.name}' is trained by several optimizers of the name '{name}', so a checkpoint "
                    "could not tell them apart. Make them attributes of the model (model.d_optimizer = ...), or name "
                    "them: save(..., optimizers={'discriminator': ..., 'generator': ...}), and the same in restore. "
                    f"Received: {[type(each).__name__ for each in others]}"
                )
            wanted[name if names[name] == 1 else f"{name}_{names[name] - 1}"] = optimizer
    for name, optimizer in wanted.items():
        if id(optimizer) in known:
            continue
        if name in found:
            raise CheckpointError(
                f"Two optimizers are called '{name}': an attribute of model '{model.name}' and one of optimizers=. "
                f"Give the second another name. Received: optimizers={list(wanted)}"
            )
        found[name] = optimizer
    return [
        NamedOptimizer(name=name, optimizer=optimizer, variables=_to_build(model, name, optimizer, stored))
        for name, optimizer in found.items()
    ]


def _given(given: Optimizers) -> dict[str, keras.optimizers.Optimizer] | None:
    """The optimizers that a user gave, by any name."""
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
            f"None for those that are found. Received: optimizers={given!r}"
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
    # `compile` gives every model an optimizer, also one that trains with its attributes.
    if not name and (found or not inventory.attribute_optimizers(model)):
        return tuple(model.trainable_variables)
    return tuple(variable for owner, variable in owners.items() if owner in found) or None


class _Keys:
    """Makes keys: the same for the same model, also when it is the second of its kind in the process.

    Keras counts the layers that it names itself over the whole process: the kernel of the first model is
    "dense/kernel", that of the second "dense_1/kernel". Here they are counted within the model. Names that were
    given stay.
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
        """A path with the names counted within the model."""
        return "/".join(self._names.get(part, part) for part in path.split("/"))

    def key(self, kind: str, name: str) -> str:
        """A key that no other variable has; the second of a name gets a number."""
        key = f"{kind}/{name}"
        self._used[key] += 1
        return key if self._used[key] == 1 else f"{key}#{self._used[key]}"


def check_built(model: keras.Model) -> None:
    """Raises `CheckpointError` unless `model` is a built `keras.Model`."""
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            "A checkpoint needs a keras.Model that is built: give it a keras.Input, or call model.build(input_shape). "
            f"Received: model={model!r}"
        )


def collect(
    model: keras.Model, *, metrics: bool = True, named: Iterable[NamedOptimizer] | None = None
) -> list[StateVariable]:
    """The variables of a built model, of its optimizers (also when they are not built yet), seeds and metrics.

    Args:
        model: A built model.
        metrics: Whether to collect the state of metrics, the mean of the loss over the epoch among them.
        named: Its optimizers; by default those that `optimizers` finds.

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
        # A layer of a layer gives its metrics to both.
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
    """What the compression of a variable's gradient keeps."""
    for name, kept in variable.value.kept.items() if isinstance(variable.value, ShardedVariable) else ():
        key = f"{COMPRESSION}/{variable.key.partition('/')[2]}/{name}"
        yield StateVariable(
            key=key, kind=COMPRESSION, path=kept.path, shape=tuple(kept.shape), dtype=kept.dtype.name, value=kept
        )


def _of_optimizer(
    model: keras.Model, named: NamedOptimizer, keys: _Keys, owners: dict[str, str]
) -> list[StateVariable]:
    """Slots by their parameter's path and not by their number, so that freezing a layer does not mix them up."""
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
    variables = [variable for part in parts for variable in _private.optimizer_own_variables(part)]
    return [_of(variable, key(variable.name), "slot") for variable in variables]


def build_optimizers(model: keras.Model, named: Iterable[NamedOptimizer]) -> None:
    """Gives optimizers their slots, those that have none yet and are to have some."""
    strategy = _private.distribute_strategy(model)
    for each in named:
        if each.optimizer.built or each.variables is None:
            continue
        if isinstance(strategy, ShardedStrategy):
            attach_optimizer(each.optimizer, strategy)  # It may have been made outside of the scope.
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            each.optimizer.build(list(each.variables))


def build_optimizer(model: keras.Model) -> None:
    """Gives the optimizer that a model is compiled with its slots, if it has none yet."""
    build_optimizers(model, [each for each in optimizers(model, ()) if not each.name])


def make_global_seed(model: keras.Model) -> StateVariable:
    """Keras's global seed generator, made now: the run that is restored had used it."""
    strategy = _private.distribute_strategy(model)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        generator = _private.global_seed_generator(create=True)
    return _of(generator.state, GLOBAL_SEED, "seed")
