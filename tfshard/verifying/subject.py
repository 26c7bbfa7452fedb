"""The state that a training step reads and writes: saved, restored, and swapped for plain variables on one device."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.graph import inventory
from tfshard.layouts import boxes
from tfshard.layouts.variable_layout import Axes
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training.strategy import ShardedStrategy
from tfshard.verifying.operation_check import worst_of


class Subject:
    """A model under a strategy, with the state that a step reads and writes.

    Attributes:
        model: The model.
        strategy: The strategy of the model.
        optimizers: The compiled optimizer, and optimizers that are attributes of the model.
    """

    def __init__(self, model: keras.Model, strategy: ShardedStrategy):
        self.model, self.strategy = model, strategy
        self._held: dict[Storage, list[np.ndarray]] = {}
        # Variables that layers hold without Keras, by path, while they are on one device.
        self._plain: dict[str, tf.Variable] = {}
        self._others: list[tuple[dtensor.DVariable, list[np.ndarray]]] = []
        self._before: dict[str, np.ndarray] = {}
        self.optimizers = inventory.model_optimizers(model)

    def variables(self) -> dict[str, keras.Variable]:
        """Return all Keras variables of layers, optimizers, metrics and seeds, each once, by a unique name."""
        found = [variable for variable, _ in inventory.owned_variables(self.model)]
        for optimizer in self.chain():
            found += _private.variables_of_optimizer(optimizer)
        for metric in _private.compiled_metrics(self.model):
            found += metric.variables
        generator = _private.global_seed_generator()
        found += [] if generator is None else [generator.state]
        named: dict[str, keras.Variable] = {}
        seen = set()
        for variable in found:
            if id(variable) in seen or _private.backend_variable(variable) is None:
                continue
            seen.add(id(variable))
            name, number = variable.path, 1
            while name in named:
                number += 1
                name = f"{variable.path} #{number}"
            named[name] = variable
        return named

    def chain(self) -> list[keras.optimizers.Optimizer]:
        """Return the optimizers and the optimizers that they wrap."""
        return [part for optimizer in self.optimizers for part in _private.optimizer_chain(optimizer)]

    def raw_variables(self) -> list[tuple[keras.Layer, str, ShardedVariable]]:
        """Return (layer, attribute, variable) of the variables that layers hold without Keras."""
        found = []
        for layer in _private.flatten_layers(self.model):
            for name, value in vars(layer).items():
                if isinstance(value, ShardedVariable):
                    found.append((layer, name, value))
        return found

    def storages(self) -> dict[Storage, str]:
        """Return the storages of the variables, each once, with the name of the first variable."""
        found: dict[Storage, str] = {}
        for name, variable in self.variables().items():
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable):
                found.setdefault(current.storage, name)
        for _, _, raw in self.raw_variables():
            found.setdefault(raw.storage, raw.path)
        return found

    def values(self) -> dict[str, np.ndarray]:
        """Return the full values on the host, by name."""
        named = {name: _private.backend_variable(variable) for name, variable in self.variables().items()}
        named |= {raw.path: raw for _, _, raw in self.raw_variables()} | self._plain
        return {name: np.array(transfer.to_host(current)) for name, current in named.items()}

    def remember(self, used: Iterable[tf.Variable] = ()) -> None:
        """Save the local shards of variables that are new since the last call.

        Args:
            used: Variables of a traced step; some may belong to no known object.
        """
        for storage in self.storages():
            if storage not in self._held:
                self._held[storage] = storage.local_copies()
        known = {id(storage.buffer) for storage in self._held} | {id(variable) for variable, _ in self._others}
        for variable in used:
            if isinstance(variable, dtensor.DVariable) and id(variable) not in known:
                self._others.append((variable, [np.array(shard) for shard in dtensor.unpack(variable.value())]))
        if any(name not in self._before for name in self.variables()):
            self._before = self.values() | self._before

    @property
    def before(self) -> Mapping[str, np.ndarray]:
        """The saved full values, by name."""
        return self._before

    def restore(self) -> None:
        """Restore the saved local shards on every device."""
        for storage, shards in self._held.items():
            storage.set_local(shards)
        for variable, shards in self._others:
            variable.assign(dtensor.pack([tf.constant(shard) for shard in shards], variable.layout))

    @contextlib.contextmanager
    def on_one_device(self) -> Iterator[None]:
        """Replace the variables by plain variables with equal values, and detach the strategy, in this context."""
        default = tf.distribute.get_strategy()
        owners = {id(owner): (owner, _private.distribute_strategy(owner)) for owner in [self.model, *self.chain()]}
        inside = {id(variable): variable for variable in self.variables().values()}
        before = {key: _private.backend_variable(variable) for key, variable in inside.items()}
        plain = {key: _private.plain_variable(transfer.to_host(current), current) for key, current in before.items()}
        with contextlib.ExitStack() as stack:
            for layer, name, raw in self.raw_variables():
                value = self._plain[raw.path] = _private.plain_variable(raw.numpy(), raw)
                stack.enter_context(_replaced(layer, name, value))
            try:
                for key, variable in inside.items():
                    _private.set_backend_variable(variable, plain[key])
                for owner, _ in owners.values():
                    _private.set_distribute_strategy(owner, None if owner is self.model else default)
                yield
            finally:
                self._plain.clear()
                for key, variable in inside.items():
                    _private.set_backend_variable(variable, before[key])
                for owner, strategy in owners.values():
                    _private.set_distribute_strategy(owner, strategy)


@contextlib.contextmanager
def _replaced(owner: keras.Layer, name: str, value: tf.Variable) -> Iterator[None]:
    """Set an attribute of an object for a while, bypassing Keras's tracking."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is missing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


def axes_of(tensor: tf.Tensor) -> Axes:
    """Return the mesh axis, or None, of each dim of an eager DTensor."""
    return transfer.axes_of(dtensor.fetch_layout(tensor))


def differing_copies(shards: Iterable[tf.Tensor], axes: Axes, mesh: dtensor.Mesh) -> str | None:
    """Return a text if two devices hold different copies of the same shard of a tensor, else None.

    Devices may round sums differently, which the comparison allows.
    """
    first: dict[tuple[int, ...], tuple[str, np.ndarray]] = {}
    for shard, location in zip(shards, mesh.local_device_locations(), strict=True):
        part = boxes.part(axes, location)
        value, device = np.asarray(shard), shard.device.rpartition("device:")[2]
        expected_device, expected = first.setdefault(part, (device, value))
        if value.tobytes() == expected.tobytes():
            continue
        worst = worst_of(value, expected, 1e-5 if value.dtype.itemsize >= 4 else 2e-2)
        if worst is not None:
            return (f"device {expected_device} has {worst.one_device} and device {device} has {worst.sharded} at index "
                    f"{worst.index} of the part that both hold")  # fmt: skip
    return None
