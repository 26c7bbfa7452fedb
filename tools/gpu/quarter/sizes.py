"""Sizes of the models that every program of the run trains. Imports no backend."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT-2: its blocks, width, heads, vocabulary, tokens of a sample, and samples of a step."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.length

    @property
    def step_flops(self) -> int:
        """The floating-point operations of the matrix products of a step, with full attention and no recomputation.

        A product with a weight takes 6 operations for each parameter and token. The logits are such a product.
        Attention takes 12 operations for each block, token, position and unit of the width.
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return self.tokens * (6 * weights + 12 * self.layers * self.length * self.width)


SIZES = {
    "124M": Size(layers=12, width=768, heads=12, vocabulary=50257, length=1024, batch=8),
    "350M": Size(layers=24, width=1024, heads=16, vocabulary=50257, length=1024, batch=8),
    # For comparisons on four parts of a card.
    "4 blocks": Size(layers=4, width=768, heads=12, vocabulary=50257, length=512, batch=8),
    # For dry runs.
    "tiny": Size(layers=2, width=32, heads=2, vocabulary=64, length=16, batch=8),
}


def speed(size: Size, seconds: float) -> dict[str, float]:
    """Return the speed of a step that took `seconds`."""
    return {
        "ms": round(1e3 * seconds, 2),
        "tokens_per_second": round(size.tokens / seconds),
        "model_tflops": round(size.step_flops / seconds / 1e12, 2),
    }
