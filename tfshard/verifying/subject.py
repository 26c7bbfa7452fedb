"""What a training step reads and writes: kept, brought back, and swapped for plain variables on one device."""

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
    """A model under a strategy, with all that a step of it reads and writes.

    Attributes:
        model: The model.
        strategy: Its strategy.
        optimizers: The model's own, and those that it has as attributes.
    """

    def __init__(self, model: keras.Model, strategy: ShardedStrategy):
        self.model, self.strategy = model, strategy
        self._held: dict[Storage, list[np.ndarray]] = {}
        # Variables that layers have without Keras, by path, while they are on one device.
        self._plain: dict[str, tf.Variable] = {}
        self._others: list[tuple[dtensor.DVariable, list[np.ndarray]]] = []
        self._before: dict[str, np.ndarray] = {}
        self.optimizers = inventory.own_optimizers(model)

    def variables(self) -> dict[str, keras.Variable]:
        """All Keras variables of layers, optimizers, metrics and seeds, each once, by a name of its own."""
        found = [variable for variable, _ in inventory.owned_variables(self.model)]
        for optimizer in self.chain():
            found += _private.optimizer_own_variables(optimizer)
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
        """The optimizers and those that they wrap."""
        return [part for optimizer in self.optimizers for part in _private.optimizer_chain(optimizer)]

    def raw_variables(self) -> list[tuple[keras.Layer, str, ShardedVariable]]:
        """The variables that layers have without Keras: object, attribute, variable."""
        found = []
        for layer in _private.flatten_layers(self.model):
            for name, value in vars(layer).items():
                if isinstance(value, ShardedVariable):
                    found.append((layer, name, value))
        return found

    def storages(self) -> dict[Storage, str]:
        """Where the variables live, each once, with the name of the first."""
        found: dict[Storage, str] = {}
        for name, variable in self.variables().items():
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable):
                found.setdefault(current.storage, name)
        for _, _, raw in self.raw_variables():
            found.setdefault(raw.storage, raw.path)
        return found

    def values(self) -> dict[str, np.ndarray]:
        """The whole values on the host, by name."""
        named = {name: _private.backend_variable(variable) for name, variable in self.variables().items()}
        named |= {raw.path: raw for _, _, raw in self.raw_variables()} | self._plain
        return {name: np.array(transfer.to_host(current)) for name, current in named.items()}

    def remember(self, used: Iterable[tf.Variable] = ()) -> None:
        """Notes what each device holds of variables that were not there when this was called last.

        Args:
            used: Variables of a traced step, of which some may belong to nothing that is known here.
        """
        for storage in self.storages():
            if storage not in self._held:
                self._held[storage] = [np.array(piece) for _, piece in storage.local_tensors()]
        known = {id(storage.buffer) for storage in self._held} | {id(variable) for variable, _ in self._others}
        for variable in used:
            if isinstance(variable, dtensor.DVariable) and id(variable) not in known:
                self._others.append((variable, [np.array(piece) for piece in dtensor.unpack(variable.value())]))
        if any(name not in self._before for name in self.variables()):
            self._before = self.values() | self._before

    @property
    def before(self) -> Mapping[str, np.ndarray]:
        """The whole values that were remembered, by name."""
        return self._before

    def restore(self) -> None:
        """Brings every device back to what was remembered."""
        for storage, pieces in self._held.items():
            storage.set_local(pieces)
        for variable, pieces in self._others:
            variable.assign(dtensor.pack([tf.constant(piece) for piece in pieces], variable.layout))

    @contextlib.contextmanager
    def on_one_device(self) -> Iterator[None]:
        """While it is open, variables are plain ones with the same values, and the model is under no strategy."""
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
    """An attribute of this object only, without Keras taking note of it."""
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
    """The mesh axis, or None, of each dim of an eager DTensor."""
    return transfer.axes_of(dtensor.fetch_layout(tensor))


def differing_copies(pieces: Iterable[tf.Tensor], axes: Axes, mesh: dtensor.Mesh) -> str | None:
    """Which devices hold different copies of the same part of a tensor, in words, or None.

    Sums may be rounded differently on each device.
    """
    first: dict[tuple[int, ...], tuple[str, np.ndarray]] = {}
    for piece, location in zip(pieces, mesh.local_device_locations(), strict=True):
        part = boxes.part(axes, location)
        value, device = np.asarray(piece), piece.device.rpartition("device:")[2]
        expected_device, expected = first.setdefault(part, (device, value))
        if value.tobytes() == expected.tobytes():
            continue
        worst = worst_of(value, expected, 1e-5 if value.dtype.itemsize >= 4 else 2e-2)
        if worst is not None:
            return (f"device {expected_device} has {worst.one_device} and device {device} has {worst.sharded} at index "
                    f"{worst.index} of the part that both hold")  # fmt: skip
    return None
