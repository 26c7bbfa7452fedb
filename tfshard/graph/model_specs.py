"""The specs from which a plan is made: variables of a model, and slots of an optimizer. No device is touched."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.errors import MeshError, StrategyError
from tfshard.graph import inventory
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.layouts.layout_map import VariableSpec

MeshLike: TypeAlias = dtensor.Mesh | Mapping[str, int]
"""What a plan can be for: a mesh, or a mapping from axis name to size."""

ModelOrSpecs: TypeAlias = keras.Model | Iterable[VariableSpec]
"""What a plan can be of: a built model, or variables."""

OptimizerLike: TypeAlias = keras.optimizers.Optimizer | str | None
"""An optimizer, its name, or none."""

# Stands for the optimizer that a model was compiled with.
AUTO = "auto"


def abstract_model(build: Callable[[], keras.Model]) -> keras.Model:
    """Build a model for planning only: its variables have shapes and dtypes, but no values.

    Keras does not allocate variables inside `build`, so a model of any size takes little memory and time. Only a
    variable that is made from a value has the value. Reading any other variable is an error, and so is calling or
    training the model.

    Args:
        build: Makes and returns a built model, compiled or not: a functional model, or one on which `build` was called.
            The function must make all layers, and must not load weights or call `keras.utils.clear_session()`.

    Returns:
        The model.

    Raises:
        StrategyError: `build` did not return a built Keras model, or variables of the model were allocated.

    Example: a layer of 400 GB.

    >>> import keras, tfshard
    >>> def build():
    ...     return keras.Sequential([keras.Input((100_000,)), keras.layers.Dense(1_000_000)])
    >>> model = tfshard.abstract_model(build)
    >>> f"{model.count_params():,}"
    '100,001,000,000'
    """
    with _private.without_distribution(), _private.abstract_scope(_refuse_value) as given:
        model = build()
    check_built(model)
    has_value = {id(variable) for variable in given}
    allocated = [v.path for v in model.variables if id(v) not in has_value and _private.backend_variable(v) is not None]
    if allocated:
        raise StrategyError(
            "The function given to abstract_model must create all layers itself, and must not call "
            f"keras.utils.clear_session(). Variables of model '{model.name}' that were allocated: {allocated[:3]}. "
            f"Received: build={build!r}"
        )
    return model


def _refuse_value(path: str, shape: Sequence[int], dtype: object = None) -> NoReturn:
    raise StrategyError(
        f"Variable '{path}' has no value: its model was made by tfshard.abstract_model, for planning only. Build the "
        f"model outside of abstract_model to call or train it. Received: a read of '{path}' of shape={tuple(shape)}"
    )


def check_built(model: object) -> None:
    """Raise `StrategyError` unless `model` is a built `keras.Model`."""
    if not isinstance(model, keras.Model):
        raise StrategyError(
            f"A plan needs a keras.Model or a list of VariableSpec. Received: {model!r} (of type {type(model)})"
        )
    if not model.built:
        raise StrategyError(
            f"Model '{model.name}' is not built, so its variables are not known. Give it a keras.Input, or call "
            f"model.build(input_shape). Received: model={model!r}"
        )


def specs_of(model_or_specs: ModelOrSpecs) -> tuple[VariableSpec, ...]:
    """Return the variables of a built model, in the order of its layers; a list of specs is returned as a tuple."""
    if not isinstance(model_or_specs, keras.Model) and isinstance(model_or_specs, Iterable):
        specs = tuple(model_or_specs)
        if all(isinstance(spec, VariableSpec) for spec in specs):
            return specs
    check_built(model_or_specs)
    return tuple(
        inventory.variable_spec(variable, layer) for variable, layer in inventory.owned_variables(model_or_specs)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """An optimizer variable.

    Attributes:
        spec: The name (as path), shape and dtype.
        reference: The path of the slot's parameter, which has the same shape, or None.
        name: The name without the parameter's name, such as `"momentum"`.
    """

    spec: VariableSpec
    reference: str | None
    name: str


def optimizer_of(model: ModelOrSpecs, optimizer: OptimizerLike) -> OptimizerLike:
    """Return the optimizer to plan with. `"auto"` is the compiled optimizer of the model, else Adam."""
    if optimizer != AUTO:
        return optimizer
    compiled: OptimizerLike = getattr(model, "optimizer", None)
    return "adam" if compiled is None else compiled


def slots_of(optimizer: OptimizerLike, specs: Iterable[VariableSpec]) -> tuple[SlotSpec, ...]:
    """Return the variables that an optimizer will have for these parameters.

    The function assumes nothing about the optimizer. It builds a copy in a TensorFlow graph, where nothing is
    allocated, for placeholders of the same paths, shapes and dtypes, and lists the new variables. The step count and
    the learning rate are among them.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, its name, or None for no slots.
        specs: The model's variables; untrained variables are skipped.

    Raises:
        StrategyError: Keras does not know the optimizer.
    """
    if optimizer is None:
        return ()
    try:
        original: keras.optimizers.Optimizer = keras.optimizers.get(optimizer)
    except ValueError:
        raise StrategyError(
            "optimizer must be a keras.optimizers.Optimizer, the name of one such as 'adam', or None. "
            f"Received: optimizer={optimizer!r}"
        ) from None
    config = original.get_config()
    trained = [spec for spec in specs if spec.trainable]
    with tf.Graph().as_default(), _private.without_distribution():
        copy = type(original).from_config(config)
        copy.build([_private.placeholder_variable(spec.path, spec.shape, spec.dtype) for spec in trained])
    shapes = {spec.path.replace("/", "_"): spec for spec in trained}
    slots = []
    for part in _private.optimizer_chain(copy):
        for variable in _private.variables_of_optimizer(part):
            prefix = _private.slot_owner(variable.name, shapes)
            spec = VariableSpec(path=variable.name, shape=tuple(variable.shape), dtype=variable.dtype, trainable=False)
            reference = shapes[prefix] if prefix is not None and shapes[prefix].shape == spec.shape else None
            slots.append(
                SlotSpec(
                    spec=spec,
                    reference=reference.path if reference else None,
                    name=variable.name[len(prefix) + 1 :] if prefix else variable.name,
                )
            )
    return tuple(slots)


def mesh_sizes(mesh: MeshLike) -> MeshAxes:
    """Return the axes of a DTensor mesh or of a mapping."""
    if isinstance(mesh, dtensor.Mesh):
        return axis_sizes(mesh)
    valid = isinstance(mesh, Mapping) and bool(mesh)
    if not valid or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise MeshError(
            "A mesh to plan for is a mesh from tfshard.create_mesh(), or a mapping from axis name to a positive "
            f"integer such as {{'batch': 64, 'model': 8}}. Received: mesh={mesh!r}"
        )
    return MeshAxes.of(mesh)
