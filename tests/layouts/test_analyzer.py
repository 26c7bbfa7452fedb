"""Groups hold every variable exactly once, stay within the limits, and are deterministic."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfshard
from tfshard.layouts import groups, variable_layout
from tfshard.layouts.config import ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning import Link, Links

MEBI = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An input of `groups.group`."""

    specs: tuple[VariableSpec, ...]
    mesh: dict[str, int]
    stage: int
    analyzer: tfshard.ParameterAnalyzer

    def planned(self) -> tuple[VariableLayout, ...]:
        layout_map = tfshard.LayoutMap({})
        layout_map.add("columns_.*", (None, "model"), optional=True)
        layout_map.add("rows_.*", ("model",), optional=True)
        config = ShardingConfig(layout_map=layout_map, zero_stage=ZeroStage.from_number(self.stage))
        placement = ModelPlacement.of(self.specs, config, mesh_shape=self.mesh)
        return placement.check().variables

    def grouped(self) -> tuple[VariableLayout, ...]:
        return groups.group(self.analyzer, self.planned(), mesh_shape=self.mesh)


@st.composite
def cases(draw) -> Case:
    mesh = {"batch": draw(st.integers(1, 9)), "model": draw(st.integers(1, 3))}
    model = mesh["model"]
    shapes = {
        "whole": st.lists(st.integers(0, 40), max_size=3).map(tuple),
        "rows": st.integers(1, 60).map(lambda n: (n * model,)),
        "columns": st.tuples(st.integers(1, 20), st.integers(1, 20)).map(lambda s: (s[0], s[1] * model)),
    }
    kinds = draw(st.lists(st.sampled_from(sorted(shapes)), max_size=40))
    dtypes = st.sampled_from(["float32", "float32", "float16", "bfloat16", "int32"])
    specs = tuple(
        VariableSpec(path=f"{kind}_{i}", shape=draw(shapes[kind]), dtype=draw(dtypes), trainable=draw(st.booleans()))
        for i, kind in enumerate(kinds)
    )
    analyzer = tfshard.ParameterAnalyzer(
        group_threshold_bytes=draw(st.integers(0, 8000)),
        # Includes small limits that close a group.
        max_group_bytes=(largest := draw(st.integers(0, 2000) | st.integers(0, 20000))),
        min_group_bytes=draw(st.just(0) | st.integers(0, largest)),
    )
    return Case(specs=specs, mesh=mesh, stage=draw(st.integers(0, 3)), analyzer=analyzer)


ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(kw_only=True)
class ByHand:
    """A group that is filled by the rules of the README and docs/design.md, computed here from shapes."""

    devices: int
    shards: int
    itemsize: int
    indices: list[int] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    end: int = 0

    @property
    def columns(self) -> int:
        return math.ceil(self.end / self.devices)

    def with_(self, index: int, elements: int) -> "ByHand":
        """Return the group with one more variable.

        The variable starts at a multiple of 64 bytes, unless it is smaller than 64 bytes.
        """
        offset, align = self.end, 64 // self.itemsize
        if elements >= align:
            offset = math.ceil(offset / align) * align
        return dataclasses.replace(
            self, indices=[*self.indices, index], offsets=[*self.offsets, offset], end=offset + elements
        )

    def bytes(self, case: "Case") -> int:
        """Return the bytes of the members, over all model shards."""
        return sum(math.prod(case.specs[index].shape) for index in self.indices) * self.itemsize

    def fits(self, case: "Case") -> bool:
        return self.shards * self.devices * self.columns * self.itemsize <= case.analyzer.max_group_bytes


def by_hand(case: "Case") -> list[ByHand]:
    """Return the groups of variables, with their offsets: variables join in the order of the input while they fit."""
    alike: dict[tuple, list[ByHand]] = {}
    for index, spec in enumerate(case.specs):
        # Frozen variables would need a group of a mebibyte, which no case has.
        if spec.dtype not in ITEMSIZE or not spec.trainable:
            continue
        itemsize, sharded = ITEMSIZE[spec.dtype], spec.path.startswith(("rows", "columns"))
        if not 0 < math.prod(spec.shape) * itemsize < case.analyzer.group_threshold_bytes:
            continue
        shards = case.mesh["model"] if sharded else 1
        elements, key = math.prod(spec.shape) // shards, (spec.dtype, sharded)
        alone = ByHand(devices=case.mesh["batch"], shards=shards, itemsize=itemsize).with_(index, elements)
        if not alone.fits(case):
            continue
        groups = alike.setdefault(key, [])
        if groups and (longer := groups[-1].with_(index, elements)).fits(case):
            groups[-1] = longer
        else:
            groups.append(alone)
    least, found = case.analyzer.min_group_bytes, []
    for (_, sharded), groups in alike.items():
        joined: list[ByHand] = []
        for group in groups:
            if joined and (group.bytes(case) < least or joined[-1].bytes(case) < least):
                for index in group.indices:
                    elements = math.prod(case.specs[index].shape) // (case.mesh["model"] if sharded else 1)
                    joined[-1] = joined[-1].with_(index, elements)
            else:
                joined.append(group)
        found += [group for group in joined if len(group.indices) > 1 and group.bytes(case) >= least]
    return sorted(found, key=lambda group: group.indices[0])


def members(grouped) -> dict[int, list[VariableLayout]]:
    """Return the members of each group, in the order of the input."""
    found: dict[int, list[VariableLayout]] = {}
    for layout in grouped:
        if layout.group is not None:
            found.setdefault(layout.group, []).append(layout)
    return found


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_variable_is_in_exactly_one_place(case):
    planned, grouped = case.planned(), case.grouped()
    assert [layout.spec for layout in grouped] == list(case.specs)
    assert sorted(members(grouped)) == list(range(len(members(grouped))))
    for group in members(grouped).values():
        form = group[0].flat
        assert len(group) == len(form.members) >= 2
        # Each member of the buffer occurs once, in the order of the input.
        assert [layout.member for layout in group] == list(range(len(group)))
        for layout in group:
            assert layout.flat == form and layout.grouped and layout.sharded is None
            place = form.members[layout.member]
            assert (place.shape, place.compute) == (layout.spec.shape, layout.compute)
    for before, after in zip(planned, grouped, strict=True):
        assert after.group is not None or after == before


@given(cases())
@settings(max_examples=150, deadline=None)
def test_groups_and_the_places_in_them_are_those_worked_out_by_hand(case):
    expected = by_hand(case)
    grouped = case.grouped()
    assert [[i for i, v in enumerate(grouped) if v.group == n] for n in range(len(expected))] == [
        group.indices for group in expected
    ]
    assert {v.group for v in grouped} - {None} == set(range(len(expected)))
    for number, group in enumerate(expected):
        form = grouped[group.indices[0]].flat
        assert [place.offset for place in form.members] == group.offsets, number
        assert form.buffer_shape[-2:] == (group.devices, group.columns)
        assert math.prod(form.buffer_shape[:-2]) == group.shards


@given(cases())
@settings(max_examples=150, deadline=None)
def test_members_are_alike_and_of_a_floating_dtype(case):
    for group in members(case.grouped()).values():
        assert len({(v.spec.dtype, v.spec.trainable, frozenset(v.compute) - {None}) for v in group}) == 1
        assert group[0].spec.dtype in ("float32", "float16", "bfloat16")


@given(cases())
@settings(max_examples=50, deadline=None)
def test_a_buffer_gives_back_its_members(case):
    for group in members(case.grouped()).values():
        values = [np.random.default_rng(v.member).normal(size=v.spec.shape) for v in group]
        buffer = variable_layout.flatten_host_values(values, np.dtype(np.float64), group[0].flat)
        # Count the elements in the buffer: each occurs once, and zeros fill the gaps.
        assert np.count_nonzero(buffer) == sum(value.size for value in values)
        np.testing.assert_array_equal(
            np.sort(buffer[buffer != 0]), np.sort(np.concatenate([v.ravel() for v in values]))
        )
        for value, layout in zip(values, group, strict=True):
            place = layout.flat.members[layout.member]
            np.testing.assert_array_equal(variable_layout.unflatten_host_value(buffer, layout.flat, place), value)


def group(specs, *, stage=3, mesh=None, **sizes) -> tuple[VariableLayout, ...]:
    analyzer = tfshard.ParameterAnalyzer(**sizes)
    return Case(specs=tuple(specs), mesh=mesh or {"batch": 4, "model": 1}, stage=stage, analyzer=analyzer).grouped()


def numbers(grouped) -> list[int | None]:
    return [layout.group for layout in grouped]


def test_a_model_without_variables_has_no_groups():
    assert group([]) == ()


def test_one_huge_variable_stands_alone():
    (layout,) = group([VariableSpec(path="v", shape=(1 << 20, 1 << 20))])
    assert layout.group is None and layout.sharded == ("batch", None)


def test_a_small_variable_without_companion_stands_alone():
    specs = [VariableSpec(path="a", shape=(5,)), VariableSpec(path="b", shape=(5,), dtype="float16")]
    assert numbers(group(specs)) == [None, None]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_thousands_of_scalars_are_one_group_at_every_stage(stage):
    grouped = group([VariableSpec(path=f"s{i}", shape=()) for i in range(20_000)], stage=stage)
    assert set(numbers(grouped)) == {0}
    assert grouped[0].flat.buffer_shape == (4, 5_000)
    assert grouped[0].storage == (("batch" if stage == 3 else None), None)


def test_a_variable_of_just_the_threshold_is_not_grouped():
    specs = [VariableSpec(path=f"v{i}", shape=(100,)) for i in range(3)]
    assert numbers(group(specs, group_threshold_bytes=400)) == [None] * 3
    assert numbers(group(specs, group_threshold_bytes=401)) == [0] * 3


def test_a_group_closes_before_its_buffer_exceeds_the_maximum():
    specs = [VariableSpec(path=f"v{i}", shape=(96,)) for i in range(5)]
    # 96 elements keep the alignment of 16 elements, and divide by four rows.
    assert numbers(group(specs, max_group_bytes=2 * 384)) == [0, 0, 1, 1, None]
    assert numbers(group(specs, max_group_bytes=2 * 384 - 1)) == [None] * 5


def test_a_group_below_the_minimum_joins_the_group_before_it():
    specs = [VariableSpec(path=f"v{i}", shape=(96,)) for i in range(6)]
    sizes = {"max_group_bytes": 4 * 384}
    assert numbers(group(specs, **sizes)) == [0, 0, 0, 0, 1, 1]
    assert numbers(group(specs, **sizes, min_group_bytes=2 * 384)) == [0, 0, 0, 0, 1, 1]
    joined = group(specs, **sizes, min_group_bytes=2 * 384 + 1)
    assert numbers(joined) == [0] * 6
    assert [place.offset for place in joined[0].flat.members] == [96 * i for i in range(6)]


def test_a_last_variable_joins_a_group_that_the_maximum_has_closed():
    specs = [VariableSpec(path=f"v{i}", shape=(96,)) for i in range(5)]
    assert numbers(group(specs, max_group_bytes=4 * 384)) == [0, 0, 0, 0, None]
    assert numbers(group(specs, max_group_bytes=4 * 384, min_group_bytes=385)) == [0] * 5


def test_a_group_below_the_minimum_without_neighbour_is_not_made():
    """Variables of another dtype are no neighbours."""
    specs = [VariableSpec(path=f"v{i}", shape=(96,), dtype="float16" if i > 3 else "float32") for i in range(6)]
    assert numbers(group(specs)) == [0, 0, 0, 0, 1, 1]
    assert numbers(group(specs, min_group_bytes=2 * 192)) == [0, 0, 0, 0, 1, 1]
    assert numbers(group(specs, min_group_bytes=2 * 192 + 1)) == [0, 0, 0, 0, None, None]


def test_a_minimum_that_exceeds_the_maximum_is_refused():
    with pytest.raises(tfshard.errors.StrategyError, match="must not exceed.*min_group_bytes=2, max_group_bytes=1"):
        tfshard.ParameterAnalyzer(min_group_bytes=2, max_group_bytes=1)


def test_the_maximum_counts_every_model_shard():
    specs = [VariableSpec(path=f"rows_{i}", shape=(96,)) for i in range(4)]
    grouped = group(specs, mesh={"batch": 2, "model": 3}, max_group_bytes=2 * 384)
    assert numbers(grouped) == [0, 0, 1, 1]
    assert grouped[0].flat.buffer_shape == (3, 2, 32)


def test_members_of_64_bytes_and_more_begin_at_a_multiple_of_64():
    sizes = {"float32": (1, 14, 16, 1, 40), "bfloat16": (1, 30, 32, 1, 40)}
    offsets = {"float32": [0, 1, 16, 32, 48], "bfloat16": [0, 1, 32, 64, 96]}
    for dtype, elements in sizes.items():
        specs = [VariableSpec(path=f"v{i}", shape=(n,), dtype=dtype) for i, n in enumerate(elements)]
        (form,) = {layout.flat for layout in group(specs)}
        assert [place.offset for place in form.members] == offsets[dtype]


def test_groups_are_numbered_by_their_first_member():
    dtypes = ["float16", "float32", "float16", "float32"]
    specs = [VariableSpec(path=f"v{i}", shape=(5,), dtype=dtype) for i, dtype in enumerate(dtypes)]
    assert numbers(group(specs)) == [0, 1, 0, 1]


def untrained(count: int, **kwargs) -> list[VariableSpec]:
    return [VariableSpec(path=f"mean_{i}", shape=(1024,), trainable=False, **kwargs) for i in range(count)]


def test_untrained_variables_are_grouped_at_stage_3_from_one_mebibyte_on():
    trained = VariableSpec(path="kernel", shape=(1024, 1024))
    grouped = group([trained, *untrained(256)])
    assert set(numbers(grouped)[1:]) == {0}
    assert grouped[1].store_sharded and grouped[1].storage == ("batch", None)
    assert numbers(group([trained, *untrained(255)])) == [None] * 256
    assert numbers(group([trained, *untrained(256)], stage=2)) == [None] * 257
    assert numbers(group([trained, *untrained(512, dtype="int32")])) == [None] * 513


@pytest.mark.parametrize(
    "sizes",
    [{"group_threshold_bytes": -1}, {"max_group_bytes": 2.0}, {"group_threshold_bytes": True}, {"min_group_bytes": -1}],
)
def test_a_size_that_is_no_number_of_bytes_is_refused(sizes):
    with pytest.raises(tfshard.errors.StrategyError, match=r"must be a number of bytes.*Received: (group|max|min)_.*="):
        tfshard.ParameterAnalyzer(**sizes)


def test_presets_follow_the_rule_of_their_table_and_grow_with_the_speed_of_the_network():
    presets = tfshard.presets
    sizes = [
        (p.group_threshold_bytes, p.max_group_bytes)
        for p in (presets.INFINIBAND, presets.TEN_GBE, presets.ONE_GBE, presets.SLOW)
    ]
    assert sizes == [(4 * MEBI, 32 * MEBI), (MEBI // 2, 16 * MEBI), (MEBI // 4, 8 * MEBI), (MEBI // 2, 4 * MEBI)]
    largest = [maximum for _, maximum in sizes]
    assert largest == sorted(largest, reverse=True)
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) (\wiB) \| (\d+) MiB \|$", presets.__doc__, re.MULTILINE)
    told = [(int(size) << {"KiB": 10, "MiB": 20}[unit], int(most) * MEBI) for _, size, unit, most in rows]
    assert [name for name, *_ in rows] == ["INFINIBAND", "TEN_GBE", "ONE_GBE", "SLOW"] and told == sizes
    with pytest.raises(tfshard.errors.StrategyError, match="must be positive.*Received: latency=0"):
        presets.for_network(latency=0, bandwidth=1e9)
    with pytest.raises(tfshard.errors.StrategyError, match="must be positive numbers.*Received: latency='1ms'"):
        presets.for_network(latency="1ms", bandwidth=1e9)


def test_an_analyzer_is_made_from_the_file_of_a_measured_network(tmp_path):
    fast, slow = Link(latency=1e-5, bandwidth=1e10), Link(latency=250e-6, bandwidth=125e6)
    measured = Links.of(devices_per_host=2, inside=fast, between=slow)
    measured.save(tmp_path / "network.json")
    found = tfshard.ParameterAnalyzer.for_network(tmp_path / "network.json")
    assert found == tfshard.ParameterAnalyzer.for_network(measured) == tfshard.presets.ONE_GBE
    # Of one host, the link inside.
    alone = tfshard.ParameterAnalyzer.for_network(Links.of(devices_per_host=2, inside=fast))
    assert alone == tfshard.presets.for_network(latency=1e-5, bandwidth=1e10)
    assert alone.max_group_bytes > found.max_group_bytes


def test_a_network_that_is_none_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"loss": 1}')
    (tmp_path / "text.json").write_text("loss")
    for network in (tmp_path / "other.json", 3, None, {"across": {}}):
        with pytest.raises(tfshard.errors.StrategyError, match="network must be .*--save=FILE.*Received: network="):
            tfshard.ParameterAnalyzer.for_network(network)
    for name in ("text.json", "missing.json"):
        with pytest.raises(tfshard.errors.StrategyError, match="network cannot be read.*--save=FILE.*Received: "):
            tfshard.ParameterAnalyzer.for_network(tmp_path / name)
