"""The sizes of groups for a network: the rules of `tfshard.presets` and `ParameterAnalyzer.for_network`."""

import json
import math
import numbers
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tfshard.errors import StrategyError

# The smallest threshold: a group also saves kernels, because a step updates it as one tensor.
_LEAST_THRESHOLD = 256 << 10
# The maximum that suffices at 100 Mbit/s (docs/planning.md, "Presets"); it doubles with each tenfold bandwidth.
_MAXIMUM_OF_SLOW, _BANDWIDTH_OF_SLOW = 4 << 20, 12.5e6


def sizes_for(latency: float, bandwidth: float) -> dict[str, int]:
    """Return the sizes of a `GroupPolicy` for a network.

    Args:
        latency: Seconds of a collective of no bytes.
        bandwidth: Bytes per second.

    Raises:
        StrategyError: A number that is not positive.

    >>> sizes_for(latency=250e-6, bandwidth=125e6)
    {'group_threshold_bytes': 262144, 'max_group_bytes': 8388608}
    """
    if not all(isinstance(number, numbers.Real) and number > 0 for number in (latency, bandwidth)):
        raise StrategyError(
            "latency (seconds) and bandwidth (bytes a second) must be positive numbers. "
            f"Received: latency={latency!r}, bandwidth={bandwidth!r}"
        )
    product = latency * bandwidth
    largest = max(16 * product, _MAXIMUM_OF_SLOW * 2 ** math.log10(bandwidth / _BANDWIDTH_OF_SLOW))
    threshold = 1 << (math.ceil(max(2 * product, _LEAST_THRESHOLD)) - 1).bit_length()
    # A variable that the threshold groups must fit in a group.
    return {"group_threshold_bytes": threshold, "max_group_bytes": max(1 << round(math.log2(largest)), 2 * threshold)}


def link_of(network: Any) -> tuple[float, float]:
    """Return the latency and the bandwidth of the all-gather over all devices of a measured network.

    Args:
        network: The path of a file of `tfshard profile-network --save`, or `tfshard.planning.Links`.

    Raises:
        StrategyError: The file cannot be read, or holds something else.
    """
    if isinstance(network, (str, os.PathLike)):
        try:
            values = json.loads(pathlib.Path(network).read_text())
        except (OSError, ValueError) as error:
            raise StrategyError(
                "The network cannot be read. Write its file with 'tfshard profile-network --save=FILE'. Received: "
                f"network={os.fspath(network)!r} ({type(error).__name__}: {error})"
            ) from None
    else:
        to_dict = getattr(network, "to_dict", None)
        values = None if to_dict is None else to_dict()
    try:
        assert isinstance(values, Mapping)
        link = (values["across"] or values["inside"])["all-gather"]
        # A measured latency may be 0 within its error.
        return max(float(link["latency"]), 1e-9), float(link["bandwidth"])
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise StrategyError(
            "network must be tfshard.planning.Links, or the path of a file that 'tfshard profile-network --save=FILE' "
            f"wrote. Received: network={network!r} ({type(error).__name__}: {error})"
        ) from None
