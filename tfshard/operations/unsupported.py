"""Checks of Keras models before tfshard changes them: layers that DTensor cannot expand."""

import dataclasses
from collections.abc import Callable

import keras

from tfshard import _private
from tfshard.errors import UnsupportedLayerError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refused:
    """Built-in layers that DTensor cannot expand: tests/built_in_layers.py has each.

    Attributes:
        layers: Their classes.
        when: Selects layers of these classes; by default all.
        reason: The reason, with the name of TensorFlow's operation.
        remedy: A replacement for the layer.
    """

    layers: tuple[type, ...]
    when: Callable[[keras.Layer], bool] = lambda layer: True
    reason: str
    remedy: str


def _refused(
    *names: str, reason: str, remedy: str, when: Callable[[keras.Layer], bool] = lambda layer: True
) -> _Refused:
    # Make a refusal of the layers that this Keras has: 3.12 has no AdaptiveAveragePooling1D.
    layers = tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))
    return _Refused(layers=layers, when=when, reason=reason, remedy=remedy)


def _cannot(op: str) -> str:
    return f"DTensor cannot expand its {op}"


_PIPELINE = "apply it in the input pipeline, with dataset.map"
_RANDOM_PIPELINE = "apply it in the input pipeline, with tfshard.random_map"
# In this order: the first that fits is reported.
_REFUSED = (
    _refused(
        *("StringLookup", "TextVectorization"),
        reason="a device mesh cannot hold strings",
        remedy=_PIPELINE,
    ),
    _refused("HashedCrossing", reason=_cannot("SparseCross"), remedy=_PIPELINE),
    _refused("RandomElasticTransform", reason="DTensor did not finish compiling it", remedy=_RANDOM_PIPELINE),
)


def unsupported_reason(layer: keras.Layer) -> str | None:
    """Why DTensor cannot expand this layer, with the remedy, or None. All that is refused: docs/layers.md."""
    for refused in _REFUSED:
        if isinstance(layer, refused.layers) and refused.when(layer):
            return f"{refused.reason}; {refused.remedy}"
    return None


def check_layers(model: keras.Model) -> None:
    """Raise `UnsupportedLayerError` with every layer that DTensor cannot expand, and the remedy."""
    found = [(layer, unsupported_reason(layer)) for layer in _private.flatten_layers(model)]
    lines = [f"- '{layer.name}' ({type(layer).__name__}): {reason}" for layer, reason in found if reason]
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or []):
        if keras.backend.standardize_dtype(tensor.dtype) == "string":
            lines.append(f"- '{tensor.name}' (InputLayer): a device mesh cannot hold strings; {_PIPELINE}")
    if lines:
        raise UnsupportedLayerError(
            f"Model '{model.name}' has layers that cannot be sharded:\n"
            + "\n".join(lines)
            + "\nSee: tfshard docs layers"
        )
