"""`advise` recommends gradient compression depending on the links."""

import dataclasses
import json
import re

import keras
import pytest

import tfshard
from tfshard.layouts.layout_map import VariableSpec
from tfshard.planning import Link, Links, compression_pays

MEBI = 1 << 20
ENCODING = {"bfloat16": 2e-9, "int8": 4e-9, "powersgd": 2e-9}
FAST = Link(latency=0.0, bandwidth=4e9)
HYBRID = {"replica": 2, "batch": 2}


def links(between: float, **encoding: float) -> Links:
    """Return links of hosts with two devices, and the given bandwidth in bytes per second between the hosts."""
    slow = Link(latency=0.0, bandwidth=between)
    return Links.of(devices_per_host=2, inside=FAST, between=slow, encoding={**ENCODING, **encoding})


SLOW, QUICK = links(12.5e6), links(5e9)


def kernels(count: int = 4, side: int = 1024) -> list[VariableSpec]:
    return [VariableSpec(path=f"dense_{i}/kernel", shape=(side, side)) for i in range(count)]


def dense(uses: int = 1, width: int = 256) -> keras.Model:
    """Return a model that uses a layer several times."""
    inputs = keras.Input((width,))
    layer, out = keras.layers.Dense(width, use_bias=False), inputs
    for _ in range(uses):
        out = layer(out)
    return keras.Model(inputs, out)


def advise(compression, over=SLOW, memory=4000, model=None, **options) -> tfshard.planning.Advice:
    model = kernels() if model is None else model
    return tfshard.advise(model, 4, memory * MEBI, 32, links=over, compression=compression, **options)


def on_hybrid(advice, compression):
    (found,) = (
        each
        for each in advice.candidates
        if (each.mesh_shape, each.zero_stage, each.compression) == (HYBRID, 3, compression)
    )
    return found


def said(advice) -> list[str]:
    return [reason for reason in advice.reasons if reason.startswith("compression=")]


def test_over_a_slow_link_the_compression_that_gains_most_is_proposed():
    exact, advice = advise(None), advise("auto")
    assert exact.recommended.compression is None and not said(exact)
    assert advice.recommended.compression == "int8" and advice.recommended.mesh_shape == HYBRID
    assert advice.recommended.seconds < 0.5 * exact.recommended.seconds
    assert {each.compression for each in advice.candidates} == {None, "bfloat16", "int8"}
    assert (
        "with compression='int8'. Of the configurations that fit, it has the fastest collectives" in advice.reasons[0]
    )
    bfloat16, int8 = sorted(said(advice))
    assert re.match(r"compression='int8' there: It pays: \d+\.\d ms less on the link, \d+\.\d ms more to encode", int8)
    assert int8.endswith(": it is recommended.") and "It pays" in bfloat16 and not bfloat16.endswith("recommended.")
    assert advise("bfloat16").recommended.compression == "bfloat16"
    low_rank = tfshard.PowerSGD(rank=2)
    assert advise(low_rank, model=dense()).recommended.compression == low_rank


def test_over_a_fast_link_it_says_by_how_much_one_does_not_pay():
    advice = advise("int8", QUICK)
    assert advice.recommended.compression is None
    assert advice.recommended == advise(None, QUICK).recommended
    (reason,) = said(advice)
    assert re.match(r"compression='int8' there: It does not pay: \d+\.\d ms (less|more) on the link, ", reason)
    share = float(re.search(r"That is (\d+\.\d\d) of the time of exact sums.*: leave it out\.$", reason)[1])
    found = advice.candidates
    twin = next(
        each
        for each in found
        if each.compression and each.mesh_shape == advice.recommended.mesh_shape
        and each.zero_stage == advice.recommended.zero_stage
    )  # fmt: skip
    assert share == pytest.approx(twin.seconds / advice.recommended.seconds, abs=0.006) and share > 1


def test_what_pays_by_a_little_or_is_hidden_for_its_half_is_left_out():
    """Encoding takes three quarters of the time saved on the link: a gain only if nothing overlaps with computation."""
    exact, int8 = (on_hybrid(advise("int8"), how) for how in (None, "int8"))
    spared = exact.collective_seconds - int8.collective_seconds
    slower = links(12.5e6, int8=ENCODING["int8"] * 0.75 * spared / int8.encode_seconds)
    advice = advise("int8", slower)
    assert on_hybrid(advice, "int8").seconds < 0.9 * exact.seconds, "premise: it pays by more than a tenth"
    assert advice.recommended.compression is None
    (reason,) = said(advice)
    assert "It pays" in reason and "if half of the former was hidden behind computing: leave it out." in reason


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", ["bfloat16", "int8", tfshard.PowerSGD(rank=4)], ids=str)
@pytest.mark.parametrize("uses", [1, 2])
def test_the_time_is_that_of_the_bytes(how, uses):
    """On a flat mesh, a device encodes each gradient in full, once for each use of its layer."""
    flat = {"batch": 4}
    advice = advise(how, model=dense(uses))
    found = next(c for c in advice.candidates if (c.mesh_shape, c.zero_stage, c.compression) == (flat, 3, how))
    name = how if isinstance(how, str) else "powersgd"
    assert found.encode_seconds == pytest.approx(uses * 4 * 256 * 256 * ENCODING[name])
    replicas = next(c for c in advice.candidates if (c.mesh_shape, c.zero_stage, c.compression) == (HYBRID, 3, how))
    part = 2 if isinstance(how, str) else 1
    assert replicas.encode_seconds == pytest.approx(found.encode_seconds / part)


def test_it_agrees_with_compression_pays():
    """Computes the bytes between hosts by hand, for one kernel on a hybrid mesh."""
    advice = advise("int8", model=kernels(1))
    exact, int8 = on_hybrid(advice, None), on_hybrid(advice, "int8")
    kernel, chunk = 4 * 1024 * 1024, 1024 * 1024 // 4
    codes = 2 * (chunk + 4 * chunk // 256)
    # Two devices of a host send: an all-reduce sends half of a shard twice, codes go half to and half from.
    gain = compression_pays(
        exact_bytes=2 * kernel // 2,
        compressed_bytes=2 * (codes // 2 + codes // 2),
        gradient_bytes=kernel // 2,
        encode_seconds_per_byte=ENCODING["int8"],
        link_bytes_per_second=12.5e6,
    )
    assert exact.collective_seconds - int8.collective_seconds == pytest.approx(gain.link_seconds, rel=0.01)
    assert int8.encode_seconds == pytest.approx(gain.encode_seconds)


def test_one_that_does_not_fit_is_not_proposed():
    exact, advice = advise(None, memory=200), advise("int8", memory=200)
    assert on_hybrid(advice, "int8").stored_bytes > on_hybrid(advice, None).stored_bytes
    memory = min(c.needed_bytes for c in advice.candidates if c.compression == "int8") // MEBI - 1
    tight = advise("int8", memory=memory)
    assert exact.recommended is not None and tight.recommended is not None, "premise: exact sums fit"
    assert tight.recommended.compression is None
    assert any(re.search(r"but it is [\d,.]+ [KM]iB too large\.$", reason) for reason in said(tight))


def test_small_gradients_and_model_axes_are_told():
    (reason,) = said(advise("int8", model=kernels(2, side=64)))
    assert "compresses no gradient" in reason
    layout_map = tfshard.LayoutMap()
    layout_map.column("dense_.*/kernel")
    advice = advise("int8", layout_map=layout_map)
    assert any(each.mesh_shape.get("model", 1) > 1 for each in advice.candidates)
    assert all(each.compression is None for each in advice.candidates if each.mesh_shape.get("model", 1) > 1)
    assert any(each.compression == "int8" for each in advice.candidates)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advise("int8", None), "depends on the links. Give links=.*Received: compression='int8', links=None"),
        (lambda: advise("zip"), "compression must be None, 'bfloat16', 'int8' or a tfshard.PowerSGD"),
        (
            lambda: advise("int8", Links.of(devices_per_host=2, inside=FAST, between=FAST)),
            "do not say how long devices take to encode gradients for 'int8'. Measure again",
        ),
    ],
)
def test_a_compression_that_cannot_be_judged_is_refused(call, message):
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        call()


def test_the_network_profile_measures_encoding_and_old_files_have_none(tmp_path):
    measured = tfshard.profile_network(sizes=[1024], repeats=1, devices_per_host=2)
    found = measured.links
    assert set(found.encoding) == {"bfloat16", "int8", "powersgd"} and min(found.encoding.values()) > 0
    assert "encoded for int8" in str(measured)
    found.save(tmp_path / "network.json")
    assert Links.load(tmp_path / "network.json") == found
    values = found.to_dict()
    del values["encoding"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert Links.load(tmp_path / "old.json") == dataclasses.replace(found, encoding={})
    # Proportional to the rank above the measured rank.
    times = [found.encode_seconds(tfshard.PowerSGD(rank=rank), 1000) for rank in (2, 4, 8)]
    assert times[0] == times[1] and times[2] == pytest.approx(2 * times[1])
