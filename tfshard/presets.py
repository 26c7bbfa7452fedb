"""Analyzers for networks: `ShardedStrategy(analyzer=tfshard.presets.TEN_GBE)`.

A collective of n bytes takes about `latency + n / bandwidth` (the model of Hockney 1994, "The communication challenge
for MPP"). The network could send `latency * bandwidth` bytes while one collective starts. Therefore:

- Variables below 2 * latency * bandwidth are grouped: alone, latency would be a third of their collective or more.
- A group has at most 32 * latency * bandwidth: its latency is then 3%, and a larger group would only make its first
  member wait longer.
- For any network, the limits are at least 256 KiB and 4 MiB: a group also saves kernels, because a step updates it as
  one tensor.
- Both limits are rounded up to a power of two.

| preset | latency | bandwidth | latency * bandwidth | threshold | maximum |
|---|---|---|---|---|---|
| `INFINIBAND` | 70 us | 25 GB/s (200 Gbit/s) | 1750 KB | 4 MiB | 64 MiB |
| `TEN_GBE` | 150 us | 1.25 GB/s | 188 KB | 512 KiB | 8 MiB |
| `ONE_GBE` | 250 us | 125 MB/s | 31 KB | 256 KiB | 4 MiB |
| `SLOW` | 20 ms | 12.5 MB/s (100 Mbit/s, between sites) | 250 KB | 512 KiB | 8 MiB |

The latencies are assumed, not measured: 20, 100 and 200 us for a collective on the network, and 50 us in TensorFlow.
None of these networks was run. The latency of a collective grows with the number of devices. For other numbers, use
`for_network`.
"""

from tfshard.errors import StrategyError
from tfshard.layouts.parameter_analyzer import ParameterAnalyzer


def for_network(*, latency: float, bandwidth: float) -> ParameterAnalyzer:
    """Return the analyzer for a network, by the rules above.

    Args:
        latency: Seconds of a collective of no bytes.
        bandwidth: Bytes per second.

    Raises:
        StrategyError: A number that is not positive.

    Example:

    >>> import tfshard
    >>> tfshard.presets.for_network(latency=150e-6, bandwidth=1.25e9)
    ParameterAnalyzer(group_threshold_bytes=524288, max_group_bytes=8388608)
    """
    if not (latency > 0 and bandwidth > 0):
        raise StrategyError(
            "latency (seconds) and bandwidth (bytes a second) must be positive. "
            f"Received: latency={latency}, bandwidth={bandwidth}"
        )
    product = latency * bandwidth
    return ParameterAnalyzer(
        group_threshold_bytes=_power_of_two(max(2 * product, 256 << 10)),
        max_group_bytes=_power_of_two(max(32 * product, 4 << 20)),
    )


def _power_of_two(size: float) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (int(-(-size // 1)) - 1).bit_length()


INFINIBAND = for_network(latency=70e-6, bandwidth=25e9)
TEN_GBE = for_network(latency=150e-6, bandwidth=1.25e9)
ONE_GBE = for_network(latency=250e-6, bandwidth=125e6)
SLOW = for_network(latency=20e-3, bandwidth=12.5e6)
