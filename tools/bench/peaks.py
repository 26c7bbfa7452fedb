"""Compare the peak of a step on one device that `strategy.plan` predicts with the allocator's trace.

    python tools/bench/peaks.py
    python tools/bench/peaks.py --advice=30

Each configuration runs in a separate process. *Measured* is the bytes of the variables on the fullest device, plus the
largest amount that a step requests from the allocator on one device (`PeakMemory.device_added`). *Given* is the amount
that the allocator gave out over all devices, divided by their number. The allocator rounds up, sometimes to twice as
much. With `--advice`, the benchmark checks that the recommendations of `advise` stay within the given memory.
"""

import json
import random

import common
from absl import app, flags

_ADVICE = flags.DEFINE_integer("advice", 0, "Measure this number of random configurations of `advise` instead.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds.", lower_bound=1)
_WAY = flags.DEFINE_string("way", None, "Measure this configuration (JSON) in this process, and print JSON.")

GPT = {"kind": "gpt", "layers": 4, "width": 256, "batch": 16}
MLP = {"kind": "mlp", "layers": 6, "width": 1024, "batch": 16}
MESHES = {"2x2": {"batch": 2, "model": 2}, "2": {"batch": 2}, "4": {"batch": 4}, "8": {"batch": 8}}
CONFIGURATIONS = (
    MLP | {"stage": 0, "mesh": "4"},
    MLP | {"stage": 1, "mesh": "4"},
    MLP | {"stage": 2, "mesh": "4"},
    MLP | {"stage": 3, "mesh": "2"},
    MLP | {"stage": 3, "mesh": "4"},
    MLP | {"stage": 3, "mesh": "8"},
    MLP | {"stage": 3, "mesh": "4", "layers": 24},
    MLP | {"stage": 3, "mesh": "4", "accumulation": 2},
    MLP | {"stage": 3, "mesh": "4", "bfloat16": True},
    GPT | {"stage": 0, "mesh": "4"},
    GPT | {"stage": 1, "mesh": "4"},
    GPT | {"stage": 2, "mesh": "4"},
    GPT | {"stage": 3, "mesh": "2"},
    GPT | {"stage": 3, "mesh": "4"},
    GPT | {"stage": 3, "mesh": "8"},
    GPT | {"stage": 3, "mesh": "4", "recompute": True},
    GPT | {"stage": 3, "mesh": "4", "recompute": True, "bfloat16": True},
    GPT | {"stage": 3, "mesh": "4", "bfloat16": True},
    GPT | {"stage": 3, "mesh": "4", "grouped": True},
    GPT | {"stage": 3, "mesh": "4", "accumulation": 2},
    GPT | {"stage": 3, "mesh": "2x2"},
    GPT | {"stage": 1, "mesh": "2x2"},
)


def build(way: dict):
    """Build a model without a strategy. Returns the model, its loss, and its batch."""
    import keras
    import numpy as np

    if way.get("bfloat16"):
        keras.config.set_dtype_policy("mixed_bfloat16")
    if way["kind"] == "mlp":
        hidden = [keras.layers.Dense(way["width"], activation="relu") for _ in range(way["layers"])]
        batch = np.zeros((way["batch"], way["width"]), np.float32)
        return keras.Sequential([keras.Input((way["width"],)), *hidden]), "mse", (batch, batch)
    model, batch = common.gpt2(
        layers=way["layers"], width=way["width"], heads=4, vocabulary=2000, sequence=128, samples=way["batch"]
    )
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), batch


def profiled(way: dict, model, loss, batch):
    """Compile a model under the strategy of a configuration. Returns the strategy and the profile of a step."""
    import keras

    import tfshard

    mesh = MESHES[way["mesh"]] if isinstance(way["mesh"], str) else way["mesh"]
    threshold = (1 << 20) if way.get("grouped") else (1 << 16)
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**mesh),
        zero_stage=way["stage"],
        layout_map="auto" if "model" in mesh else None,
        analyzer=tfshard.ParameterAnalyzer(group_threshold_bytes=threshold),
    )
    model = tfshard.as_distributed(model)
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=way.get("accumulation"))
    model.compile(optimizer, loss, jit_compile=False, strategy=strategy)
    if way.get("recompute"):
        strategy.recompute(model)
    model.train_on_batch(*batch)
    return strategy, tfshard.profile_step(model, batch)


def _devices(way: dict) -> int:
    return {"2": 2, "8": 8}.get(way["mesh"], 4) if isinstance(way["mesh"], str) else way["devices"]


def measure(way: dict) -> dict:
    import tfshard

    devices = _devices(way)
    tfshard.initialize(num_devices=devices, device_type="CPU")
    model, loss, batch = build(way)
    strategy, profile = profiled(way, model, loss, batch)
    planned = strategy.plan(model, inputs=batch[0])
    return {
        "predicted": planned.peak.peak_bytes,
        "measured": max(profile.variable_bytes.values()) + profile.peak.device_added,
        "given": (sum(profile.variable_bytes.values()) + profile.peak.added) / devices,
        "gathers": profile.count("all-gather"),
        "planned gathers": sum(each.count for each in planned.collectives if each.kind == "all-gather"),
        "origin": common.origin().rpartition(",")[0],
    }


def advised(way: dict) -> dict:
    """Take the advice for a memory size between the smallest and the largest candidate, and measure its peak."""
    import tfshard

    tfshard.initialize(num_devices=way["devices"], device_type="CPU")
    model, loss, batch = build(way)
    arguments = {"optimizer": "adam", "layout_map": "auto" if way["automatic"] else None, "inputs": batch[0]}
    arguments["analyzer"] = tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 16)
    model.compile(loss=loss)
    every = tfshard.advise(model, way["devices"], 1 << 40, way["batch"], **arguments).candidates
    peaks = [each.needed_bytes for each in every if each.problem is None]
    memory = int(min(peaks) + way["share"] * (max(peaks) - min(peaks)))
    chosen = tfshard.advise(model, way["devices"], memory, way["batch"], **arguments).recommended
    way = way | {"mesh": chosen.mesh_shape, "stage": chosen.zero_stage, "recompute": chosen.recompute}
    _, profile = profiled(way, model, loss, batch)
    return {
        "mesh": chosen.mesh_shape,
        "stage": chosen.zero_stage,
        "recompute": chosen.recompute,
        "memory": memory,
        "predicted": chosen.peak_bytes,
        "measured": max(profile.variable_bytes.values()) + profile.peak.device_added,
        "origin": common.origin().rpartition(",")[0],
    }


def main(argv):
    del argv
    if _WAY.value:
        way = json.loads(_WAY.value)
        print(json.dumps(advised(way) if "share" in way else measure(way)))
    elif _ADVICE.value:
        _advices()
    else:
        _peaks()


def _peaks() -> None:
    print(f"{'model':>8} {'stage':>5} {'mesh':>5} {'':>22} {'predicted, MiB':>14} {'measured':>16} "
          f"{'measured / predicted':>20} {'given / predicted':>18} {'gathers':>8} {'planned':>8}")  # fmt: skip
    for way in CONFIGURATIONS:
        runs = [common.run_child(f"--way={json.dumps(way)}") for _ in range(_ROUNDS.value)]
        first = runs[0]
        more = [name for name in ("recompute", "bfloat16", "grouped", "accumulation") if way.get(name)]
        measured = common.spread((run["measured"] / 2**20 for run in runs), ".1f")
        ratio = common.spread(run["measured"] / run["predicted"] for run in runs)
        given = common.spread(run["given"] / run["predicted"] for run in runs)
        print(
            f"{way['kind']} {way['layers']:>2} {way['stage']:>5} {way['mesh']:>5} {', '.join(more):>22} "
            f"{first['predicted'] / 2**20:>14.1f} {measured:>16} {ratio:>20} {given:>18} {first['gathers']:>8} "
            f"{first['planned gathers']:>8}",
            flush=True,
        )
    print(first["origin"])


def _advices() -> None:
    chance = random.Random(0)
    print(f"{'model':>7} {'devices':>8} {'recommended':>40} {'memory, MiB':>12} {'predicted':>10} {'measured':>9}")
    exceeded = 0
    for _ in range(_ADVICE.value):
        way = {
            "kind": chance.choice(["mlp", "gpt"]),
            "layers": chance.choice([2, 3, 4, 6]),
            "batch": 16 * chance.choice([1, 2]),
            "devices": chance.choice([2, 4, 8]),
            "automatic": chance.random() < 0.3,
            "share": chance.random() ** 2,
        }
        way["width"] = chance.choice([512, 1024]) if way["kind"] == "mlp" else chance.choice([128, 256])
        run = common.run_child(f"--way={json.dumps(way)}")
        mesh = " x ".join(f"{axis}={size}" for axis, size in run["mesh"].items())
        chosen = f"{mesh}, stage {run['stage']}" + (", recompute" if run["recompute"] else "")
        exceeded += run["measured"] > run["memory"]
        cells = (f"{run[key] / 2**20:.1f}" for key in ("memory", "predicted", "measured"))
        print(
            f"{way['kind']} {way['layers']}x{way['width']} {way['devices']:>4} {chosen:>40} "
            "{:>12} {:>10} {:>9}".format(*cells)
            + ("  EXCEEDED" if run["measured"] > run["memory"] else ""),
            flush=True,
        )
    print(f"{exceeded} of {_ADVICE.value} exceeded what they were given; {run['origin']}")


if __name__ == "__main__":
    app.run(main)
