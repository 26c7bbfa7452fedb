"""Additional Keras layers. They also work without a strategy."""

from tfshard.contrib.experts.layers import MixtureOfExperts
from tfshard.contrib.sketched import SketchedDense

__all__ = ["MixtureOfExperts", "SketchedDense"]
