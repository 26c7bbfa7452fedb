"""Train a byte-level GPT on real text, by default on the source code of Python's standard library.

    python examples/train_lm.py --mesh=batch:4 --zero_stage=3
    python examples/train_lm.py --mesh=batch:2,model:2
    python examples/train_lm.py                           # one device, plain Keras

Nothing is downloaded. Some files are held out. At the end, the example prints the loss on the held-out files in bits
per byte (8 is the loss of a random guess) and a sample of the model's text. It also prints the bytes that every device
holds. `--detail` lists the bytes of every variable.
"""

import math
import pathlib
import sysconfig
import time
from typing import NamedTuple

import keras
import numpy as np
import rich.progress
import tensorflow as tf
from absl import app, flags

import tfshard

_MESH = flags.DEFINE_string("mesh", "", "Mesh axes, such as 'batch:4' or 'batch:2,model:2'; empty: one device.")
_NUM_DEVICES = flags.DEFINE_integer(
    "num_devices", None, "Number of devices to start. By default the number of devices of the mesh."
)
_ZERO_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.", 0, 3)
_COMPRESSION = flags.DEFINE_string(
    "compression",
    "",
    "Compression of gradients between devices: 'bfloat16', 'int8', or 'powersgd:4' for rank 4; empty: none.",
)
_TEXT_PATH = flags.DEFINE_string(
    "text_path", None, "A file or directory of text to train on. By default the Python standard library."
)
_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks.", 1)
_WIDTH = flags.DEFINE_integer("width", 128, "Size of the residual stream.", 1)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads. The width must be a multiple of this number.", 1)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 128, "Bytes in a window.", 2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Windows in a step, over all devices.", 1)
_STEPS = flags.DEFINE_integer("steps", 500, "Training steps.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak learning rate of the cosine schedule.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, windows and the sample.")
_EVAL_EVERY = flags.DEFINE_integer("eval_every", 100, "Steps between lines of progress.", 1)
_EVAL_BYTES = flags.DEFINE_integer("eval_bytes", 1 << 17, "Bytes of the held-out text to measure at the end.", 1)
_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 200, "Bytes of the sample that is generated at the end.", 0)
_PROMPT = flags.DEFINE_string("prompt", "def __init__(self", "Prompt of the sample.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.5, "Temperature of the sample; 0 takes the most likely byte.", 0.0)
_DETAIL = flags.DEFINE_boolean("detail", False, "List the stored bytes of each variable instead of each block.")

VOCABULARY = 256
HELD_OUT_EVERY = 20  # Every 20th of the sorted files is held out, or the last 1/20 of a single file.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text(NamedTuple):
    """Bytes to train on and bytes to measure with."""

    train: np.ndarray
    held_out: np.ndarray


class PositionEmbedding(keras.layers.Layer):
    """A layer that adds a learned vector for each position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.embeddings = self.add_weight(shape=input_shape[1:], initializer="uniform", name="embeddings")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.embeddings


class Block(keras.layers.Layer):
    """A pre-norm transformer block: causal self-attention, then an MLP."""

    def __init__(self, heads: int, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        width = input_shape[-1]
        self.attention_norm = keras.layers.LayerNormalization(name="attention_norm")
        self.attention = keras.layers.MultiHeadAttention(self.heads, width // self.heads, name="attention")
        self.mlp_norm = keras.layers.LayerNormalization(name="mlp_norm")
        self.up = keras.layers.Dense(4 * width, activation="gelu", name="up")
        self.down = keras.layers.Dense(width, name="down")
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.mlp_norm.build(input_shape)
        self.up.build(input_shape)
        self.down.build((*input_shape[:-1], 4 * width))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.mlp_norm(x)))


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh axes: `"batch:2,model:2"` to `{"batch": 2, "model": 2}`."""
    axes = (part.split(":") for part in text.split(",") if part)
    return {name.strip(): int(size) for name, size in axes}


def parse_compression(text: str) -> str | tfshard.PowerSGD | None:
    """Parse a compression. `"powersgd:4"` is `tfshard.PowerSGD` of rank 4, which starts after a tenth of the steps."""
    name, _, rank = text.partition(":")
    return tfshard.PowerSGD(rank=int(rank), warm_up_steps=_STEPS.value // 10) if name == "powersgd" else text or None


def make_strategy() -> tfshard.ShardedStrategy | None:
    """Return the strategy that the flags ask for, or None for one device."""
    axes = parse_mesh(_MESH.value)
    if not axes:
        return None
    size = None if -1 in axes.values() else math.prod(axes.values())
    tfshard.initialize(num_devices=_NUM_DEVICES.value or size)
    layout_map = "auto" if "model" in axes else None
    compression = parse_compression(_COMPRESSION.value)
    return tfshard.ShardedStrategy(
        tfshard.create_mesh(**axes), layout_map, zero_stage=_ZERO_STAGE.value, compression=compression
    )


def make_model() -> keras.Model:
    """Return a decoder-only transformer from windows of bytes to the logits of each next byte."""
    inputs = keras.Input((_SEQUENCE_LENGTH.value,), dtype="int32", name="bytes")
    token_embedding = keras.layers.ReversibleEmbedding(VOCABULARY, _WIDTH.value, name="token_embedding")
    x = PositionEmbedding(name="position_embedding")(token_embedding(inputs))
    for i in range(_LAYERS.value):
        x = Block(_HEADS.value, name=f"block_{i}")(x)
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(inputs, token_embedding(x, reverse=True), name="byte_gpt")


def compile_model(model: keras.Model, strategy: tfshard.ShardedStrategy | None) -> None:
    """Compile the model with AdamW, a short warmup and a cosine decay to a tenth."""
    warmup = max(1, _STEPS.value // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        _LEARNING_RATE.value / warmup,
        decay_steps=max(1, _STEPS.value - warmup),
        alpha=0.1,
        warmup_target=_LEARNING_RATE.value,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, beta_2=0.99, global_clipnorm=1.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, strategy=strategy)


def find_files() -> list[pathlib.Path]:
    """Return the files to read, sorted, which makes every run hold out the same files."""
    if _TEXT_PATH.value is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        found = (path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts))
    else:
        root = pathlib.Path(_TEXT_PATH.value)
        found = [root] if root.is_file() else root.rglob("*")
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ValueError(f"Found no file to train on. Received: text_path={_TEXT_PATH.value!r}")
    return files


def load_text() -> Text:
    """Read the files, and hold out every 20th file, or the end of a single file."""
    files = find_files()
    contents = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    if len(files) == 1:
        cut = len(contents[0]) - len(contents[0]) // HELD_OUT_EVERY
        text = Text(train=contents[0][:cut], held_out=contents[0][cut:])
    else:
        held = set(range(0, len(files), HELD_OUT_EVERY))
        text = Text(
            train=np.concatenate([content for i, content in enumerate(contents) if i not in held]),
            held_out=np.concatenate([contents[i] for i in sorted(held)]),
        )
    shortest = min(len(text.train), len(text.held_out))
    if shortest <= _SEQUENCE_LENGTH.value:
        raise ValueError(
            f"The text must be longer than a window. Received: {len(text.train)} bytes to train on, "
            f"{len(text.held_out)} held out, sequence_length={_SEQUENCE_LENGTH.value}"
        )
    return text


def make_dataset(text: np.ndarray, starts: np.ndarray) -> tf.data.Dataset:
    """Return batches of windows that begin at `starts`. The target of a window is the window one byte later."""
    length = _SEQUENCE_LENGTH.value
    content = tf.constant(text)

    def window(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        piece = tf.cast(content[start : start + length + 1], tf.int32)
        return tf.ensure_shape(piece[:-1], [length]), tf.ensure_shape(piece[1:], [length])

    return tf.data.Dataset.from_tensor_slices(starts).map(window).batch(_BATCH_SIZE.value).prefetch(2)


def training_dataset(text: np.ndarray) -> tf.data.Dataset:
    """Return windows at random places, enough for all steps."""
    random = np.random.default_rng(_SEED.value)
    starts = random.integers(0, len(text) - _SEQUENCE_LENGTH.value, _STEPS.value * _BATCH_SIZE.value)
    return make_dataset(text, starts)


def held_out_dataset(text: np.ndarray, size: int) -> tf.data.Dataset:
    """Return non-overlapping windows of about `size` bytes in total, evenly spread, in full batches if possible."""
    starts = np.arange(0, len(text) - _SEQUENCE_LENGTH.value, _SEQUENCE_LENGTH.value)
    count = min(len(starts), max(_BATCH_SIZE.value, size // _SEQUENCE_LENGTH.value))
    if count > _BATCH_SIZE.value:
        count -= count % _BATCH_SIZE.value
    return make_dataset(text, starts[np.arange(count) * len(starts) // count])


class Progress(keras.callbacks.Callback):
    """Print a line every `every` steps and after the last step, with the means since the line before.

    On a terminal, a bar below the lines moves with every step. Elsewhere, as in a log file, only the lines are printed.
    Use the callback as a context manager around `fit`: the bar disappears at the end, even if `fit` fails.
    """

    def __init__(self, every: int, last: int, bytes_per_step: int):
        super().__init__()
        self._every = every
        self._last = last
        self._bytes_per_step = bytes_per_step
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(None),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
            transient=True,
        )
        self._bar.disable = not self._bar.console.is_terminal
        self._task = self._bar.add_task("", total=last)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._step = self._step_at_line = 0
        self._time_at_line = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        del batch
        self._step += 1
        seconds = time.perf_counter() - self._time_at_line
        if self._step == 1:
            # The speed does not count the first step, which is traced and compiled.
            self._bar.advance(self._task)
            print(f"first step after {seconds:.1f} s", flush=True)
        else:
            loss = float((logs or {})["loss"])
            speed = (self._step - self._step_at_line) * self._bytes_per_step / seconds
            text = f"loss {loss:.4f}  bits/byte {loss / math.log(2):.3f}  tokens/s {speed:,.0f}"
            self._bar.update(self._task, advance=1, description=text)
            if self._step % self._every and self._step != self._last:
                return
            print(f"step {self._step:5d}  {text}", flush=True)
            self.model.reset_metrics()
        self._step_at_line, self._time_at_line = self._step, time.perf_counter()


def write_sample(model: keras.Model, prompt: bytes) -> str:
    """Continue `prompt` byte by byte. The model sees a window of fixed length, filled from the left."""
    length = _SEQUENCE_LENGTH.value
    random = np.random.default_rng(_SEED.value)
    text = list(prompt or b"\n")
    for _ in range(_SAMPLE_BYTES.value):
        seen = text[-length:]
        window = np.zeros((1, length), np.int32)
        window[0, : len(seen)] = seen
        # Attention is causal: the bytes after the seen bytes in the window do not matter.
        logits = model.predict(window, verbose=0)[0, len(seen) - 1]
        text.append(choose(logits, random))
    return bytes(text).decode("utf-8", errors="replace")


def choose(logits: np.ndarray, random: np.random.Generator) -> int:
    """Draw a byte from its logits at the temperature of the flags."""
    if _TEMPERATURE.value == 0:
        return int(logits.argmax())
    logits = logits.astype(np.float64) / _TEMPERATURE.value
    weights = np.exp(logits - logits.max())
    return int(random.choice(VOCABULARY, p=weights / weights.sum()))


def main(argv: list[str]) -> None:
    """Train, measure, write a sample, and print the bytes that every device holds."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    if _WIDTH.value % _HEADS.value:
        raise app.UsageError(f"width must be a multiple of heads. Received: heads={_HEADS.value}, width={_WIDTH.value}")
    strategy = make_strategy()  # First: TensorFlow fixes its devices at the first tensor.
    keras.utils.set_random_seed(_SEED.value)
    text = load_text()
    print(f"{len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    model = tfshard.as_distributed(make_model())
    compile_model(model, strategy)
    print(f"{model.count_params():,} parameters, {f'mesh {_MESH.value}' if strategy else 'one device'}")
    with Progress(_EVAL_EVERY.value, _STEPS.value, _BATCH_SIZE.value * _SEQUENCE_LENGTH.value) as progress:
        model.fit(training_dataset(text.train), callbacks=[progress], shuffle=False, verbose=0)
    loss = model.evaluate(held_out_dataset(text.held_out, _EVAL_BYTES.value), verbose=0)
    print(f"held-out bits per byte: {loss / math.log(2):.4f}")
    if _SAMPLE_BYTES.value:
        print(f"--- sample\n{write_sample(model, _PROMPT.value.encode())}\n---")
    if strategy is not None:
        report = strategy.report(model)
        print(report.text(detail=True) if _DETAIL.value else report.summary())


if __name__ == "__main__":
    app.run(main)
