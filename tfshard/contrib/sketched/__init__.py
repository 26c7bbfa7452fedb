"""SketchedDense: a linear layer through random sketches."""

from tfshard.contrib.sketched.layers import SketchedDense
from tfshard.layouts import layout_map


def _dim(name: str, column: bool) -> int | None:
    """Return the dim of a SketchedDense variable that a column or row rule shards."""
    if name.startswith("output"):
        return 1 if column else None
    return None if column else 0


layout_map.register_layer(SketchedDense, _dim)

__all__ = ["SketchedDense"]
