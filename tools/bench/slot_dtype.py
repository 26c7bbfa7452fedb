"""What optimizer slots in bfloat16 and in 8 bits change: losses and weights of a small GPT-2, against float32.

    python tools/bench/slot_dtype.py

Each row trains the same model, a language model of bytes, on the same batches of the text in docs/, at stage 3 on four
devices. *Loss* is the mean over the last 20 steps, *apart* the largest difference of a step's loss from float32's.
*Weights apart* is the norm of the difference of the weights over the norm of what training had changed of them. The
row "float32, 2 devices" is what the order of sums alone does.
"""

import dataclasses
import pathlib

import common
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 600, "Steps.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 128, "Width of the model.")
_SEQUENCE = flags.DEFINE_integer("sequence_length", 64, "Bytes of a sample.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")

_DTYPES = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int8, embeddings not": {".*embedding.*": "float32", ".*": "int8"},
}
_RATES = {"Adam": 1e-3, "SGD": 1e-1}
_LAST = 20
_BYTES = 256
_DOCS = pathlib.Path(__file__).parents[2] / "docs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run left: the loss of each step, weights before and after, bytes of slots on one device."""

    losses: list
    before: list
    after: list
    slot_bytes: int


def batches():
    """The batches of all steps: bytes of the documents, and the bytes that follow them."""
    import numpy as np

    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(_DOCS.glob("*.md"))), np.uint8).astype("int32")
    random = np.random.RandomState(0)
    for _ in range(_STEPS.value):
        begins = random.randint(0, len(text) - _SEQUENCE.value - 1, _BATCH_SIZE.value)
        tokens = np.stack([text[begin : begin + _SEQUENCE.value + 1] for begin in begins])
        yield {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(tokens[:, :-1])}, tokens[:, 1:]


def train(optimizer: str, slot_dtype: str | dict, devices: int) -> Run:
    import keras
    import numpy as np

    import tfshard

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, _ = common.gpt2(
        layers=_LAYERS.value, width=_WIDTH.value, heads=4, vocabulary=_BYTES, sequence=_SEQUENCE.value, samples=1
    )
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), zero_stage=3, slot_dtype=slot_dtype)
    model = tfshard.as_distributed(model)
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    model.compile(
        getattr(keras.optimizers, optimizer)(_RATES[optimizer], **options),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
    )
    before = [np.array(each) for each in model.trainable_variables]
    losses = []
    for x, y in batches():
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, y)))
    after = [np.array(each) for each in model.trainable_variables]
    slot_bytes = strategy.report(model).bytes_per_device("slot")
    return Run(losses=losses, before=before, after=after, slot_bytes=slot_bytes)


def row(name: str, run: Run, reference: Run) -> str:
    import numpy as np

    def distance(some: list, others: list) -> float:
        return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(some, others, strict=True)))

    apart = np.abs(np.subtract(run.losses, reference.losses)).max()
    weights = distance(run.after, reference.after) / distance(reference.after, reference.before)
    cells = f"{run.losses[0]:.4f}", f"{np.mean(run.losses[-_LAST:]):.4f}", f"{apart:.4f}", f"{weights:.4f}"
    return f"{name:>26}" + "".join(f"{cell:>16}" for cell in (*cells, f"{run.slot_bytes:,}"))


def main(argv):
    del argv
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    print(f"{common.origin()}, {_STEPS.value} steps")
    heads = "first loss", "last losses", "apart", "weights apart", "bytes of slots"
    print(" " * 26 + "".join(f"{head:>16}" for head in heads))
    for optimizer in _RATES:
        reference = train(optimizer, "float32", common.DEVICES)
        print(row(f"{optimizer}, float32", reference, reference), flush=True)
        print(row("float32, 2 devices", train(optimizer, "float32", 2), reference), flush=True)
        for name, dtype in _DTYPES.items():
            print(row(name, train(optimizer, dtype, common.DEVICES), reference), flush=True)


if __name__ == "__main__":
    app.run(main)
