"""Compare the bytes that a compression of gradients saves on a link with the time that it takes."""

import dataclasses

from tfshard.errors import StrategyError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionGain:
    """The gain of a compression of gradients in a step, if nothing overlaps.

    Attributes:
        link_seconds: The time that the compression saves on the link.
        encode_seconds: The time in which devices encode and decode.
    """

    link_seconds: float
    encode_seconds: float

    @property
    def seconds(self) -> float:
        """The time that a step saves; negative if it takes more."""
        return self.link_seconds - self.encode_seconds

    @property
    def pays(self) -> bool:
        """True if the compression saves time."""
        return self.seconds > 0

    def __str__(self) -> str:
        verb = "pays" if self.pays else "does not pay"
        change = "less" if self.link_seconds >= 0 else "more"
        return (
            f"It {verb}: {1e3 * abs(self.link_seconds):.1f} ms {change} on the link, "
            f"{1e3 * self.encode_seconds:.1f} ms more to encode and decode."
        )


def compression_pays(
    *,
    exact_bytes: int,
    compressed_bytes: int,
    gradient_bytes: int,
    encode_seconds_per_byte: float,
    link_bytes_per_second: float,
) -> CompressionGain:
    """Judge a compression for a link.

    Args:
        exact_bytes: Bytes that go over the link in a step without compression.
        compressed_bytes: Bytes that go over the link in a step with compression.
        gradient_bytes: Bytes of the gradients that a device compresses.
        encode_seconds_per_byte: Time to encode and decode a byte of the gradients, as
            `tfshard.measure.encode_seconds_per_byte` measures it.
        link_bytes_per_second: The bandwidth of the link.

    Raises:
        StrategyError: A number is negative, or the link has no bandwidth.

    >>> from tfshard.planning import compression_pays
    >>> gradients = {"exact_bytes": 40 * 10**6, "compressed_bytes": 10 * 10**6, "gradient_bytes": 10 * 10**6}
    >>> slow = compression_pays(**gradients, encode_seconds_per_byte=4e-9, link_bytes_per_second=125e6)
    >>> print(slow)
    It pays: 240.0 ms less on the link, 40.0 ms more to encode and decode.
    >>> compression_pays(**gradients, encode_seconds_per_byte=4e-9, link_bytes_per_second=12.5e9).pays
    False
    """
    given = {"exact_bytes": exact_bytes, "compressed_bytes": compressed_bytes, "gradient_bytes": gradient_bytes,
             "encode_seconds_per_byte": encode_seconds_per_byte}  # fmt: skip
    for name, value in given.items():
        if not value >= 0:
            raise StrategyError(f"{name} must be 0 or more. Received: {name}={value!r}")
    if not link_bytes_per_second > 0:
        raise StrategyError(
            f"link_bytes_per_second must be more than 0. Received: link_bytes_per_second={link_bytes_per_second!r}"
        )
    return CompressionGain(
        link_seconds=(exact_bytes - compressed_bytes) / link_bytes_per_second,
        encode_seconds=gradient_bytes * encode_seconds_per_byte,
    )
