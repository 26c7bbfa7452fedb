"""The texts that tools/report.sh writes from measurements, and the models that it trains."""

import json
import os
import pathlib
import re
import sys

import keras
import numpy as np
import pytest

from tools.report import __main__ as report
from tools.report import models, serving, writing


def run(step, *ratios, **more):
    said = {"first": 2.0, "steps": [step], "parameters": 7, "versions": "Keras 3", "date": "2026-11-23"}
    return {"step": step, "ratios": list(ratios), **said, **more}


FAILED = {"failed": "no environment", "date": "2026-11-24"}
HELD = {"rests": 5 << 20, "peak": 9 << 20, "date": "2026-11-23"}
REPORT = {
    "machine": {"python": "3.11.7", "machine": "x86_64, 2 cores, 24 GiB"},
    "quick": False,
    "time": {
        "gpt 5M": {
            "one device": [run(0.2, 1.0)],
            "stage 3": [run(0.3, 1.5, 1.25, collectives=9, bytes=3 << 20), run(0.4, 1.0), FAILED],
            "FSDP2": [FAILED],
            "tensor": [],
        }
    },
    "memory": {"gpt 5M": {"stage 3": HELD, "FSDP2": FAILED}},
    "growth": {"depth": {"6": {"stage 3": HELD}, "12": {"stage 3": FAILED}}},
}  # fmt: skip


def test_ratios_are_of_epochs_side_by_side_and_failures_are_told(tmp_path):
    writing.write(REPORT, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| stage 3 | 350 (300 to 400) | 1.25 (1.00 to 1.50) | 2.0 (2.0 to 2.0) | 9 | 3.0 |" in text
    assert "*FSDP2: no environment*" in text and "tensor |" not in text
    assert "| gpt 5M | 5 / 9 | - |" in text
    assert "2026-11-23 to 2026-11-24" in text
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.md", "time.svg", "depth.svg"}
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT


def test_ratios_that_moved_are_named():
    now = {**REPORT, "time": {"gpt 5M": {"one device": [run(0.2, 1.05)], "stage 3": [run(0.3, 1.5)]}}}
    assert writing.moved(REPORT, now) == ["gpt 5M, stage 3: 1.25 then, 1.50 now"]
    assert writing.moved(REPORT, REPORT) == []
    text = writing.repeated(REPORT, now)
    assert "of 2026-11-23 to 2026-11-24 and of 2026-11-23. 2 ratios are in both; 1 of them are within 15%" in text
    assert text.index("| gpt 5M | stage 3 | 1.25 | 1.50 | 1.20 |") < text.index("| one device | 1.00 | 1.05 | 1.05 |")


SERVING = """
import itertools
from tools.report import serving
count = itertools.count(1)
def first():
    print("what a library says")
    return {"first": 0.5}
def fail():
    raise ValueError("cannot")
serving.serve({"first": first, "epoch": lambda: {"steps": [float(next(count))]}, "fail": fail})
"""


def serving_process():
    return serving.Process([sys.executable, "-c", SERVING], os.environ)


def test_a_process_answers_what_it_is_asked_and_its_failure_is_told():
    with serving_process() as process:
        assert process.ask("first") == {"first": 0.5}
        assert [process.ask("epoch") for _ in range(2)] == [{"steps": [1.0]}, {"steps": [2.0]}]
        with pytest.raises(serving.FailedError, match="ValueError: cannot"):
            process.ask("fail")
        with pytest.raises(serving.FailedError, match="ValueError: cannot"):
            process.ask("first")


def test_epochs_of_two_processes_are_compared_in_turn():
    with serving_process() as training, serving_process() as base:
        base.ask("epoch")
        found = report.compared(training, base)
    # 1, 2, 3 compared with 2, 3, 4.
    assert found == {"first": 0.5, "step": 2.0, "steps": [1.0, 2.0, 3.0], "ratios": [1 / 2, 2 / 3, 3 / 4]}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["gpt", "bert", "lstm", "moe", "resnet", "efficientnet"])
def test_a_model_of_the_report_takes_its_batches(kind):
    model = models.tiny(next(each for each in models.MODELS.values() if each.kind == kind))
    x, y = models.data(model, 1)
    built = models.build(model)
    outputs = np.asarray(built(models.inputs_of(model, x[:2])))
    assert outputs.shape[0] == 2 and outputs.shape[1:-1] == y.shape[1:]
    assert np.isfinite(float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y[:2], outputs)))


def test_the_readme_has_the_ratios_of_the_report():
    root = pathlib.Path(__file__).parent.parent
    ratios = writing.all_ratios(json.loads((root / "docs/benchmarks/report.json").read_text()))
    rows = [line for line in (root / "README.md").read_text().splitlines() if "`tools/report.sh`" in line]
    said = [re.findall(r"\b\d+\.\d\d\b", row.split("|")[-2]) for row in rows]
    wide = ("stage 0", "stage 1", "stage 2", "stage 3", "mirrored", "FSDP2")
    narrow = ("stage 3", "stage 3 alone", "mirrored", "FSDP2")
    assert said == [
        [f"{ratios['gpt 5M', way]:.2f}" for way in wide],
        [f"{ratios['gpt narrow', way]:.2f}" for way in narrow],
        [f"{ratios['gpt 5M', 'tensor'] / ratios['gpt 5M', 'JAX, tensor']:.2f}"],
    ]
