"""Checks on a model before a step, and what makes it ready for one."""

import math
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.graph.inventory import note_compiled, optimizer_variables, own_optimizers, owned_variables
from tfshard.operations.unsupported import check_layers, raise_jit_compile
from tfshard.storage.storage import Storage
from tfshard.training.adoption import Adopter


def make_step_ready(fn: Callable[..., object], strategy: Adopter) -> None:
    """Makes the Keras model ready of which the strategy runs a step function, if it is one's."""
    model = getattr(fn, "__self__", None)
    if isinstance(model, keras.Model):
        make_ready(model, strategy)


_ready: weakref.WeakKeyDictionary[keras.Model, tuple[object, ...]] = weakref.WeakKeyDictionary()


def check_model(model: keras.Model, strategy: Adopter) -> None:
    """Raises unless the model can run under the strategy: layers, optimizer, layout map, no XLA compilation."""
    if model.compiled and model.jit_compile:
        raise_jit_compile(model)
    check_layers(model)
    strategy.check_layouts(model)


def make_ready(model: keras.Model, strategy: Adopter) -> None:
    """Checks a model before a step, and brings to the mesh what it has got since it was compiled: variables of layers
    that were built or added, an optimizer's, a metric's. Does nothing where nothing has changed.

    Raises:
        StrategyError, LayoutError, UnsupportedLayerError: As `check_model`.
    """
    if _private.is_eager():
        strategy.adopt_global_seed()
    owned = [*own_optimizers(model), *_private.listed_metrics(model)]
    seen = (weakref.ref(strategy), strategy.given_up, *_private.structure(model), *map(id, owned))
    if _ready.get(model) == seen:
        return
    note_compiled(getattr(model, "optimizer", None))
    check_model(model, strategy)
    if _private.is_eager():
        strategy.adopt_model(model)
        _ready[model] = seen


def forget_ready(model: keras.Model) -> None:
    """The model was compiled anew: `make_ready` looks at it again."""
    _ready.pop(model, None)


def check_process() -> None:
    """Raises `UnsupportedOperationError` if TensorFlow checks the numbers of all operations: DTensor cannot."""
    if _private.checks_all_numbers():
        raise UnsupportedOperationError(
            "tf.debugging.enable_check_numerics() adds operations that DTensor cannot expand, behind each operation. "
            "Call tf.debugging.disable_check_numerics(). To end training at a loss that is NaN or infinite, give fit "
            "keras.callbacks.TerminateOnNaN(). To find where such a number comes from, put "
            "tf.debugging.check_numerics(tensor, message) into a layer's call or a train_step, or train a few steps on "
            "one device. Received: check_numerics enabled"
        )


class Places:
    """Where the variables of a model were when a function was traced that reads them."""

    def __init__(self) -> None:
        self._moves = -1
        self._storages: dict[int, Storage | None] = {}

    def changed(self, model: keras.Model, strategy: Adopter) -> bool:
        """Whether any variable has moved since `note`, or since this was asked, as when another model was compiled."""
        if strategy.moves == self._moves:
            return False
        before = self._storages
        self.note(model, strategy)
        return any(self._storages.get(key, storage) is not storage for key, storage in before.items())

    def note(self, model: keras.Model, strategy: Adopter) -> None:
        """A function was traced, which may have made variables."""
        self._moves = strategy.moves
        variables = [variable for variable, _ in owned_variables(model)] + optimizer_variables(model)
        # With the storages themselves, so that their ids stay their own.
        self._storages = {id(v): getattr(_private.backend_variable(v), "storage", None) for v in variables}


def check_traced_arguments(fn: Callable[..., object]) -> None:
    """Raises `StrategyError` if the tf.function that is being traced around a step was called on a batch that is not on
    the mesh: DTensor would refuse it in words of its own."""
    with tf.init_scope():
        for tensor in _private.traced_arguments():
            shape = tuple(tensor.shape)  # Also of a sharded tensor, which NumPy would ask the value of.
            # DTensor broadcasts small integers.
            broadcast = not shape or (math.prod(shape) <= 128 and not tf.as_dtype(tensor.dtype).is_floating)
            if not broadcast and not transfer.is_dtensor(tensor):
                raise StrategyError(
                    "A tf.function that calls strategy.run was given a batch that is not on the mesh. Take its batches "
                    "from strategy.experimental_distribute_dataset(dataset), or call strategy.run(step_function, "
                    "args=(batch,)) outside of a tf.function, which puts them there. Received: a tensor of "
                    f"shape={shape} for a function that runs {fn!r}"
                )


def check_captures(graph: tf.Graph) -> None:
    """Raises `StrategyError` for a variable that a step uses and that is not on the mesh.

    DTensor would let every device read and write it by itself, in no certain order.
    """
    with tf.init_scope():
        strangers = [handle for handle in _private.captured_resources(graph) if not transfer.is_dtensor(handle)]
    if strangers:
        raise StrategyError(
            f"A step uses variable {_private.resource_name(strangers[0])}, which is not on the mesh. Make the "
            "optimizer, metric or layer that owns the variable under strategy.scope(), or an attribute of the model "
            "before compile. Make a plain tf.Variable under strategy.scope(), or with the model's add_weight."
        )
