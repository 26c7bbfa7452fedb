"""Compression pays if the bytes saved on a link outweigh the time to encode."""

import pytest

import tfshard
from tfshard.errors import StrategyError
from tfshard.planning import compression_pays

GRADIENTS = {"exact_bytes": 8_000_000, "compressed_bytes": 2_000_000, "gradient_bytes": 4_000_000}


def test_it_pays_on_a_slow_link_and_says_so_of_a_fast_one():
    slow = compression_pays(**GRADIENTS, encode_seconds_per_byte=1e-9, link_bytes_per_second=12.5e6)
    assert (slow.link_seconds, slow.encode_seconds) == pytest.approx((0.48, 0.004))
    assert slow.pays and slow.seconds == pytest.approx(0.476)
    fast = compression_pays(**GRADIENTS, encode_seconds_per_byte=1e-9, link_bytes_per_second=12.5e9)
    assert not fast.pays and fast.seconds < 0
    assert str(fast) == "It does not pay: 0.5 ms less on the link, 4.0 ms more to encode and decode."


def test_sending_more_never_pays():
    more = {**GRADIENTS, "compressed_bytes": 9_000_000}
    assert not compression_pays(**more, encode_seconds_per_byte=0.0, link_bytes_per_second=1.0).pays


@pytest.mark.parametrize("wrong", ["exact_bytes", "compressed_bytes", "gradient_bytes", "encode_seconds_per_byte"])
def test_numbers_below_zero_are_refused(wrong):
    given = {**GRADIENTS, "encode_seconds_per_byte": 1e-9, wrong: -1}
    with pytest.raises(StrategyError, match=f"{wrong} must be 0 or more. Received: {wrong}=-1"):
        compression_pays(**given, link_bytes_per_second=1.0)
    with pytest.raises(StrategyError, match="link_bytes_per_second must be more than 0"):
        compression_pays(**GRADIENTS, encode_seconds_per_byte=0.0, link_bytes_per_second=0)


@pytest.mark.parametrize("compression", ["bfloat16", "int8", tfshard.PowerSGD(rank=2)], ids=str)
def test_encoding_is_measured(compression):
    assert 0 < tfshard.measure.encode_seconds_per_byte(compression, repeats=1) < 1e-3
    assert tfshard.measure.encode_seconds_per_byte(None) == 0
    with pytest.raises(StrategyError, match="compression must be None"):
        tfshard.measure.encode_seconds_per_byte("zip")
