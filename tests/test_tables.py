"""Plans and reports as text: totals first, similar variables in one row, no overlong line."""

import math
import re

import keras
import keras_hub
import numpy as np
import pytest

import tfshard
from tfshard import cli, tables
from tfshard.layouts.layout_map import VariableSpec


def rows(*names: str, **kwargs) -> list[tables.Row]:
    return [tables.Row(name=name, bytes_whole=8, bytes_per_device=2, **kwargs) for name in names]


def folded(*names: str) -> list[tuple[str, int]]:
    return [(row.name, row.count) for row in tables.fold(rows(*names))]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"transformer_layer_{i}/kernel" for i in range(32)], [("transformer_layer_{0..31}/kernel", 32)]),
        ([f"block_{i}/dense_{j}" for i in range(3) for j in (1, 2)], [("block_{0..2}/dense_{1,2}", 6)]),
        (["dense/kernel", "dense_1/kernel"], [("dense{,_1}/kernel", 2)]),
        (["dense", "dense_1", "dense_2", "dense_3"], [("dense{,_1..3}", 4)]),
        (["conv2d/kernel", "conv2d_1/kernel"], [("conv2d{,_1}/kernel", 2)]),
        ([f"layer_{i:02}/up" for i in range(12)], [("layer_{00..11}/up", 12)]),
        ([f"block{i}_up" for i in (0, 1, 2, 5, 7, 8)], [("block{0..2,5,7,8}_up", 6)]),
        (["up", "up_1", "up_2", "up_7"], [("up{,_1,_2,_7}", 4)]),
        (["up3", "up_4", "up"], [("up3", 1), ("up{,_4}", 2)]),
        # Incomplete combinations are not folded.
        (["a_0/b_0", "a_1/b_1"], [("a_0/b_0", 1), ("a_1/b_1", 1)]),
        (["a_0/b_0", "a_0/b_1", "a_1/b_0"], [("a_{0,1}/b_0", 2), ("a_0/b_1", 1)]),
        (["dense/kernel", "dense/bias", "up/kernel"], [("dense/kernel", 1), ("dense/bias", 1), ("up/kernel", 1)]),
        # Two variables of one path.
        (["gain", "gain"], [("gain", 2)]),
        ([], []),
    ],
)
def test_names_that_differ_in_numbers_share_a_row(names, expected):
    assert folded(*names) == expected


def test_a_row_is_where_its_first_name_was_and_has_the_sums():
    first, second, third = tables.fold(rows("in", "b_0/x", "b_0/y", "b_1/x", "b_1/y")[:])
    assert [first.name, second.name, third.name] == ["in", "b_{0,1}/x", "b_{0,1}/y"]
    assert (second.count, second.bytes_whole, second.bytes_per_device) == (2, 16, 4)
    untold = [*rows("b_0"), tables.Row(name="b_1", bytes_whole=8, bytes_per_device=None)]
    assert tables.fold(untold)[0].bytes_per_device is None


@pytest.mark.parametrize("other", [{"cells": ("(3,)",)}, {"kind": "state"}])
def test_what_differs_in_shape_layout_or_kind_stays_apart(other):
    found = tables.fold([*rows("b_0", "b_1", "b_2", cells=("(2,)",), kind="parameter"),
                         *rows("b_3", **{"cells": ("(2,)",), "kind": "parameter"} | other)])  # fmt: skip
    assert [row.name for row in found] == ["b_{0..2}", "b_3"]


def test_layers_of_other_shapes_or_layouts_are_not_folded_in_a_plan():
    sizes = (512, 512, 768, 512, 512)
    specs = [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, n)) for i, n in enumerate(sizes)]
    layout_map = {"dense_[034]/kernel": (None, "model"), "dense_[12]/kernel": ("model", None)}
    text = str(tfshard.plan(specs, {"batch": 2, "model": 2}, layout_map))
    names = [line.split()[0] for line in text.splitlines() if "dense" in line]
    assert names == ["dense_{0,3,4}/kernel", "dense_1/kernel", "dense_2/kernel"]


def gpt2() -> keras.Model:
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=50257, num_layers=12, num_heads=12, hidden_dim=768, intermediate_dim=3072,
        max_sequence_length=1024,
    )  # fmt: skip


@pytest.mark.slow
def test_a_plan_of_a_gpt2_is_short_and_narrow_and_whole_with_detail():
    plan = tfshard.plan(tfshard.abstract_model(gpt2), {"batch": 4, "model": 4}, "auto", optimizer="adam")
    text, detail = str(plan), plan.text(detail=True)
    assert text == plan.text() and len(text.splitlines()) < 60
    for each in (text, detail):
        assert max(map(len, each.splitlines())) <= 120
        assert each.index("total all") < each.index("token_embedding")
    lines = [line.split() for line in text.splitlines()]
    # 12 x 768 x 3072 x 4 bytes.
    (row,) = [line for line in lines if "(768," in line and "3072)" in line]
    assert row[-4:] == ["108.0", "MiB", "6.8", "MiB"] and "12" in row
    # Count and shape of a row.
    assert len(re.findall(r" 1  +\(", detail)) == len(plan.variables) + len(plan.slots) > 600
    assert detail.count("all-gather") == sum(each.kind == "all-gather" for each in plan.collectives)
    # The bytes of activations are unknown without a batch.
    assert any(line[-2:] == ["24", "?"] for line in lines if line)


def mlp() -> keras.Model:
    layers = [keras.layers.Dense(8, name=f"block_{i}") for i in range(6)]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, name="head")], name="mlp")


@pytest.fixture(scope="module")
def report():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.as_distributed(mlp())
    model.compile("adam", "mse", strategy=strategy)
    model.train_on_batch(np.ones((8, 8)), np.ones((8, 3)))
    return strategy.report(model)


def test_a_report_folds_like_a_plan_and_lists_slots_with_detail(report):
    text, detail = str(report), report.text(detail=True)
    assert text.index("total optimizer slots") < text.index("mlp/block_{0..5}/kernel")
    assert "momentum" not in text
    (row,) = [line.split() for line in text.splitlines() if "block_{0..5}/kernel" in line]
    held = sum(
        v.bytes_per_device for v in report.variables if v.path.startswith("mlp/block") and v.path.endswith("kernel")
    )
    assert row[1] == "6" and row[-4:] == ["1.5", "KiB", *tables.size(held).split()]
    assert all(variable.path in detail for variable in report.variables)
    assert len(report.variables) > 40, "premise: slots are there"


def test_the_one_table_that_a_report_had_still_works_with_a_warning(report):
    with pytest.warns(DeprecationWarning, match=r"Report.table\(\) is now Report.tables\(\)"):
        table = report.table()
    assert tables.as_text(table) in report.text(detail=True)


def test_a_summary_has_a_row_for_each_block(report):
    lines = [line.split() for line in report.summary().splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:2] == ["block", "count"])
    found = {line[0]: (int(line[1]), line[2:4]) for line in lines[start + 1 :] if len(line) == 6}
    assert found == {**{f"block_{i}": (2, ["288", "B"]) for i in range(6)}, "head": (2, ["108", "B"])}
    assert report.summary().startswith("4 devices (batch=4), ZeRO stage 3\n")
    said = report.summary().splitlines()[-1]
    assert said.startswith("All variables are small and share groups: a step all-reduces the gradient of a group"), said


def trained(model, x, **options):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)
    model.compile("adam", "mse", strategy=strategy)
    before = strategy.report(model)
    model.train_on_batch(x, np.ones((8, 128)))
    return strategy.report(model), before


@pytest.mark.parametrize("analyzer", [{}, {"analyzer": None}])
def test_a_report_says_what_compression_reduces_and_what_it_keeps(analyzer):
    layers = [keras.layers.Dense(128, name=f"dense_{i}") for i in range(2)]
    model = tfshard.Sequential([keras.Input((128,)), *layers], name="mlp")
    report, before = trained(model, np.ones((8, 128)), compression="int8", **analyzer)
    said = report.text().replace("\n", " ")
    assert "compression='int8' reduces the gradients of 2 variables. " in said
    assert ("All other variables are small and share groups" in said) == (not analyzer)
    reduced = {row.path for row in report.variables if row.kind == "parameter" and row.reduced_by}
    assert reduced == {"mlp/dense_0/kernel", "mlp/dense_1/kernel"}
    state = sum(row.bytes_per_device for row in report.variables if row.kind == "slot" and row.reduced_by)
    assert re.search(rf"reduction state \(in the slots\) +0 B +{re.escape(tables.size(state))}", report.text())
    assert 0 < state < report.bytes_per_device("slot")
    assert "Other gradients are measured in the first training step" in before.text()


def test_a_report_says_what_tables_reduce():
    layers = [keras.layers.Embedding(16, 8, name="words"), keras.layers.Flatten(), keras.layers.Dense(128)]
    model = tfshard.Sequential([keras.Input((4,), dtype="int32"), *layers], name="reader")
    report, _ = trained(model, np.ones((8, 4), "int32"), tables="reader/words/embeddings")
    said = report.text().replace("\n", " ")
    assert "tables= reduces the gradients of 1 variable. All other variables are small and share groups" in said
    assert "reduction state" not in said


@pytest.mark.parametrize("bytes_", [0, 1, 1023, 1024, 1 << 20, (1 << 30) - 1, 1 << 30, 1 << 60])
def test_a_size_is_right_to_a_twentieth(bytes_):
    number, unit = tables.size(bytes_).split()
    scale = 1 << 10 * ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert math.isclose(float(number.replace(",", "")) * scale, bytes_, rel_tol=0.05)


def test_the_command_prints_the_same_and_everything_with_detail(capsys):
    plan = tfshard.plan(mlp(), {"batch": 4}, optimizer="adam")
    for flags, expected in (([], plan.text()), (["--detail"], plan.text(detail=True))):
        assert cli._run(["plan", "test_tables:mlp", "--mesh=batch:4", "--optimizer=adam", *flags]) == 0
        assert capsys.readouterr().out.strip() == expected.strip()
    assert plan.text() != plan.text(detail=True)
