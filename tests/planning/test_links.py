"""Links between devices, and the mesh that `advise` recommends for them."""

import json

import keras
import numpy as np
import pytest

import tfshard
from tfshard.layouts.layout_map import VariableSpec
from tfshard.measure import network_profile
from tfshard.planning import Collective, Link, Links

MEBI = 1 << 20
FAST = Link(latency=1e-4, bandwidth=1e9)
SLOW = Link(latency=1e-4, bandwidth=1e8)
HOSTS = Links.of(devices_per_host=2, inside=FAST, between=SLOW)
EQUAL = Links.of(devices_per_host=2, inside=FAST, between=FAST)
FLAT, HYBRID = {"batch": 4}, {"replica": 2, "batch": 2}


def kernels(count: int = 8) -> list[VariableSpec]:
    """Return kernels of 4 MiB in float32."""
    return [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(count)]


def advise(memory: int, links, devices: int = 4, **options) -> tfshard.planning.Advice:
    return tfshard.advise(kernels(), devices, memory * MEBI, 32, links=links, **options)


def of(advice, mesh_shape, stage):
    return next(c for c in advice.candidates if (c.mesh_shape, c.zero_stage) == (mesh_shape, stage))


def sent(kind, axis, mesh, links=HOSTS, bytes_=MEBI):
    """Return the seconds of a collective without its latency, in units of a MiB over the slow link."""
    collective = Collective(kind=kind, what="", axis=axis, count=1, bytes=bytes_, formula="")
    return (links.seconds(collective, mesh) - FAST.latency) * SLOW.bandwidth / MEBI


@pytest.mark.parametrize(
    ("kind", "axis", "mesh", "expected"),
    [
        # In one ring through both hosts.
        ("all-gather", "batch", FLAT, 3 / 4),
        ("all-reduce", "batch", FLAT, 2 * 3 / 4),
        # A CPU reduces everything, and then cuts.
        ("reduce-scatter", "batch", FLAT, 2 * 3 / 4),
        # Within a host, ten times as fast.
        ("all-gather", "batch", HYBRID, 1 / 2 / 10),
        ("all-to-all", "batch", HYBRID, 1 / 2 / 10),
        # Each of the two devices of a host sends to the other host.
        ("all-reduce", "replica", HYBRID, 2 * (2 * 1 / 2)),
        # DTensor's all-reduce over all devices.
        ("all-reduce", "batch", HYBRID, 2 * 3 / 4),
        # The last axis lies within a host, the first one across hosts. Gathers over model axes are reductions there.
        ("all-reduce", "model", {"batch": 2, "model": 2}, 1 / 10),
        ("all-gather", "batch", {"batch": 2, "model": 2}, 2 * 1 / 2),
        ("all-gather", "model", {"model": 2, "batch": 2}, 2 * (2 * 1 / 2)),
        ("all-reduce", "model", {"model": 2, "batch": 2}, 2 * (2 * 1 / 2)),
        # Four hosts, two in a replica: rings of four through the two hosts of each.
        ("all-gather", "batch", {"replica": 2, "batch": 4}, 3 / 4),
    ],
)
def test_a_collective_takes_what_it_sends_over_the_links_between_its_devices(kind, axis, mesh, expected):
    assert sent(kind, axis, mesh) == pytest.approx(expected)


def test_a_gpu_scatters_what_it_reduces_in_half_the_bytes():
    links = Links.of(devices_per_host=2, inside=FAST, between=SLOW, device_type="GPU")
    assert sent("reduce-scatter", "batch", FLAT, links) == pytest.approx(3 / 4)


def test_replicas_are_proposed_where_links_between_hosts_are_slow():
    advice = advise(1000, HOSTS)
    assert advice.recommended.mesh_shape == HYBRID
    flat = min((c for c in advice.candidates if c.mesh_shape == FLAT), key=lambda c: c.collective_seconds)
    assert flat.fits and advice.recommended.collective_seconds < 0.8 * flat.collective_seconds
    assert advice.reasons[1] == (
        f"Its collectives take {1e3 * advice.recommended.collective_seconds:,.1f} ms, one after the other; of the flat "
        f"meshes batch=4 at stage {flat.zero_stage} would take {1e3 * flat.collective_seconds:,.1f} ms."
    )
    assert " sends," in str(advice) and "…" not in str(advice), "no column is cut off"
    assert "replica=2 x batch=2" in str(advice)
    # At stage 3, a step sends a quarter of the bytes between hosts.
    ratio = of(advice, HYBRID, 3).collective_seconds / of(advice, FLAT, 3).collective_seconds
    assert 0.2 < ratio < 0.5


def test_a_flat_mesh_is_proposed_where_links_are_equal_or_replicas_do_not_fit():
    assert advise(1000, EQUAL).recommended.mesh_shape == FLAT
    advice = advise(45, HOSTS)
    assert (advice.recommended.mesh_shape, advice.recommended.zero_stage) == (FLAT, 3), "the only one that fits"
    assert "replica=2 x batch=2 at stage 3 was rejected: " in " ".join(advice.reasons)
    assert advise(45, EQUAL).recommended.mesh_shape == FLAT


def test_replicas_are_hosts_or_some_hosts():
    advice = advise(1000, HOSTS, devices=8)
    shapes = {tuple(c.mesh_shape.items()) for c in advice.candidates}
    assert shapes == {
        (("batch", 8),),
        (("replica", 2), ("batch", 4)),
        (("replica", 4), ("batch", 2)),
    }
    with_model = advise(1000, HOSTS, layout_map={".*/kernel": (None, "model")})
    assert {"replica": 2, "batch": 2, "model": 1} in [c.mesh_shape for c in with_model.candidates]
    without = advise(1000, Links.of(devices_per_host=4, inside=FAST))
    assert all("replica" not in c.mesh_shape for c in without.candidates)


def test_blocks_are_computed_again_only_where_nothing_else_fits():
    inputs = keras.Input((256, 16))
    x = inputs
    for i in range(4):
        x = keras.layers.Dense(16, name=f"block{i}_down")(keras.layers.Dense(512, "gelu", name=f"block{i}_up")(x))
    advice = tfshard.advise(keras.Model(inputs, x), 4, 1 << 40, 8, links=HOSTS)
    assert any(c.recompute for c in advice.candidates) and not advice.recommended.recompute
    assert all(c.collective_seconds > 0 for c in advice.candidates)


def test_a_plan_tells_what_its_collectives_take(tmp_path):
    file = tmp_path / "links.json"
    HOSTS.save(file)
    plan = tfshard.plan(kernels(), FLAT, links=file)
    assert plan.collective_seconds == pytest.approx(HOSTS.total_seconds(plan.collectives, FLAT))
    assert f"the collectives take {1e3 * plan.collective_seconds:,.1f} ms." in str(plan)
    assert tfshard.plan(kernels(), FLAT).collective_seconds is None


def test_what_is_saved_is_loaded(tmp_path):
    file = tmp_path / "links.json"
    for links in (HOSTS, Links.of(devices_per_host=4, inside=FAST)):
        links.save(file)
        assert Links.load(file) == links


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "Links cannot be read: No such file"),
        ("[]", "does not contain links"),
        ("{", "does not contain links"),
        (json.dumps({**HOSTS.to_dict(), "between": {"all-reduce": {}}}), "does not contain links"),
    ],
)
def test_files_that_hold_no_links_are_refused(tmp_path, text, message):
    file = tmp_path / "links.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        advise(1000, file)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advise(1000, 3), "links must be tfshard.planning.Links, or the path of a file"),
        (
            lambda: advise(1000, HOSTS, devices=3),
            "hosts of 2 devices, so the number of devices must be a multiple of 2.*Received: devices=3",
        ),
        (lambda: advise(1000, Links.of(devices_per_host=2, inside=FAST)), "no links between hosts"),
        (lambda: Links.of(devices_per_host=0, inside=FAST), "devices_per_host must be a positive integer"),
        (lambda: Link(latency=0.0, bandwidth=0.0), "positive bandwidth"),
    ],
)
def test_links_that_cannot_be_are_refused(call, message):
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        call()


def test_links_are_measured_for_each_kind_and_each_group_of_devices():
    profile = tfshard.profile_network(sizes=[1024, 65536], repeats=2, devices_per_host=2)
    links = profile.links
    assert (links.devices_per_host, links.device_type, links.has_hosts) == (2, "CPU", True)
    for group in (links.inside, links.between, links.across):
        assert sorted(group) == ["all-gather", "all-reduce", "all-to-all"]
    assert [m.devices for m in profile.in_steps if m.bytes == 65536] == [2, 2, 2, 2, 2, 2, 4, 4, 4]
    assert "Links of 2 x 2 CPU devices, in a step" in str(profile)
    assert profile.to_dict()["links"] == links.to_dict()
    with pytest.raises(
        tfshard.errors.CollectiveError, match="that divides the 4 devices. Received: devices_per_host=3"
    ):
        tfshard.profile_network(sizes=[1024], devices_per_host=3)


def test_small_messages_that_a_network_lets_pass_do_not_make_it_faster():
    """Like a shaped link: 64 KiB pass at once, and further bytes at its rate."""
    rows = [
        network_profile.Measurement(
            kind="all-to-all", bytes=2 * sent, seconds=1e-3 + max(0, sent - (1 << 16)) / 1e7, devices=2, over="between"
        )
        for sent in (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    ]
    found = network_profile._fitted(rows, at_once=1)
    assert found.bandwidth == pytest.approx(1e7, rel=0.02)
    assert 0 <= found.latency < 1e-3


def test_a_link_is_fitted_to_its_times():
    # All-reduces between hosts of two devices each: a host sends twice the bytes of a device.
    link = Link(latency=2e-4, bandwidth=1e8)
    rows = [
        network_profile.Measurement(
            kind="all-reduce", bytes=size, seconds=link.seconds(2 * size), devices=2, over="between"
        )
        for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    profile = network_profile.NetworkProfile(
        devices=4,
        device_type="CPU",
        num_clients=2,
        measurements=(),
        devices_per_host=2,
        in_steps=tuple(
            network_profile.Measurement(**{**vars(row), "kind": kind, "over": over})
            for over in ("inside", "between", "across")
            for kind in ("all-gather", "all-reduce", "all-to-all")
            for row in rows
        ),
    )
    found = profile.links
    np.testing.assert_allclose(
        [found.between["all-reduce"].latency, found.between["all-reduce"].bandwidth], [2e-4, 1e8], rtol=1e-6
    )
    # A gather sends half the bytes of a reduction of the same size.
    np.testing.assert_allclose(found.between["all-gather"].bandwidth, 1e8 / 2, rtol=1e-6)
    np.testing.assert_allclose(found.inside["all-reduce"].bandwidth, 1e8 / 2, rtol=1e-6)
