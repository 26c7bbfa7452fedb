"""Time of an operation's forward and backward pass on four devices, over that of plain Keras on one device.

    python tools/bench/operations.py                       # prints the table
    python tools/bench/operations.py --write               # writes docs/operation_times.md
    python tools/bench/operations.py --only=depthwise

Both are compiled, in one process, and run in turn `rounds` times over. What is timed is a step with the values on the
mesh already, from the call to the number that it gives: the sum of the gradients' squares. A ratio is of one round.
"""

import datetime
import pathlib
import statistics
import time
from collections.abc import Callable

import common
from absl import app, flags

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds.", lower_bound=1)
_ONLY = flags.DEFINE_string("only", "", "Operations that have this in their name.")
_WRITE = flags.DEFINE_bool("write", False, "Write docs/operation_times.md.")

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "operation_times.md"
BATCH = 16
STEPS = 3  # In a round.


def operations() -> dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...] | None]]:
    """Each operation, of an input and a weight; the input's shape and the weight's, which may be missing."""
    import keras
    import numpy as np
    import tensorflow as tf

    ops, image, sequence = keras.ops, (BATCH, 64, 64, 64), (BATCH, 128, 256)
    kernel, matrix = (3, 3, 64, 64), (BATCH, 64, 64)
    positive = 70 * np.eye(64, dtype="float32")
    targets = np.random.RandomState(0).randint(1, 30, (BATCH, 10))
    return {
        "an addition, for the start of a step": (lambda x: x + 1.0, (BATCH, 8), None),
        # What models spend their time in.
        "convolution": (lambda x, w: ops.conv(x, w, padding="same"), image, kernel),
        "convolution, strides=2": (lambda x, w: ops.conv(x, w, strides=2, padding="same"), image, kernel),
        "convolution, dilation_rate=2": (lambda x, w: ops.conv(x, w, padding="same", dilation_rate=2), image, kernel),
        "convolution, dilation_rate=4": (lambda x, w: ops.conv(x, w, padding="same", dilation_rate=4), image, kernel),
        "convolution, 4 groups": (lambda x, w: ops.conv(x, w, padding="same"), image, (3, 3, 16, 64)),
        "convolution of a sequence": (lambda x, w: ops.conv(x, w, padding="same"), sequence, (3, 256, 256)),
        "transposed convolution": (lambda x, w: ops.conv_transpose(x, w, strides=2), image, (2, 2, 64, 64)),
        "depthwise convolution": (lambda x, w: ops.depthwise_conv(x, w, padding="same"), image, (3, 3, 64, 1)),
        "depthwise convolution, strides=2": (
            lambda x, w: ops.depthwise_conv(x, w, strides=2, padding="same"), image, (3, 3, 64, 1),
        ),
        "depthwise convolution, 7x7": (lambda x, w: ops.depthwise_conv(x, w, padding="same"), image, (7, 7, 64, 1)),
        "depthwise convolution, dilation_rate=2": (
            lambda x, w: ops.depthwise_conv(x, w, padding="same", dilation_rate=2), image, (3, 3, 64, 1),
        ),
        "separable convolution": (
            lambda x, w: ops.conv(ops.depthwise_conv(x, ops.ones((3, 3, 64, 1)), padding="same"), w),
            image, (1, 1, 64, 64),
        ),
        "max_pool": (lambda x: ops.max_pool(x, 3, strides=2, padding="same"), image, None),
        "average_pool": (lambda x: ops.average_pool(x, 3, strides=2, padding="same"), image, None),
        "average_pool, strides=1": (lambda x: ops.average_pool(x, 3, strides=1, padding="same"), image, None),
        "global average pooling": (lambda x: ops.mean(x, axis=(1, 2)), image, None),
        "dense": (lambda x, w: ops.matmul(x, w), sequence, (256, 256)),
        "einsum with an ellipsis": (lambda x, w: ops.einsum("...i,ij->...j", x, w), sequence, (256, 256)),
        "attention": (
            lambda x: ops.dot_product_attention(*[ops.reshape(x, (BATCH, 128, 8, 32))] * 3), sequence, None,
        ),
        "layer normalization": (lambda x: ops.layer_normalization(x), sequence, None),
        "softmax": (lambda x: ops.softmax(x), sequence, None),
        # What each device does with its own rows.
        "flip": (lambda x: ops.flip(x, 1) * x, image, None),
        "roll": (lambda x: ops.roll(x, 3, 1) * x, image, None),
        "pad, mode=reflect": (lambda x: ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect"), image, None),
        "depth_to_space": (lambda x: ops.depth_to_space(x, 2) ** 2, image, None),
        "extract_patches": (lambda x: ops.image.extract_patches(x, 4), image, None),
        "resize, bilinear": (lambda x: ops.image.resize(x, (48, 48)), image, None),
        "resize, bicubic": (lambda x: ops.image.resize(x, (48, 48), interpolation="bicubic"), image, None),
        "cumsum": (lambda x: ops.cumsum(x, axis=1) * x, sequence, None),
        "cumprod": (lambda x: ops.cumprod(1 + x / 100, axis=1), sequence, None),
        "tril": (lambda x: ops.tril(x) * x, matrix, None),
        "inv": (lambda x: ops.inv(x + positive), matrix, None),
        "cholesky": (lambda x: ops.cholesky(ops.matmul(x, ops.swapaxes(x, 1, 2)) + positive), matrix, None),
        "top_k": (lambda x: ops.top_k(x, 8)[0], sequence, None),
        "sort": (lambda x: ops.sort(x, axis=-1) * x, sequence, None),
        "ctc_loss": (
            lambda x: ops.ctc_loss(targets, x[..., :32], np.full(BATCH, 10), np.full(BATCH, 128)), sequence, None,
        ),
        "map": (lambda x: ops.map(lambda row: ops.softmax(row) * row, x), sequence, None),
        "vectorized_map": (lambda x: ops.vectorized_map(lambda row: ops.softmax(row) * row, x), sequence, None),
        "scan": (
            lambda x: ops.scan(lambda c, row: (ops.tanh(c + row), c), tf.zeros(sequence[1:]), x)[1], sequence, None,
        ),
        "associative_scan": (lambda x: ops.associative_scan(lambda a, c: a + c, x, axis=1), sequence, None),
        # What every device does with all rows.
        "scatter": (lambda x: ops.scatter(np.arange(0, 32, 2)[:, None], x[:, 0], (32, 256)), sequence, None),
        "segment_sum": (lambda x: ops.segment_sum(x, np.arange(BATCH) // 2, 8), sequence, None),
    }  # fmt: skip


def measure(function: Callable, shape: tuple[int, ...], weight: tuple[int, ...] | None, strategy) -> list[dict]:
    """Milliseconds of a step, plain and on the mesh, for each round."""
    import numpy as np
    import tensorflow as tf

    from tfshard.devices import transfer

    rs = np.random.RandomState(0)
    values = [rs.normal(size=each).astype("float32") for each in (shape, weight) if each]

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = tf.reduce_sum(tf.square(function(*tensors)))
        return tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in tape.gradient(loss, tensors)])

    plain, sharded = tf.function(step), tf.function(step)
    rows = (strategy.mesh.dim_names[0],) + (None,) * (len(shape) - 1)
    placed = [transfer.host_to_mesh(values[0], rows, strategy.mesh)]
    placed += [transfer.host_to_mesh(each, (None,) * each.ndim, strategy.mesh) for each in values[1:]]
    given = [tf.constant(each) for each in values]
    ways = {
        "plain": lambda: float(plain(*given)),
        "sharded": lambda: float(transfer.to_host(strategy.run(sharded, args=tuple(placed)))),
    }
    expected, found = (way() for way in ways.values())
    if not np.isclose(expected, found, rtol=1e-3):
        print(f"  {found} in place of {expected}", flush=True)
    rounds = []
    for _ in range(_ROUNDS.value):
        times = {}
        for name, way in ways.items():
            way()
            start = time.perf_counter()
            for _ in range(STEPS):
                way()
            times[name] = (time.perf_counter() - start) / STEPS * 1e3
        rounds.append(times)
    return rounds


def main(argv: list[str]) -> None:
    del argv
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES), zero_stage=0)
    lines = ["| Operation | Input | Weight | one device, ms | four devices, ms | ratio |", "|---|---|---|---|---|---|"]
    for name, (function, shape, weight) in operations().items():
        if _ONLY.value not in name:
            continue
        rounds = measure(function, shape, weight, strategy)
        ratios = sorted(each["sharded"] / each["plain"] for each in rounds)
        plain, sharded = (statistics.median(each[way] for each in rounds) for way in ("plain", "sharded"))
        shapes = [" x ".join(map(str, each)) if each else "" for each in (shape, weight)]
        lines.append(
            f"| {name} | {shapes[0]} | {shapes[1]} | {plain:.1f} | {sharded:.1f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
        print(lines[-1], flush=True)
    if _WRITE.value:
        before, mark, _ = DOCS.read_text().partition("<!-- The table is written by tools/bench/operations.py -->\n")
        origin = f"{datetime.date.today()}, {common.origin()}, median of {_ROUNDS.value} rounds of {STEPS} steps."
        DOCS.write_text(before + mark + "\n" + origin + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
