"""The built-in Keras layers, a trial of each, and the result under a ShardedStrategy.

`python tests/built_in_layers.py` writes the table of docs/layers.md; tests/operations/test_layers.py checks it.
"""

import dataclasses
import pathlib
import re

import keras
import numpy as np

import tfshard
from tfshard.operations import unsupported

BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The model input for a layer under test, and whether a Dense stem comes before the layer.

    With a stem, the gradient must flow back through the layer under test. `rate` is the learning rate.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: float = 1.0
    stem: bool = True
    rate: float = 0.05

    def sample(self, rs: np.random.RandomState) -> np.ndarray:
        shape = (BATCH, *self.shape)
        if self.dtype == "int32":
            return rs.randint(0, int(self.high), shape)
        if self.dtype == "string":
            return rs.choice(["red", "green", "blue", "a rose is a rose"], shape).astype(object)
        return rs.uniform(0.0 if self.high > 1 else -1.0, self.high, shape).astype("float32")


KINDS = {
    "features": Kind(shape=(6,)),
    "numbers": Kind(shape=(6,), stem=False),
    "sequence": Kind(shape=(5, 8)),
    # For layers that add operations for each step.
    "short sequence": Kind(shape=(3, 8), rate=0.5),
    "image": Kind(shape=(8, 8, 4)),
    "volume": Kind(shape=(4, 4, 4, 4), rate=0.1),
    "sequence of images": Kind(shape=(2, 8, 8, 4), rate=0.1),
    "sequence of sequences": Kind(shape=(2, 5, 8), rate=0.1),
    "sequence of volumes": Kind(shape=(2, 4, 4, 4, 4), rate=0.1),
    "pixels": Kind(shape=(8, 8, 3), high=255.0, stem=False),
    "signal": Kind(shape=(64,), stem=False),
    "tokens": Kind(shape=(5,), dtype="int32", high=7, stem=False, rate=0.5),
    "strings": Kind(shape=(1,), dtype="string", stem=False),
}

# kind -> calls. `x` is the input (after the stem), `y` a second input of its shape.
# The losses and weights equal those on one device.
SAME = {
    "numbers": [
        "Discretization(bin_boundaries=[-0.5, 0.0, 0.5])(x)",
        "Discretization(bin_boundaries=[-0.5, 0.0, 0.5], output_mode='one_hot')(x)",
    ],
    "features": [
        "Dense(4)(x)",
        "Dense(3, activation='tanh', use_bias=False)(x)",
        "Dense(4, kernel_regularizer='l2', kernel_constraint='non_neg')(x)",
        "EinsumDense('ab,bc->ac', output_shape=4, bias_axes='c')(x)",
        "Identity()(x)",
        "Lambda(lambda t: t * 2.0)(x)",
        "Activation('gelu')(x)",
        "ReLU(max_value=1.0, negative_slope=0.1)(x)",
        "LeakyReLU()(x)",
        "ELU()(x)",
        "PReLU()(x)",
        "Softmax()(x)",
        "ActivityRegularization(l1=0.1, l2=0.1)(x)",
        "Flatten()(x)",
        "Reshape((3, 2))(x)",
        "Reshape((-1, 2))(x)",
        "RepeatVector(3)(x)",
        "BatchNormalization()(x)",
        "LayerNormalization()(x)",
        "RMSNormalization()(x)",
        "UnitNormalization()(x)",
        "GroupNormalization(groups=3)(x)",
        "GroupNormalization(groups=1)(x)",
        "SpectralNormalization(Dense(4))(x)",
        "Rescaling(0.1, offset=1.0)(x)",
        "Pipeline([Rescaling(0.1), Dense(4)])(x)",
        "Add()([x, y])",
        "Subtract()([x, y])",
        "Multiply()([x, y])",
        "Average()([x, y])",
        "Maximum()([x, y])",
        "Minimum()([x, y])",
        "Concatenate()([x, y])",
        "Dot(axes=1)([x, y])",
        "Dot(axes=1, normalize=True)([x, y])",
        "Rescaling([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], offset=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])(x)",
        "Normalization(mean=0.5, variance=2.0)(x)",
    ],
    "sequence": [
        "Dense(4)(x)",
        "EinsumDense('abc,cde->abde', output_shape=(5, 2, 4), bias_axes='de')(x)",
        "Conv1D(4, 3)(x)",
        "Conv1D(4, 3, padding='same', strides=2)(x)",
        "Conv1D(4, 3, groups=2)(x)",
        "Conv1DTranspose(4, 3)(x)",
        "Conv1DTranspose(4, 3, padding='same', strides=2)(x)",
        "MaxPooling1D(2)(x)",
        "MaxPooling1D(2, padding='same')(x)",
        "GlobalMaxPooling1D()(x)",
        "GlobalAveragePooling1D()(x)",
        "AdaptiveMaxPooling1D(2)(x)",
        "Attention()([x, y])",
        "Attention(use_scale=True, score_mode='concat')([x, y])",
        "AdditiveAttention()([x, y])",
        "MultiHeadAttention(2, 4)(x, y)",
        "MultiHeadAttention(2, 4, flash_attention=False, value_dim=3)(x, x, use_causal_mask=True)",
        "GroupQueryAttention(4, 4, 2)(x, y)",
        "GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True)",
        "Permute((2, 1))(x)",
        "Flatten()(x)",
        "Reshape((-1, 4))(x)",
        "Cropping1D(1)(x)",
        "ZeroPadding1D(2)(x)",
        "UpSampling1D(2)(x)",
        "Softmax(axis=1)(x)",
        "PReLU(shared_axes=[1])(x)",
        "Masking(0.0)(x)",
        "BatchNormalization()(x)",
        "BatchNormalization(axis=1)(x)",
        "LayerNormalization(axis=[1, 2])(x)",
        "RMSNormalization()(x)",
        "GroupNormalization(groups=4)(x)",
        "Concatenate(axis=1)([x, y])",
        "Dot(axes=(2, 2))([x, y])",
        "TimeDistributed(Dense(4))(x)",
        "TimeDistributed(Dense(4))(Masking(0.0)(x))",
        "Conv1D(8, 3, groups=8)(x)",
        "Conv1DTranspose(4, 3, dilation_rate=2)(x)",
        "Conv1D(4, 3, padding='causal', dilation_rate=2)(x)",
        "DepthwiseConv1D(3)(x)",
        "DepthwiseConv1D(3, padding='same', strides=2, depth_multiplier=2)(x)",
        "SeparableConv1D(4, 3)(x)",
        "SeparableConv1D(4, 3, padding='same', strides=2)(x)",
        "AveragePooling1D(2)(x)",
        "AveragePooling1D(2, padding='same')(x)",
        "AdaptiveAveragePooling1D(2)(x)",
        "Conv1D(4, 3, padding='same', dilation_rate=2)(x)",
    ],
    "short sequence": [
        "LSTM(4)(x)",
        "GRU(4)(x)",
        "SimpleRNN(4)(x)",
        "RNN(LSTMCell(4))(x)",
        "Bidirectional(LSTM(4))(x)",
        "LSTM(4, unroll=True)(x)",
        "LSTM(4, unroll=True, return_sequences=True, go_backwards=True)(x)",
        "GRU(4, unroll=True, go_backwards=True)(x)",
        "LSTM(4, unroll=True)(Masking(0.0)(x))",
        "GRU(4, unroll=True)(x)",
        "GRU(4, unroll=True, reset_after=False, return_sequences=True)(x)",
        "SimpleRNN(4, unroll=True)(x)",
        "RNN(LSTMCell(4), unroll=True)(x)",
        "RNN(GRUCell(4), unroll=True)(x)",
        "RNN(SimpleRNNCell(4), unroll=True)(x)",
        "RNN(StackedRNNCells([LSTMCell(4), GRUCell(4)]), unroll=True)(x)",
        "Bidirectional(LSTM(4, unroll=True))(x)",
        "Bidirectional(LSTM(4, unroll=True), merge_mode='sum')(x)",
        "Bidirectional(GRU(4, unroll=True, return_sequences=True), merge_mode='sum')(x)",
        "Bidirectional(SimpleRNN(4, unroll=True, return_sequences=True))(x)",
        "Lambda(lambda t: keras.ops.take(t, [2, 1, 0], axis=1))(SimpleRNN(4, unroll=True, "
        "return_sequences=True, go_backwards=True)(x))",
    ],
    "image": [
        "TimeDistributed(Conv1D(4, 3))(x)",
        "TimeDistributed(Dense(4))(x)",
        "TimeDistributed(MaxPooling1D(2))(x)",
        "Conv2D(4, 3)(x)",
        "Conv2D(4, 3, padding='same', strides=2)(x)",
        "Conv2D(4, 3, groups=2)(x)",
        "Conv2D(4, 3, groups=4)(x)",
        "Conv2DTranspose(4, 3)(x)",
        "Conv2DTranspose(4, 3, padding='same', strides=2)(x)",
        "Conv2DTranspose(4, 3, dilation_rate=2)(x)",
        "SpectralNormalization(Conv2D(4, 3))(x)",
        "MaxPooling2D(2)(x)",
        "MaxPooling2D(3, padding='same', strides=2)(x)",
        "GlobalMaxPooling2D()(x)",
        "GlobalAveragePooling2D(keepdims=True)(x)",
        "AdaptiveMaxPooling2D(3)(x)",
        "BatchNormalization()(x)",
        "GroupNormalization(groups=2)(x)",
        "Cropping2D(1)(x)",
        "ZeroPadding2D(1)(x)",
        "UpSampling2D(2)(x)",
        "UpSampling2D(2, interpolation='bilinear')(x)",
        "Permute((3, 1, 2))(x)",
        "Resizing(6, 5)(x)",
        "Resizing(6, 5, interpolation='nearest')(x)",
        "Resizing(6, 5, crop_to_aspect_ratio=True)(x)",
        "Resizing(6, 5, pad_to_aspect_ratio=True)(x)",
        "CenterCrop(6, 6)(x)",
        "CenterCrop(12, 12)(x)",
        "Conv2D(4, (1, 3))(x)",
        "Lambda(lambda t: keras.ops.mean(keras.ops.reshape(t, (-1, 4, 2, 4, 2, 4)), axis=(2, 4)))(x)",
        "Conv2D(4, 3, dilation_rate=2)(x)",
        "DepthwiseConv2D(3)(x)",
        "DepthwiseConv2D(3, padding='same', strides=2, depth_multiplier=2)(x)",
        "DepthwiseConv2D(3, dilation_rate=2)(x)",
        "SeparableConv2D(4, 3)(x)",
        "SeparableConv2D(4, 3, padding='same', strides=2)(x)",
        "AveragePooling2D(2)(x)",
        "AveragePooling2D(3, padding='same', strides=2)(x)",
        "AdaptiveAveragePooling2D(3)(x)",
        "Resizing(6, 5, interpolation='bicubic')(x)",
        "Resizing(6, 5, antialias=True)(x)",
        "UpSampling2D(2, interpolation='bicubic')(x)",
        "Resizing(6, 5, interpolation='lanczos3')(x)",
    ],
    "volume": [
        "Conv3D(4, 3)(x)",
        "Conv3D(4, 3, padding='same', strides=2)(x)",
        "Conv3DTranspose(4, 3)(x)",
        "Conv3DTranspose(4, 3, padding='same', strides=2)(x)",
        "MaxPooling3D(2)(x)",
        "MaxPooling3D(3, padding='same', strides=2)(x)",
        "GlobalMaxPooling3D()(x)",
        "GlobalAveragePooling3D()(x)",
        "AdaptiveMaxPooling3D(2)(x)",
        "Cropping3D(1)(x)",
        "ZeroPadding3D(1)(x)",
        "UpSampling3D(2)(x)",
        "Conv3DTranspose(4, 2, dilation_rate=2)(x)",
        "Conv3D(4, 2, dilation_rate=2)(x)",
        "AveragePooling3D(2)(x)",
        "AveragePooling3D(3, padding='same', strides=2)(x)",
        "AdaptiveAveragePooling3D(2)(x)",
        "Conv3D(4, 3, groups=2)(x)",
        "Conv3D(4, 2, groups=4, dilation_rate=2, padding='same')(x)",
    ],
    "sequence of sequences": [
        "ConvLSTM1D(2, 3, unroll=True)(x)",
        "ConvLSTM1D(2, 3)(x)",
    ],
    "sequence of images": [
        "TimeDistributed(Conv2D(2, 3))(x)",
        "ConvLSTM2D(2, 3, unroll=True)(x)",
        "ConvLSTM2D(2, 3, unroll=True, padding='same', return_sequences=True)(x)",
        "Conv3D(2, (1, 3, 3))(x)",
        "ConvLSTM2D(2, 3)(x)",
    ],
    "sequence of volumes": [
        "ConvLSTM3D(2, 3, unroll=True)(x)",
        "ConvLSTM3D(2, 3)(x)",
    ],
    "pixels": [
        "AutoContrast()(x)",
        "Equalization()(x)",
        "ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))(x)",
        "MaxNumBoundingBoxes(2)(x)",
        "AveragePooling2D(2, trainable=False)(x)",
        "AdaptiveAveragePooling2D(2, trainable=False)(x)",
        "DepthwiseConv2D(3, trainable=False)(x)",
        "SeparableConv2D(4, 3, trainable=False)(x)",
    ],
    "signal": [
        "STFTSpectrogram(frame_length=16, frame_step=8)(Reshape((64, 1))(x))",
        "MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4)(x)",
    ],
    "tokens": [
        "Embedding(7, 6)(x)",
        "Embedding(7, 6, mask_zero=True)(x)",
        "LSTM(4, unroll=True)(Embedding(7, 6, mask_zero=True)(x))",
        "ReversibleEmbedding(7, 6)(x)",
        "(lambda e: e(e(x), reverse=True))(ReversibleEmbedding(7, 6))",
        "(lambda e: e(e(x), reverse=True))(ReversibleEmbedding(7, 6, tie_weights=False))",
        "CategoryEncoding(7, output_mode='one_hot')(x)",
        "Lambda(lambda t: keras.ops.max(keras.ops.one_hot(t, 7), axis=1))(x)",
        "CategoryEncoding(7)(x)",
        "CategoryEncoding(7, output_mode='count')(x)",
        "IntegerLookup(vocabulary=[1, 2, 3])(x)",
        "Hashing(4)(x)",
    ],
}
# Random layers: every device draws its rows of the numbers of one device.
RANDOM = {
    "features": [
        "Dropout(0.5)(x)",
        "AlphaDropout(0.2)(x)",
        "GaussianDropout(0.2)(x)",
        "GaussianNoise(0.1)(x)",
    ],
    "sequence": [
        "Dropout(0.5, noise_shape=(None, 1, None))(x)",
        "SpatialDropout1D(0.2)(x)",
        "LSTM(4, dropout=0.2, recurrent_dropout=0.2)(x)",
        "GRU(4, dropout=0.2)(Masking(0.0)(x))",
        "Bidirectional(SimpleRNN(4, dropout=0.2))(x)",
        "MultiHeadAttention(2, 4, dropout=0.2)(x, y)",
        "GroupQueryAttention(4, 4, 2, dropout=0.2)(x, y)",
        "Attention(dropout=0.2)([x, y])",
        "AdditiveAttention(dropout=0.2)([x, y])",
    ],
    "short sequence": [
        "LSTM(4, unroll=True, dropout=0.2)(x)",
        "LSTM(4, unroll=True, recurrent_dropout=0.2)(x)",
        "GRU(4, unroll=True, dropout=0.2, recurrent_dropout=0.2)(x)",
        "SimpleRNN(4, unroll=True, dropout=0.2, recurrent_dropout=0.2)(x)",
    ],
    "image": [
        "SpatialDropout2D(0.2)(x)",
    ],
    "volume": [
        "SpatialDropout3D(0.2)(x)",
    ],
    "pixels": [
        "RandomFlip()(x)",
        "RandomFlip('horizontal')(x)",
        "Solarization(threshold_factor=0.5)(x)",
        "RandomBrightness(0.2)(x)",
        "RandomColorDegeneration(0.2)(x)",
        "RandomContrast(0.2)(x)",
        "RandomCrop(5, 6)(x)[:, :4, :4]",
        "RandomErasing()(x)",
        "RandomGaussianBlur()(x)",
        "RandomGrayscale()(x)",
        "RandomInvert()(x)",
        "RandomPosterization(4)(x)",
        "RandomSharpness(0.2)(x)",
        "RandomColorJitter(brightness_factor=0.2, contrast_factor=0.2)(x)",
        "AugMix()(x)",
        "CutMix()(x)",
        "MixUp()(x)",
        "RandAugment()(x)",
        "RandomColorJitter(brightness_factor=0.2, contrast_factor=0.2, saturation_factor=0.2, hue_factor=0.2)(x)",
        "RandomHue(0.2)(x)",
        "RandomPerspective()(x)",
        "RandomRotation(0.2)(x)",
        "RandomSaturation(0.2)(x)",
        "RandomShear(0.2, 0.2)(x)",
        "RandomTranslation(0.2, 0.2)(x)",
        "RandomZoom(0.2)(x)",
    ],
}
# Refused with UnsupportedLayerError.
REFUSED = {
    "tokens": [
        "HashedCrossing(4)((x[:, :1], x[:, 1:2]))",
        "HashedCrossing(4, output_mode='one_hot')((x[:, :1], x[:, 1:2]))",
    ],
    "strings": [
        "StringLookup(vocabulary=['red', 'green'])(x)",
        "Hashing(4)(x)",
        "TextVectorization(vocabulary=['rose', 'red'], output_sequence_length=4)(x)",
    ],
    "pixels": [
        "RandomElasticTransform()(x)",
    ],
}
# Not tried: no layers, abstract, part of every model, or layers that run another framework's code.
NOT_LAYERS = {"Layer", "Wrapper", "InputSpec", "InputLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "TFSMLayer"}
# Not seen to fail: one hung while it was compiled, and NumPy arrays cannot feed the others.
NOT_RETRIED = ("RandomElasticTransform", "StringLookup", "TextVectorization")

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "layers.md"
MARK = "<!-- The table below is written by python tests/built_in_layers.py -->\n"


def pairs(*tables: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, call) for table in tables for kind, calls in table.items() for call in calls]


def layer_names(call: str) -> list[str]:
    """Return the keras.layers classes in a call, the layer under test first."""
    names = re.findall(r"[A-Za-z][A-Za-z0-9]*", call)
    return [name for name in names if isinstance(getattr(keras.layers, name, None), type)]


def build(kind: str, calls: list[str]) -> keras.Model:
    """Return a model with a branch for each call. The branches share only the input."""
    made_for = KINDS[kind]
    inputs = keras.Input(made_for.shape, dtype=made_for.dtype)
    outputs = []
    for number, call in enumerate(calls):
        names = dict(vars(keras.layers), keras=keras, x=inputs)
        if made_for.stem:
            width = made_for.shape[-1]
            names.update({x: keras.layers.Dense(width, name=f"stem_{x}_{number}")(inputs) for x in ("x", "y")})
        output = keras.layers.Flatten()(eval(call, names))
        if kind == "pixels":
            output = keras.layers.Rescaling(1 / 255)(output)
        outputs.append(keras.layers.Dense(2)(output))
    return keras.Model(inputs, outputs[0] if len(outputs) == 1 else keras.layers.Concatenate()(outputs))


def reason(kind: str, call: str) -> str:
    """Return the error text for a refused layer, or for the first layer that is refused with it."""
    try:
        unsupported.check_layers(build(kind, [call]))
    except tfshard.errors.UnsupportedLayerError as error:
        lines = re.findall(r"^- '.+' \((\w+)\): (.+)$", str(error), re.MULTILINE)
        return dict(reversed(lines)).get(layer_names(call)[0], lines[0][1])
    raise AssertionError(f"{call} is in the table of refused layers, and is not refused.")


def documented() -> str:
    """Return the table of docs/layers.md."""
    rows = [(kind, call, "the numbers of one device") for kind, call in pairs(SAME, RANDOM)]
    rows += [(kind, call, f"**refused**: {reason(kind, call)}") for kind, call in pairs(REFUSED)]
    lines = ["| Layer | Tried as | On | Result |", "|---|---|---|---|"]
    for kind, call, result in sorted(rows, key=lambda row: (layer_names(row[1])[0], row[2].startswith("**"))):
        lines.append(f"| {layer_names(call)[0]} | `{call}` | {kind} | {result} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCS.write_text(DOCS.read_text().partition(MARK)[0] + MARK + "\n" + documented())
