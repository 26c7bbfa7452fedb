"""Which built-in Keras layers train under a ShardedStrategy: docs/layers.md is written from the tables here."""

import dataclasses

import keras
import numpy as np

import parity
import tfshard

BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a layer is tried on: the model's input, and whether a Dense layer comes before the layer under test.

    With it, the gradient has to come back through the layer under test.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: float = 1.0
    stem: bool = True

    def sample(self, rs: np.random.RandomState) -> np.ndarray:
        shape = (BATCH, *self.shape)
        if self.dtype == "int32":
            return rs.randint(0, int(self.high), shape)
        if self.dtype == "string":
            return rs.choice(["red", "green", "blue", "a rose is a rose"], shape).astype(object)
        return rs.uniform(0.0 if self.high > 1 else -1.0, self.high, shape).astype("float32")


KINDS = {
    "features": Kind(shape=(6,)),
    "sequence": Kind(shape=(5, 8)),
    "image": Kind(shape=(8, 8, 4)),
    "volume": Kind(shape=(4, 4, 4, 4)),
    "sequence of images": Kind(shape=(3, 8, 8, 4)),
    "sequence of sequences": Kind(shape=(3, 5, 8)),
    "sequence of volumes": Kind(shape=(2, 4, 4, 4, 4)),
    "pixels": Kind(shape=(8, 8, 3), high=255.0, stem=False),
    "signal": Kind(shape=(64,), stem=False),
    "tokens": Kind(shape=(5,), dtype="int32", high=7, stem=False),
    "strings": Kind(shape=(1,), dtype="string", stem=False),
}

# kind -> calls: with `x` the input (after the stem), and `y` a second one of its shape.
SAME = {
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
        "LayerNormalization(rms_scaling=True)(x)",
        "RMSNormalization()(x)",
        "UnitNormalization()(x)",
        "GroupNormalization(groups=3)(x)",
        "GroupNormalization(groups=1)(x)",
        "SpectralNormalization(Dense(4))(x)",
        "Normalization(mean=0.5, variance=2.0)(x)",
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
        "Discretization(bin_boundaries=[-0.5, 0.0, 0.5])(x)",
        "Discretization(bin_boundaries=[-0.5, 0.0, 0.5], output_mode='one_hot')(x)",
    ],
    "sequence": [
        "Dense(4)(x)",
        "EinsumDense('abc,cde->abde', output_shape=(5, 2, 4), bias_axes='de')(x)",
        "Conv1D(4, 3)(x)",
        "Conv1D(4, 3, padding='same', strides=2)(x)",
        "Conv1D(4, 3, padding='causal', dilation_rate=2)(x)",
        "Conv1D(4, 3, groups=2)(x)",
        "Conv1DTranspose(4, 3)(x)",
        "Conv1DTranspose(4, 3, padding='same', strides=2)(x)",
        "DepthwiseConv1D(3)(x)",
        "DepthwiseConv1D(3, padding='same', strides=2, depth_multiplier=2)(x)",
        "SeparableConv1D(4, 3)(x)",
        "SeparableConv1D(4, 3, padding='same', strides=2)(x)",
        "MaxPooling1D(2)(x)",
        "MaxPooling1D(2, padding='same')(x)",
        "AveragePooling1D(2)(x)",
        "AveragePooling1D(2, padding='same')(x)",
        "GlobalMaxPooling1D()(x)",
        "GlobalAveragePooling1D()(x)",
        "AdaptiveAveragePooling1D(2)(x)",
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
        "Bidirectional(GRU(4, unroll=True, return_sequences=True), merge_mode='sum')(x)",
        "Bidirectional(SimpleRNN(4, unroll=True, return_sequences=True))(x)",
        "TimeDistributed(Dense(4))(x)",
        "TimeDistributed(Dense(4))(Masking(0.0)(x))",
        "LSTM(4)(x)",
        "GRU(4)(x)",
        "SimpleRNN(4)(x)",
        "RNN(LSTMCell(4))(x)",
        "Bidirectional(LSTM(4))(x)",
    ],
    "image": [
        "Conv2D(4, 3)(x)",
        "Conv2D(4, 3, padding='same', strides=2)(x)",
        "Conv2D(4, 3, dilation_rate=2)(x)",
        "Conv2D(4, 3, groups=2)(x)",
        "Conv2D(4, 3, groups=4)(x)",
        "Conv2DTranspose(4, 3)(x)",
        "Conv2DTranspose(4, 3, padding='same', strides=2)(x)",
        "Conv2DTranspose(4, 3, dilation_rate=2)(x)",
        "DepthwiseConv2D(3)(x)",
        "DepthwiseConv2D(3, padding='same', strides=2, depth_multiplier=2)(x)",
        "DepthwiseConv2D(3, dilation_rate=2)(x)",
        "SeparableConv2D(4, 3)(x)",
        "SeparableConv2D(4, 3, padding='same', strides=2)(x)",
        "SpectralNormalization(Conv2D(4, 3))(x)",
        "MaxPooling2D(2)(x)",
        "MaxPooling2D(3, padding='same', strides=2)(x)",
        "AveragePooling2D(2)(x)",
        "AveragePooling2D(3, padding='same', strides=2)(x)",
        "GlobalMaxPooling2D()(x)",
        "GlobalAveragePooling2D(keepdims=True)(x)",
        "AdaptiveAveragePooling2D(3)(x)",
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
        "Resizing(6, 5, interpolation='bicubic')(x)",
        "Resizing(6, 5, antialias=True)(x)",
        "Resizing(6, 5, crop_to_aspect_ratio=True)(x)",
        "Resizing(6, 5, pad_to_aspect_ratio=True)(x)",
        "CenterCrop(6, 6)(x)",
        "CenterCrop(12, 12)(x)",
        "TimeDistributed(Conv1D(4, 3))(x)",
    ],
    "volume": [
        "Conv3D(4, 3)(x)",
        "Conv3D(4, 3, padding='same', strides=2)(x)",
        "Conv3D(4, 3, groups=2)(x)",
        "Conv3D(4, 2, dilation_rate=2)(x)",
        "Conv3DTranspose(4, 3)(x)",
        "Conv3DTranspose(4, 3, padding='same', strides=2)(x)",
        "MaxPooling3D(2)(x)",
        "MaxPooling3D(3, padding='same', strides=2)(x)",
        "AveragePooling3D(2)(x)",
        "AveragePooling3D(3, padding='same', strides=2)(x)",
        "GlobalMaxPooling3D()(x)",
        "GlobalAveragePooling3D()(x)",
        "AdaptiveAveragePooling3D(2)(x)",
        "AdaptiveMaxPooling3D(2)(x)",
        "Cropping3D(1)(x)",
        "ZeroPadding3D(1)(x)",
        "UpSampling3D(2)(x)",
    ],
    "sequence of sequences": ["ConvLSTM1D(2, 3)(x)", "ConvLSTM1D(2, 3, unroll=True)(x)"],
    "sequence of images": [
        "ConvLSTM2D(2, 3)(x)",
        "ConvLSTM2D(2, 3, unroll=True)(x)",
        "ConvLSTM2D(2, 3, unroll=True, padding='same', return_sequences=True)(x)",
        "TimeDistributed(Conv2D(2, 3))(x)",
    ],
    "sequence of volumes": ["ConvLSTM3D(2, 3)(x)", "ConvLSTM3D(2, 3, unroll=True)(x)"],
    "pixels": [
        "AutoContrast()(x)",
        "Equalization()(x)",
        "ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))(x)",
        "Solarization(threshold_factor=0.5)(x)",
        "MaxNumBoundingBoxes(2)(x)",
    ],
    "signal": [
        "MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4)(x)",
        "STFTSpectrogram(frame_length=16, frame_step=8)(Reshape((64, 1))(x))",
    ],
    "tokens": [
        "Embedding(7, 6)(x)",
        "Embedding(7, 6, mask_zero=True)(x)",
        "LSTM(4, unroll=True)(Embedding(7, 6, mask_zero=True)(x))",
        "ReversibleEmbedding(7, 6)(x)",
        "(lambda e: e(e(x), reverse=True))(ReversibleEmbedding(7, 6))",
        "(lambda e: e(e(x), reverse=True))(ReversibleEmbedding(7, 6, tie_weights=False))",
        "CategoryEncoding(7)(x)",
        "CategoryEncoding(7, output_mode='one_hot')(x)",
        "CategoryEncoding(7, output_mode='count')(x)",
        "IntegerLookup(vocabulary=[1, 2, 3])(x)",
        "Hashing(4)(x)",
        "HashedCrossing(4)((x[:, :1], x[:, 1:2]))",
        "HashedCrossing(4, output_mode='one_hot')((x[:, :1], x[:, 1:2]))",
    ],
    "strings": [
        "StringLookup(vocabulary=['red', 'green'])(x)",
        "Hashing(4)(x)",
        "TextVectorization(vocabulary=['rose', 'red'], output_sequence_length=4)(x)",
    ],
}
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
        "MultiHeadAttention(2, 4, dropout=0.2)(x, y)",
        "GroupQueryAttention(4, 4, 2, dropout=0.2)(x, y)",
        "Attention(dropout=0.2)([x, y])",
        "AdditiveAttention(dropout=0.2)([x, y])",
        "LSTM(4, unroll=True, dropout=0.2)(x)",
        "LSTM(4, unroll=True, recurrent_dropout=0.2)(x)",
        "GRU(4, unroll=True, dropout=0.2, recurrent_dropout=0.2)(x)",
        "SimpleRNN(4, unroll=True, dropout=0.2, recurrent_dropout=0.2)(x)",
    ],
    "image": ["SpatialDropout2D(0.2)(x)"],
    "volume": ["SpatialDropout3D(0.2)(x)"],
    "pixels": [
        "AugMix()(x)",
        "CutMix()(x)",
        "MixUp()(x)",
        "RandAugment()(x)",
        "RandomBrightness(0.2)(x)",
        "RandomColorDegeneration(0.2)(x)",
        "RandomColorJitter(brightness_factor=0.2, contrast_factor=0.2, saturation_factor=0.2, hue_factor=0.2)(x)",
        "RandomContrast(0.2)(x)",
        "RandomCrop(6, 6)(x)",
        "RandomElasticTransform()(x)",
        "RandomErasing()(x)",
        "RandomFlip()(x)",
        "RandomFlip('horizontal')(x)",
        "RandomGaussianBlur()(x)",
        "RandomGrayscale()(x)",
        "RandomHue(0.2)(x)",
        "RandomInvert()(x)",
        "RandomPerspective()(x)",
        "RandomPosterization(4)(x)",
        "RandomRotation(0.2)(x)",
        "RandomSaturation(0.2)(x)",
        "RandomSharpness(0.2)(x)",
        "RandomShear(0.2, 0.2)(x)",
        "RandomTranslation(0.2, 0.2)(x)",
        "RandomZoom(0.2)(x)",
    ],
}


def build(kind: str, calls: list[str]) -> keras.Model:
    """A model with a branch for each call."""
    k = KINDS[kind]
    inputs = keras.Input(k.shape, dtype=k.dtype)
    outputs = []
    for call in calls:
        names = dict(vars(keras.layers), keras=keras, x=inputs)
        if k.stem:
            names.update(x=keras.layers.Dense(k.shape[-1])(inputs), y=keras.layers.Dense(k.shape[-1])(inputs))
        output = keras.layers.Flatten()(eval(call, names))
        outputs.append(keras.layers.Dense(2)(output))
    return keras.Model(inputs, outputs[0] if len(outputs) == 1 else keras.layers.Average()(outputs))


def batches(kind: str) -> list:
    rs = np.random.RandomState(0)
    return [(KINDS[kind].sample(rs), rs.normal(size=(BATCH, 2)).astype("float32")) for _ in range(2)]
