"""What tools/report.sh writes of what was measured, and the models that it trains."""

import json

import keras
import numpy as np
import pytest

from tools.report import models, writing


def run(step, **more):
    return {"step": step, "first": 2.0, "steps": [step], "parameters": 7, "versions": "Keras 3", **more}


REPORT = {
    "machine": {"date": "2026-11-23", "python": "3.11.7", "machine": "x86_64, 2 cores, 24 GiB"},
    "quick": False,
    "time": {
        "gpt 5M": {
            "one device": [run(0.2), run(0.4), run(0.2)],
            "stage 3": [run(0.3), run(0.4, collectives=9, bytes=3 << 20), {"failed": "killed"}],
            "FSDP2": [{"failed": "no environment"}] * 3,
        }
    },
    "memory": {"gpt 5M": {"stage 3": {"rests": 5 << 20, "peak": 9 << 20}, "FSDP2": {"failed": "no environment"}}},
    "growth": {"depth": {"6": {"stage 3": {"rests": 5 << 20, "peak": 9 << 20}}, "12": {"stage 3": {"failed": "x"}}}},
}  # fmt: skip


def test_ratios_are_of_the_same_round_and_failures_are_told(tmp_path):
    writing.write(REPORT, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| stage 3 | 350 (300 to 400) | 1.25 (1.00 to 1.50) | 2.0 (2.0 to 2.0) | 9 | 3.0 |" in text
    assert "*FSDP2: no environment*" in text
    assert "| gpt 5M | 5 / 9 | - |" in text
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.md", "time.svg", "depth.svg"}
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT


def test_ratios_that_moved_are_named():
    now = {**REPORT, "time": {"gpt 5M": {"one device": [run(0.2)], "stage 3": [run(0.3)]}}}
    assert writing.moved(REPORT, now) == ["gpt 5M, stage 3: 1.25 then, 1.50 now"]
    assert writing.moved(REPORT, REPORT) == []


@pytest.mark.parametrize("kind", ["gpt", "bert", "lstm", "moe", "resnet", "efficientnet"])
def test_a_model_of_the_report_takes_its_batches(kind):
    model = models.tiny(next(each for each in models.MODELS.values() if each.kind == kind))
    x, y = models.data(model, 1)
    built = models.build(model)
    outputs = np.asarray(built(models.inputs_of(model, x[:2])))
    assert outputs.shape[0] == 2 and outputs.shape[1:-1] == y.shape[1:]
    assert np.isfinite(float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y[:2], outputs)))
