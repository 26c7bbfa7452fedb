"""What a training run consists of: every variable that a checkpoint holds, under a key that survives a restart."""

import collections
import contextlib
import dataclasses
import re

import keras
import tensorflow as tf

from tfshard import _private, model_specs, support
from tfshard.errors import CheckpointError

GLOBAL_SEED = "seed/global"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateVariable:
    """A variable of a training run.

    Attributes:
        key: What it is called in a checkpoint.
        kind: `"parameter"`, `"state"`, `"slot"`, `"seed"` or `"metric"`.
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


def collect(model: keras.Model, *, metrics: bool = True) -> list[StateVariable]:
    """The variables of a built model, of its optimizer (also when that is not built yet), seeds and metrics.

    Args:
        model: A built model.
        metrics: Whether to collect the state of metrics, the mean of the loss over the epoch among them.

    Raises:
        CheckpointError: The model is not built.
    """
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            "A checkpoint needs a keras.Model that is built: give it a keras.Input, or call model.build(input_shape). "
            f"Received: model={model!r}"
        )
    keys = _Keys(model)
    trained = {id(variable) for variable in model.trainable_variables}
    of_metrics = {id(variable): metric for metric in model.metrics for variable in metric.variables}
    found = []
    owners = {}
    for variable, _ in support.owned_variables(model):
        if id(variable) in of_metrics:
            continue
        path = keys.path(variable.path)
        owners[variable.path.replace("/", "_")] = path.replace("/", "_")
        found.append(_of(variable, keys.key("model", path), "parameter" if id(variable) in trained else "state"))
    found += _of_optimizer(model, keys, owners)
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


def _of_optimizer(model: keras.Model, keys: _Keys, owners: dict[str, str]) -> list[StateVariable]:
    """Slots by their parameter's path and not by their number, so that freezing a layer does not mix them up."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []

    def key(name: str) -> str:
        owner = _private.slot_owner(name, owners)
        return keys.key("optimizer", name if owner is None else owners[owner] + name[len(owner) :])

    if not optimizer.built:
        specs = [slot.spec for slot in model_specs.slots_of(optimizer, model_specs.specs_of(model))]
        return [
            StateVariable(
                key=key(spec.path), kind="slot", path=spec.path, shape=spec.shape, dtype=spec.dtype, value=None
            )
            for spec in specs
        ]
    return [_of(variable, key(variable.name), "slot") for variable in support.optimizer_variables(model)]


def build_optimizer(model: keras.Model) -> None:
    """Gives the optimizer its slots, if it has none yet."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    strategy = _private.distribute_strategy(model)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        optimizer.build(model.trainable_variables)


def make_global_seed(model: keras.Model) -> StateVariable:
    """Keras's global seed generator, made now: the run that is restored had used it."""
    strategy = _private.distribute_strategy(model)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        generator = _private.global_seed_generator(create=True)
    return _of(generator.state, GLOBAL_SEED, "seed")
