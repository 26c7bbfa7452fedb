"""The options with which users choose a compression of gradients."""

import dataclasses

from tfshard.errors import StrategyError

CODES = ("bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Low-rank compression of matrices: for a gradient of a by b elements, devices all-reduce (a + b) * rank elements.

    Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
    (https://arxiv.org/abs/1905.13727), Algorithms 1 and 2: one power iteration a step, which begins with the factor of
    the previous step, and error feedback. PowerSGD applies to kernels of Dense and EinsumDense. Other gradients are
    reduced without compression.

    Args:
        rank: The rank of the approximation.
        warm_up_steps: How many steps run without compression before the first compressed step. Gradients change most
            at the start of a training. Each kernel counts the reductions of its gradient: every use of a layer counts,
            and every microbatch counts, except with `reduce_once`.

    Raises:
        StrategyError: An argument that is not an integer, or is too small.

    Example:

    >>> import tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> compression = tfshard.PowerSGD(rank=2, warm_up_steps=10)
    >>> strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), compression=compression)
    """

    rank: int = 4
    warm_up_steps: int = 100

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("warm_up_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise StrategyError(
                    f"{name} of PowerSGD must be an integer, {least} or more. Received: {name}={value!r}"
                )
