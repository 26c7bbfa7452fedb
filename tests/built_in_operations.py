"""The functions of keras.ops, a trial of each, and the result in a step under a ShardedStrategy.

Each function is tried in the middle of a model: a Dense layer computes its arguments, another Dense layer takes its
results, and gradients flow through all three.

`python tests/built_in_operations.py` tries them all and writes docs/operations.md. With words as arguments, it tries
the calls that contain one of the words. tests/operations/test_operations.py checks it.
"""

import functools
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import transfer

ops = keras.ops
RS = np.random.RandomState(0)

# The arguments of calls: 8 samples each, with the first dim sharded over the batch axis.
VALUES = {
    "x": RS.normal(size=(8, 6)).astype("float32"),
    "y": RS.normal(size=(8, 6)).astype("float32"),
    # Between 0 and 1.
    "u": RS.uniform(0.1, 0.9, (8, 6)).astype("float32"),
    "v": RS.permutation(8).astype("float32"),
    "s": RS.normal(size=(8, 5, 6)).astype("float32"),
    "m": (RS.normal(size=(8, 4, 4)) * 0.3 + 3 * np.eye(4)).astype("float32"),
    "image": RS.uniform(0.1, 0.9, (8, 6, 6, 3)).astype("float32"),
    "i": RS.randint(0, 5, (8, 6)).astype("int32"),
    "j": RS.randint(1, 5, (8, 6)).astype("int32"),
    "b": RS.uniform(size=(8, 6)) > 0.5,
    "n": np.where(RS.uniform(size=(8, 6)) > 0.8, np.nan, RS.normal(size=(8, 6))).astype("float32"),
}

# Constants.
NAMES = {
    "corners": np.array([[[0, 0], [5, 0], [0, 5], [5, 5]]], "float32"),
    "moved": np.array([[[0, 1], [5, 0], [0, 5], [4, 5]]], "float32"),
}

_OF_X = """abs absolute angle arcsinh arctan cbrt ceil conj conjugate copy cos cosh count_nonzero deg2rad exp exp2 expm1
floor imag isfinite isinf isnan isneginf isposinf isreal logical_not nan_to_num ndim negative ones_like rad2deg ravel
real reciprocal round sign signbit sin sinc sinh size square tan tanh trunc zeros_like empty_like fabs i0 shape
celu elu gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax relu relu6
selu sigmoid silu swish soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid sparsemax squareplus
tanh_shrink erf erfc stop_gradient logsumexp all amax amin any argmax argmin argsort average cumprod cumsum diff flip
fliplr flipud max mean median min prod ptp sort std sum trapezoid transpose var nanargmax nanargmin nonzero
convert_to_tensor is_tensor dtype"""
_OF_U = "arccos arcsin arctanh log log10 log1p log2 sqrt rsqrt erfinv"
_OF_N = "nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar"
_OF_X_AND_Y = """add arctan2 copysign divide divide_no_nan equal fmax fmin greater greater_equal heaviside hypot isclose
less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum multiply not_equal subtract
true_divide allclose nextafter inner vdot"""
_OF_I_AND_J = """bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift right_shift
floor_divide fmod gcd lcm mod"""
_OF_M = "cholesky cholesky_inverse det eig eigh inv matrix_rank pinv qr svd slogdet logdet trace diagonal"

# Functions that the lines above leave out, and other arguments.
_MORE = """
arccosh(1.0 + u)
bitwise_invert(i)
bitwise_not(i)
all(b, axis=1)
any(b, axis=0)
amax(x, axis=1)
amin(x, axis=0)
max(x, axis=1, keepdims=True)
min(x, axis=-1)
sum(x, axis=0)
mean(s, axis=(1, 2))
var(x, axis=0)
std(s, axis=1)
prod(u, axis=1)
prod(u, axis=0)
argmax(x, axis=1)
argmax(x, axis=0)
argmin(x, axis=1)
argmin(s, axis=1)
argsort(x, axis=0)
argpartition(v, 3)
sort(x, axis=0)
sort(s, axis=1)
median(x, axis=1)
quantile(x, 0.3, axis=1)
quantile(x, 0.5)
percentile(x, 30.0, axis=0)
nanquantile(n, 0.5)
nanpercentile(n, 50.0)
nanmean(n, axis=1)
average(x, axis=1, weights=u)
cumsum(x, axis=0)
cumsum(x, axis=1)
cumprod(u, axis=0)
cumprod(u, axis=1)
diff(x, axis=0)
append(x, y, axis=0)
append(x, y, axis=1)
arange(5)
array([1.0, 2.0])
array_split(x, 3, axis=1)
array_split(x, 2, axis=0)
bartlett(5)
blackman(5)
hamming(5)
hanning(5)
kaiser(5, 2.0)
eye(4)
identity(4)
empty((2, 3))[:0]
full((2, 3), 1.5)
full_like(x, 2.0)
ones((2, 3))
zeros((2, 3))
tri(4)
linspace(0.0, 1.0, 5)
logspace(0.0, 1.0, 5)
geomspace(1.0, 8.0, 4)
bincount(i[:, 0], minlength=5)
bincount(i, minlength=5)
broadcast_to(x[:, None], (8, 2, 6))
broadcast_to(x, (3, 8, 6))
clip(x, -0.5, 0.5)
concatenate([x, y], axis=0)
concatenate([x, y], axis=1)
corrcoef(x)
correlate(v, v[:3])
cross(s[..., :3], s[..., 3:])
diag(v)
diag(m[0])
diagflat(v)
diagonal(m, axis1=1, axis2=2)
diagonal(x)
digitize(x, np.array([-0.5, 0.0, 0.5], 'float32'))
dot(x, transpose(y))
dot(s, ones((6, 2)))
dsplit(s, 2)
hsplit(x, 2)
vsplit(x, 2)
dstack([x, y])
hstack([x, y])
vstack([x, y])
stack([x, y])
stack([x, y], axis=1)
split(x, 2, axis=0)
split(x, 3, axis=1)
unstack(x, axis=1)
unstack(x, axis=0)
einsum('ab,cb->ac', x, y)
einsum('abc,ac->ab', s, x)
einsum('...a,ab->...b', s, ones((6, 2)))
einsum('ab...,bc->ac...', s, ones((5, 2)))
einsum('...ij,...jk->...ik', m, m)
expand_dims(x, 0)
expand_dims(x, -1)
flip(x, axis=0)
flip(x, axis=1)
flip(s, axis=(1, 2))
get_item(x, 3)
get_item(x, np.s_[:, 2])
get_item(x, np.s_[1:5])
heaviside(x, 0.5)
histogram(v, 4)
isin(i, j)
kron(ones((2, 2)), x)
ldexp(x, i)
logical_and(b, b)
matmul(m, m)
matmul(x, transpose(y))
matmul(s, transpose(s, (0, 2, 1)))
meshgrid(v, v)
moveaxis(s, 1, 2)
moveaxis(s, 0, 1)
outer(v, v)
pad(x, ((0, 0), (1, 2)))
pad(x, ((1, 1), (0, 0)))
pad(x, ((0, 0), (1, 2)), mode='reflect')
pad(x, ((0, 0), (1, 2)), mode='symmetric')
pad(x, ((2, 1), (0, 0)), mode='reflect')
power(u, 2.5)
power(u, y)
repeat(x, 2, axis=0)
repeat(x, 3, axis=1)
repeat(x, 2)
reshape(x, (4, 12))
reshape(x, (-1,))
reshape(s, (8, 30))
reshape(s, (40, 6))
view(x, 'int32')
roll(x, 1)
roll(x, 2, axis=1)
roll(x, 3, axis=0)
rot90(x)
rot90(image, axes=(1, 2))
searchsorted(np.array([-0.5, 0.0, 0.5], 'float32'), v)
select([x > 0.5, x < -0.5], [x, y], 0.0)
squeeze(x[:, :1], 1)
squeeze(x[:1], 0)
swapaxes(s, 0, 1)
swapaxes(s, 1, 2)
take(x, np.array([1, 1, 3]), axis=0)
take(x, np.array([1, 1, 3]), axis=1)
take(x, i, axis=1)
take(s, -1, axis=1)
take_along_axis(x, i, axis=1)
take_along_axis(x, i, axis=0)
tensordot(x, y, axes=((0,), (0,)))
tensordot(s, ones((6, 2)), axes=1)
tile(x, (1, 2))
tile(x, (2, 1))
trace(m, axis1=1, axis2=2)
transpose(s, (1, 0, 2))
tril(m)
triu(m)
tril(x, k=1)
triu(x, k=-1)
unique(i, size=5)
unravel_index(i, (3, 4))
vander(v)
vectorize(lambda a: a * 2.0)(x)
where(b, x, y)
where(x > 0.0)
nonzero(i)
trapezoid(x, dx=0.5, axis=0)
cast(x, 'float16')
cast(i, 'float32')
saturate_cast(x * 300.0, 'uint8')
view_as_complex(s[..., :2])
view_as_real(cast(x, 'complex64'))
cond(sum(x) > 0.0, lambda: x, lambda: y)
switch(1, [lambda a: a, lambda a: a * 2.0], x)
custom_gradient(lambda a: (a * 2.0, lambda upstream: upstream * 3.0))(x)
fori_loop(0, 3, lambda k, a: tanh(a) + y, x)
while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, tanh(a) + y), (0, x), maximum_iterations=5)
scan(lambda c, a: (c + a, c * a), zeros((6,)), x)
scan(lambda c, a: (tanh(c + a), c), zeros((8, 6)), transpose(s, (1, 0, 2)))
map(lambda a: a * 2.0 + 1.0, x)
vectorized_map(lambda a: sum(a) * a, x)
associative_scan(lambda a, c: a + c, x, axis=0)
associative_scan(lambda a, c: a * c, u, axis=1)
rearrange(s, 'b t d -> b (t d)')
rearrange(s, 'b t d -> t b d')
scatter(np.array([[1], [3]]), x[:2], (8, 6))
scatter_update(x, np.array([[1], [3]]), y[:2])
slice(x, (0, 1), (8, 3))
slice(x, (2, 1), (4, 3))
slice_update(j, (0, 2), i[:, :3])
slice_update(j, (2, 0), i[:3])
convert_to_numpy(np.ones(2))
lu_factor(m[0])
norm(m, axis=(1, 2))
lstsq(m[0], m[1][:, :2])
norm(x, axis=1)
norm(x, ord=1, axis=1)
norm(x, ord='nuc')
qr(m, mode='complete')
solve(m, s[:, :4, :2])
solve_triangular(m, s[:, :4, :2], lower=True)
svd(m, compute_uv=False)
inv(m[0])
det(m[0])
jvp(lambda a: a * a, (x,), (y,))
cdist(s, s)
extract_sequences(x, 3, 2)
fft((x, y))
fft2((m, m))
ifft2((m, m))
rfft(x)
irfft((x, y))
stft(s[:, 0], 4, 2, 4)
istft((s[..., :3], s[..., 3:]), 4, 2, 4)
in_top_k(i[:, 0], x, 2)
segment_max(x, np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
segment_min(x, np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
segment_prod(u, np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
segment_sum(x, np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
top_k(x, 2)
logsumexp(x, axis=1)
adaptive_average_pool(image, 3)
adaptive_max_pool(image, 3)
average_pool(image, 2)
average_pool(image, 3, strides=2, padding='same')
max_pool(image, 2)
max_pool(image, 3, strides=2, padding='same')
batch_normalization(x, mean(x, axis=0), var(x, axis=0), axis=-1)
binary_crossentropy(cast(b, 'float32'), u)
binary_crossentropy(cast(b, 'float32'), x, from_logits=True)
categorical_crossentropy(softmax(y), softmax(x))
sparse_categorical_crossentropy(i[:, 0], x, from_logits=True)
conv(image, ones((3, 3, 3, 2)))
conv(image, ones((3, 3, 3, 2)) * image[0, :3, :3, :, None], strides=2, padding='same')
conv(image, ones((3, 3, 3, 2)), dilation_rate=2)
conv_transpose(image, ones((2, 2, 4, 3)), strides=2)
depthwise_conv(image, ones((3, 3, 3, 2)) * x[0, 0], padding='same')
separable_conv(image, ones((3, 3, 3, 1)), ones((1, 1, 3, 2)))
ctc_decode(softmax(s), np.full((8,), 5))
ctc_loss(i[:, :2] + 1, s, np.full((8,), 2), np.full((8,), 5))
depth_to_space(concatenate([image, image[..., :1]], -1), 2)
space_to_depth(image, 2)
dot_product_attention(s[:, :, None], s[:, :, None], s[:, :, None])
dot_product_attention(s[:, :, None], s[:, :, None], s[:, :, None], is_causal=True)
fold(m, 3, 2)
unfold(transpose(image, (0, 3, 1, 2)), 2)
glu(x)
threshold(x, 0.2, 0.5)
layer_normalization(x, ones((6,)), zeros((6,)))
rms_normalization(x, ones((6,)))
moments(x, axes=(0,))
moments(x, axes=(1,))
multi_hot(i, 5)
one_hot(i, 5)
normalize(x)
polar(u, x)
psnr(u, y, 1.0)
image.affine_transform(image, np.array([1.0, 0.1, 0.5, 0.0, 1.0, -0.5, 0.0, 0.0], 'float32'))
image.crop_images(image, top_cropping=1, left_cropping=1, target_height=3, target_width=3)
image.elastic_transform(image, seed=1)
image.euclidean_dist_transform(image > 0.5)
image.extract_patches(image, 2)
image.extract_patches_3d(image[..., None], 2)
image.gaussian_blur(image)
image.hsv_to_rgb(image)
image.rgb_to_hsv(image)
image.rgb_to_grayscale(image)
image.sobel_edges(image)
image.ssim(image, image * 0.9, filter_size=3)
image.map_coordinates(v, np.array([[0.5, 1.5, 2.0]], 'float32'), 1)
image.pad_images(image, 1, 1, 1, 1)
image.perspective_transform(image, corners, moved)
image.resize(image, (4, 9))
image.resize(image, (4, 9), interpolation='nearest')
image.resize(image, (4, 9), interpolation='bicubic')
image.resize(image, (4, 9), interpolation='lanczos3')
image.resize(image, (4, 4), antialias=True)
image.scale_and_translate(image, (8, 4, 4, 3), [0.7, 0.7], [0.0, 0.5], (1, 2), 'linear')
"""


def calls() -> list[str]:
    """Return every case as a call."""
    found = []
    for names, arguments in (
        (_OF_X, "x"), (_OF_U, "u"), (_OF_N, "n"), (_OF_X_AND_Y, "x, y"), (_OF_I_AND_J, "i, j"), (_OF_M, "m"),
    ):  # fmt: skip
        found += [f"{name}({arguments})" for name in names.split()]
    found += [line for line in _MORE.strip().splitlines()]
    return [call for call in found if exists(call)]


def exists(call: str) -> bool:
    """Return whether this Keras has the function of a case. Older versions have fewer functions."""
    return function_of(call) is not None


def function_of(call: str) -> Callable | None:
    owner, name = ops, name_of(call)
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def name_of(call: str) -> str:
    match = re.match(r"[\w.]+", call)
    assert match is not None
    return match[0]


def compute(call: str, values: dict[str, tf.Tensor], kernels: dict[str, tf.Tensor]):
    """Compute a call between Dense layers.

    Returns the tensors of the result, the outputs of the Dense layer after the call, and the gradients of the sum of
    their squares. The gradients are with respect to the float values used and the kernels of the layers before the
    call.
    """
    used = [name for name in values if re.search(rf"\b{name}\b", call)]
    if name_of(call).startswith("image."):
        used = [*(name for name in used if name != "image"), "image"]
    floats = [values[name] for name in used if values[name].dtype.is_floating]
    layers = [kernels[name] for name in used if name in kernels]
    with tf.GradientTape() as tape:
        tape.watch((floats, layers))
        before = {name: ops.matmul(values[name], kernels[name]) if name in kernels else values[name] for name in used}
        names = {**{name: getattr(ops, name) for name in dir(ops)}, **before, **NAMES, "np": np}
        if name_of(call).startswith("image."):
            names["image"] = _Image(before["image"])
        results = [each for each in tf.nest.flatten(eval(call, names)) if tf.is_tensor(each)]
        after = [_dense(each) for each in results if each.dtype not in (tf.string, tf.variant)]
        total = tf.add_n([tf.reduce_sum(tf.square(each)) for each in after]) if after else None
    if total is None or not floats:
        return results, after, []
    gradients = tape.gradient(total, [*floats, *layers])
    return results, after, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]


def _dense(tensor: tf.Tensor) -> tf.Tensor:
    """Apply a Dense layer of three units to a result, or to the real part of a complex result."""
    features = tf.cast(tf.math.real(tensor) if tensor.dtype.is_complex else tensor, tf.float32)
    if features.shape.rank in (0, 1):
        features = ops.expand_dims(features, -1)
    if features.shape.rank == 1:
        features = ops.expand_dims(features, 0)
    size = features.shape[-1]
    if size is None:  # A step on a mesh may know more than TensorFlow.
        size = tf.shape(features)[-1]
        kernel = tf.cos(tf.range(3 * size, dtype=tf.float32)) / tf.sqrt(tf.cast(size, tf.float32))
        return ops.matmul(features, tf.reshape(kernel, (-1, 3)))
    kernel = np.cos(np.arange(3 * size, dtype="float32").reshape(size, 3)) / max(size, 1) ** 0.5
    return ops.matmul(features, kernel)


class _Image:
    """The value `image`, and the functions of `keras.ops.image`."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        function = getattr(ops.image, name)
        return lambda *args, **kwargs: function(
            *(each.value if isinstance(each, _Image) else each for each in args), **kwargs
        )

    def __getitem__(self, key):
        return self.value[key]

    def __gt__(self, other):
        return self.value > other

    def __mul__(self, other):
        return self.value * other


# Kernels of the layer before. They keep the values in their range; a NaN would spread.
KERNELS = {
    name: np.eye(value.shape[-1], dtype="float32")
    for name, value in VALUES.items()
    if value.dtype == np.float32 and value.ndim > 1 and name != "n"
}


@functools.cache
def on_one_device(call: str) -> list[np.ndarray]:
    values, kernels = ({name: tf.constant(value) for name, value in each.items()} for each in (VALUES, KERNELS))
    found = tf.function(functools.partial(compute, call))(values, kernels)
    return [np.asarray(each) for each in tf.nest.flatten(found)]


MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}


def on_mesh(call: str, mesh: str) -> list[np.ndarray]:
    """Run a call in a step. The batch axis shards the first dim; a model axis shards the last dim if it divides it."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    values = {}
    for name, value in VALUES.items():
        axes = ["batch"] + [None] * (value.ndim - 1)
        if "model" in MESHES[mesh] and value.ndim > 1 and value.shape[-1] % 2 == 0:
            axes[-1] = "model"
        values[name] = transfer.host_to_mesh(value, tuple(axes), strategy.mesh)
        assert dtensor.fetch_layout(values[name]).num_shards(0) == MESHES[mesh]["batch"]
    kernels = {}
    for name, kernel in KERNELS.items():
        columns = "model" if "model" in MESHES[mesh] and len(kernel) % 2 == 0 else None
        kernels[name] = transfer.host_to_mesh(kernel, (None, columns), strategy.mesh)
    found = strategy.run(tf.function(functools.partial(compute, call)), args=(values, kernels))
    return [transfer.to_host(each) for each in tf.nest.flatten(found)]


def outcome(call: str, mesh: str) -> str:
    """Return `"right"`, the difference, or the text of the refusal."""
    try:
        expected = on_one_device(call)
    except Exception as error:
        return f"not in plain Keras: {type(error).__name__}: {error}"
    try:
        found = on_mesh(call, mesh)
    except (tfshard.errors.ShardingError, tf.errors.OpError) as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    if len(found) != len(expected):
        return f"wrong: {len(found)} results in place of {len(expected)}"
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"wrong: shape {ours.shape} in place of {theirs.shape}"
        # On a mesh of several axes, devices draw from different seeds.
        largest = np.max(np.abs(theirs).astype(float), initial=1.0, where=np.isfinite(theirs))
        if "seed=" not in call and not np.allclose(ours, theirs, rtol=2e-5, atol=1e-5 * largest, equal_nan=True):
            return f"wrong: off by {np.max(np.abs(ours - theirs))}"
    return "right"


# --- docs/operations.md --------------------------------------------------------------------------------------

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "operations.md"
MARK = "<!-- The table below is written by python tests/built_in_operations.py -->\n"
HEAD = "| Function | Tried as | On four devices | On two by two |\n|---|---|---|---|"


def short(outcome: str) -> str:
    """Shorten an outcome for docs/operations.md."""
    if outcome.startswith("not in plain Keras"):
        return "not in plain Keras"
    if not outcome.startswith("refused: "):
        return outcome
    if found := re.search(r"DTensor refuses TensorFlow operation '(\w+)'", outcome):
        return f"**refused**: DTensor refuses {found[1]}"
    if found := re.search(r"UnsupportedOperationError: (.*?)(?:[:(,]|\. )", outcome):
        return f"**refused**: {found[1].strip()}"
    return "**refused**: the step fails on the devices"


def row(call: str, outcomes: dict[str, str]) -> str:
    return f"| {name_of(call)} | `{call}` | " + " | ".join(short(outcomes[mesh]) for mesh in MESHES) + " |"


def documented() -> dict[str, dict[str, str]]:
    """Return the outcomes of docs/operations.md for each call, by mesh."""
    rows = re.findall(r"^\| \S+ \| `(.*?)` \| (.*?) \| (.*?) \|$", DOCS.read_text().partition(MARK)[2], re.MULTILINE)
    return {call: dict(zip(MESHES, outcomes, strict=True)) for call, *outcomes in rows}


def try_all(chosen: list[str]) -> dict[str, dict[str, str]]:
    """Return the outcomes of calls. If a process dies, the failing call is tried again in a separate process."""
    found: dict[str, dict[str, str]] = {}
    while left := [call for call in chosen if call not in found]:
        child = subprocess.Popen([sys.executable, __file__, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(left))
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("{"):
                for call, outcomes in json.loads(line).items():
                    found[call] = outcomes
                    print(f"{outcomes} {call}", flush=True)
        child.wait()
        if child.returncode:
            call = next(call for call in left if call not in found)
            found[call] = dict.fromkeys(MESHES, f"wrong: the process ended with {child.returncode}")
            print(f"{found[call]} {call}", flush=True)
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["--child"]:
        tfshard.initialize(num_devices=4, device_type="CPU")
        for call in json.load(sys.stdin):
            print(json.dumps({call: {mesh: outcome(call, mesh) for mesh in MESHES}}), flush=True)
        return
    chosen = [call for call in calls() if not arguments or any(part in call for part in arguments)]
    found = try_all(chosen)
    known = documented()
    order = sorted(calls(), key=name_of)
    rows = [row(call, found.get(call) or known[call]) for call in order if call in found or call in known]
    DOCS.write_text("\n".join([DOCS.read_text().partition(MARK)[0] + MARK, HEAD, *rows]) + "\n")
    for mesh in MESHES:
        kinds = [outcomes[mesh].partition(":")[0] for outcomes in found.values()]
        print(mesh, {kind: kinds.count(kind) for kind in sorted(set(kinds))})


if __name__ == "__main__":
    main(sys.argv[1:])
