"""Checks on Keras models before anything is done to them, and what a model consists of."""

import dataclasses
from collections.abc import Callable

import keras

from tfshard import _private
from tfshard.errors import StrategyError, UnsupportedLayerError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refused:
    """Built-in layers that DTensor cannot expand: tests/built_in_layers.py has each.

    Attributes:
        layers: Their classes.
        when: Which of them; by default all.
        reason: What cannot be expanded, by the name of TensorFlow's operation.
        remedy: What to do instead.
    """

    layers: tuple[type, ...]
    when: Callable[[keras.Layer], bool] = lambda layer: True
    reason: str
    remedy: str


def _refused(
    *names: str, reason: str, remedy: str, when: Callable[[keras.Layer], bool] = lambda layer: True
) -> _Refused:
    # Those that this Keras has: 3.12 has no AdaptiveAveragePooling1D.
    layers = tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))
    return _Refused(layers=layers, when=when, reason=reason, remedy=remedy)


def _cannot(op: str) -> str:
    return f"DTensor cannot expand its {op}"


def _is_dilated(layer: keras.Layer) -> bool:
    rate = layer.dilation_rate
    return any(r > 1 for r in (rate if isinstance(rate, tuple) else (rate,)))


_PIPELINE = "apply it in the input pipeline, with dataset.map"
_RANDOM_PIPELINE = "apply it in the input pipeline, with tfshard.random_map"
_FROZEN = "or pass trainable=False if neither it nor a layer before it is to be trained"
# In this order: the first that fits is reported.
_REFUSED = (
    _refused(
        "RNN",
        when=lambda layer: not layer.unroll,
        reason=_cannot("time loop (EmptyTensorList)"),
        remedy="pass unroll=True (its number of timesteps must be fixed)",
    ),
    _refused(
        *("DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D"),
        when=lambda layer: layer.trainable or _is_dilated(layer),
        reason=_cannot("gradient (DepthwiseConv2dNativeBackpropFilter)"),
        remedy="use a Conv layer with groups= the number of input channels (for a separable one followed by a Conv "
        f"layer with kernel_size=1), {_FROZEN}",
    ),
    _refused(
        *("Conv1D", "Conv2D", "Conv3D"),
        when=_is_dilated,
        reason=_cannot("dilation (SpaceToBatchND)"),
        remedy="use dilation_rate=1 with a larger kernel_size",
    ),
    _refused(
        "Conv3D",
        when=lambda layer: layer.groups > 1,
        reason="TensorFlow has no CPU kernel for its grouped convolution outside of XLA",
        remedy="use groups=1, or a Conv3D for each group of channels",
    ),
    _refused(
        *("AveragePooling1D", "AveragePooling2D", "AdaptiveAveragePooling1D", "AdaptiveAveragePooling2D"),
        when=lambda layer: layer.trainable,
        reason=_cannot("gradient (AvgPoolGrad)"),
        remedy="use max or global average pooling, strides in the convolution before it, or keras.ops.mean over a "
        f"keras.ops.reshape into windows, {_FROZEN}",
    ),
    _refused(
        *("AveragePooling3D", "AdaptiveAveragePooling3D"),
        when=lambda layer: layer.trainable,
        reason=_cannot("gradient (AvgPool3DGrad)"),
        remedy="use max or global average pooling, strides in the convolution before it, or keras.ops.mean over a "
        f"keras.ops.reshape into windows, {_FROZEN}",
    ),
    _refused(
        *("Resizing", "UpSampling2D"),
        when=lambda layer: layer.interpolation not in ("nearest", "bilinear"),
        reason=_cannot("interpolation (ResizeBicubic, ScaleAndTranslate)"),
        remedy="use interpolation='bilinear' or 'nearest'",
    ),
    _refused(
        "Resizing",
        when=lambda layer: layer.antialias,
        reason=_cannot("antialiasing (ScaleAndTranslate)"),
        remedy=f"use antialias=False, or {_PIPELINE}",
    ),
    _refused(
        "Normalization",
        reason="its mean and variance are constants outside of the mesh",
        remedy="use Rescaling(1 / std, offset=-mean / std) with lists of numbers, or " + _PIPELINE,
    ),
    _refused(
        "CategoryEncoding",
        when=lambda layer: layer.output_mode != "one_hot",
        reason=_cannot("count of categories (DenseBincount)"),
        remedy="use keras.ops.max (multi-hot) or keras.ops.sum (count) of keras.ops.one_hot over axis 1, or "
        + _PIPELINE,
    ),
    _refused("Hashing", reason=_cannot("AsString"), remedy=_PIPELINE),
    _refused("HashedCrossing", reason=_cannot("SparseCross"), remedy=_PIPELINE),
    _refused(
        *("IntegerLookup", "StringLookup", "TextVectorization"),
        reason=_cannot("vocabulary lookup (LookupTableFindV2)"),
        remedy=_PIPELINE,
    ),
    _refused("MelSpectrogram", reason=_cannot("padding (MirrorPad)"), remedy=_PIPELINE),
    _refused("RandomHue", "RandomSaturation", reason=_cannot("RGBToHSV"), remedy=_RANDOM_PIPELINE),
    _refused("RandomPerspective", reason=_cannot("MatrixSolve"), remedy=_RANDOM_PIPELINE),
    _refused(
        *("RandAugment", "RandomRotation", "RandomShear", "RandomTranslation", "RandomZoom"),
        reason=_cannot("ImageProjectiveTransformV3"),
        remedy=_RANDOM_PIPELINE,
    ),
    _refused("AugMix", "CutMix", "MixUp", reason=_cannot("StatelessRandomGammaV3"), remedy=_RANDOM_PIPELINE),
    _refused("RandomElasticTransform", reason="DTensor did not finish compiling it", remedy=_RANDOM_PIPELINE),
)


def unsupported_reason(layer: keras.Layer) -> str | None:
    """Why DTensor cannot expand this layer, with the remedy, or None. All that is refused: docs/layers.md."""
    for refused in _REFUSED:
        if isinstance(layer, refused.layers) and refused.when(layer):
            return f"{refused.reason}; {refused.remedy}"
    return None


def check_layers(model: keras.Model) -> None:
    """Raises `UnsupportedLayerError` naming every layer that DTensor cannot expand, with the remedy."""
    found = [(layer, unsupported_reason(layer)) for layer in _private.flatten_layers(model)]
    lines = [f"- '{layer.name}' ({type(layer).__name__}): {reason}" for layer, reason in found if reason]
    if lines:
        raise UnsupportedLayerError(
            f"Model '{model.name}' has layers that cannot be sharded:\n" + "\n".join(lines) + "\nSee docs/layers.md."
        )


def can_group(model: keras.Model) -> bool:
    """Whether small variables may share buffers under the model's optimizer.

    An optimizer that overwrites weights by their average in a tf.cond does so one by one, and each of them would write
    its whole group.
    """
    chain = _private.optimizer_chain(getattr(model, "optimizer", None))
    return not any(part.use_ema and part.ema_overwrite_frequency for part in chain)


def check_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> None:
    """Raises `StrategyError` for gradient accumulation together with what reads the weights after it in one step.

    Args:
        model: The model.
        optimizer: The optimizer; by default the model's own.
    """
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    for optimizer in _private.optimizer_chain(chosen):
        if not getattr(optimizer, "gradient_accumulation_steps", None):
            continue
        constrained = [v.path for v in model.trainable_variables if v.constraint is not None]
        if optimizer.use_ema or constrained:
            raise StrategyError(
                f"Optimizer '{optimizer.name}' cannot combine gradient_accumulation_steps with use_ema or with "
                "variable constraints under a ShardedStrategy: both read weights that were written inside a tf.cond "
                "of the same step. Use a larger batch_size, or leave EMA and constraints out. Received: "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, use_ema={optimizer.use_ema}, "
                f"constrained variables={constrained}"
            )


def raise_jit_compile(model: keras.Model) -> None:
    raise StrategyError(
        f"Model '{model.name}' cannot be compiled with jit_compile=True under a ShardedStrategy: XLA does not see "
        "the mesh, DTensor compiles the step itself. Leave jit_compile out. Received: jit_compile=True"
    )
