"""Analyzers for networks: `ShardedStrategy(analyzer=tfshard.presets.TEN_GBE)`.

A collective of n bytes takes about `latency + n / bandwidth` (the model of Hockney 1994, "The communication challenge
for MPP"). The network could send `latency * bandwidth` bytes while one collective starts. Therefore:

- Variables below 2 * latency * bandwidth are grouped: alone, latency would be a third of their collective or more. The
  limit is at least 256 KiB, because a group also saves kernels, and is rounded up to a power of two.
- The largest group grows with the network's speed: 4 MiB at 100 Mbit/s, and twice as much for each tenfold bandwidth,
  but at least 16 * latency * bandwidth. It is rounded to a power of two. Larger groups gained less than 6% in measured
  steps, hold more gathered memory, and make their first member wait longer.

| preset | latency | bandwidth | latency * bandwidth | threshold | maximum |
|---|---|---|---|---|---|
| `INFINIBAND` | 70 us | 25 GB/s (200 Gbit/s) | 1750 KB | 4 MiB | 32 MiB |
| `TEN_GBE` | 150 us | 1.25 GB/s | 188 KB | 512 KiB | 16 MiB |
| `ONE_GBE` | 250 us | 125 MB/s | 31 KB | 256 KiB | 8 MiB |
| `SLOW` | 20 ms | 12.5 MB/s (100 Mbit/s, between sites) | 250 KB | 512 KiB | 4 MiB |

The latencies and bandwidths are nominal. Step times by the size of groups were measured over shaped links of 1 Gbit/s,
and of 100 Mbit/s with and without 5 ms of delay (docs/measurements.md, "Sizes of groups"). `TEN_GBE` and `INFINIBAND`
continue the rule, and were not run. For a network that you measured, use
`tfshard.ParameterAnalyzer.for_network("network.json")`.
"""

from tfshard.layouts import network_sizes
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
    ParameterAnalyzer(group_threshold_bytes=524288, max_group_bytes=16777216, min_group_bytes=0)
    """
    return ParameterAnalyzer(**network_sizes.sizes_for(latency, bandwidth))


INFINIBAND = for_network(latency=70e-6, bandwidth=25e9)
TEN_GBE = for_network(latency=150e-6, bandwidth=1.25e9)
ONE_GBE = for_network(latency=250e-6, bandwidth=125e6)
SLOW = for_network(latency=20e-3, bandwidth=12.5e6)
