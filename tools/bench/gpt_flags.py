"""Define the flags of benchmarks that train a GPT-2, and build the model."""

import common
from absl import flags

_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.")
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 8000, "Tokens of the vocabulary.")
SEQUENCE = flags.DEFINE_integer("sequence_length", 128, "Tokens of a sample.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")


def gpt2(*, steps: int = 1):
    """Return the model of `common.gpt2` that the flags describe, and batches for `steps` steps."""
    return common.gpt2(
        layers=_LAYERS.value, width=_WIDTH.value, heads=_HEADS.value, vocabulary=_VOCABULARY.value,
        sequence=SEQUENCE.value, samples=BATCH_SIZE.value * steps,
    )  # fmt: skip
