"""Compressed gradients: devices send fewer bytes of each gradient, and keep the rest for a later step.

Read `compressed_reduction` first.

    compressed_reduction  `CompressedReduction`: the reduction that `compression=` chooses
    options               `PowerSGD`, and the names of the codes
    compressed_form       the compressed gradient of a variable, its residuals, and its collectives
    compressed_sums       gradients that devices sum compressed, with error feedback
    gradient_codes        bfloat16, and codes of 8 bits, as they are sent
    encoding              how long a device takes to compress a gradient
    compression_gain      whether a compression pays on a link
"""

from tfshard.contrib.compression.compressed_reduction import OPTIONS
from tfshard.contrib.compression.compression_gain import CompressionGain, compression_pays
from tfshard.contrib.compression.encoding import encode_seconds_per_byte
from tfshard.contrib.compression.options import PowerSGD
from tfshard.layouts import gradient_reduction

gradient_reduction.OPTIONS.append(OPTIONS)

__all__ = ["CompressionGain", "PowerSGD", "compression_pays", "encode_seconds_per_byte"]
