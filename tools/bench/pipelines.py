"""Pipelines: how long ranks wait, predicted and measured, and what a step takes beside one of stage 3.

    python -m tools.bench.pipelines                       # the table of bubbles, and the step of two ranks
    python -m tools.bench.pipelines --seconds=0.05        # how long a forward task takes in the table

**Bubbles.** A machine of two cores cannot compute with four ranks at once. So tasks of the table compute nothing of
weight (a tiny model) and then sleep, a forward task as long as `--seconds`, a backward one three times, as a part that
is computed again would: what is measured is the runner and its schedules (threads, order, waiting, what tasks cost
besides), not kernels. The prediction is the plan's, with these times.

**A step.** The same GPT-2 by two ranks of one device, real tasks, beside stage 3 over a batch axis of two: medians of
steps taken in turn; and the bubble, predicted from the measured times of tasks and measured.
"""

import json
import statistics
import time

import keras
import numpy as np
from absl import app, flags

import tfshard
from tfshard.contrib.pipeline import runner
from tfshard.contrib.pipeline.models import pipeline_of

FLAGS = flags.FLAGS
flags.DEFINE_float("seconds", 0.05, "How long a forward task of the table of bubbles takes.")
flags.DEFINE_integer("steps", 7, "Steps that are timed.")
flags.DEFINE_bool("json", False, "Prints JSON.")

TABLE = [
    *((("1f1b", ranks, ranks, count)) for ranks in (2, 4) for count in (2, 4, 8, 16)),
    ("gpipe", 2, 2, 8),
    ("gpipe", 4, 4, 8),
    ("interleaved", 2, 4, 8),
    ("interleaved", 4, 8, 8),
]


def sleeping(seconds: float):
    """The runner's `run`, whose tasks take as long as they are to."""
    original = runner.Runner.run

    def run(self, schedule, tasks, do):
        def slow(task):
            began = time.perf_counter()
            do(task)
            length = seconds if task.is_forward else 3 * seconds
            time.sleep(max(0.0, length - (time.perf_counter() - began)))

        return original(self, schedule, tasks, slow)

    return run


def bubbles(seconds: float) -> list[dict]:
    x = np.ones((32, 4), "float32")
    original = runner.Runner.run
    rows = []
    for schedule, ranks, parts, count in TABLE:
        keras.backend.clear_session()
        layers = [keras.layers.Dense(4, name=f"dense_{number}") for number in range(parts)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        cuts = [f"dense_{number}" for number in range(1, parts)]
        model = tfshard.pipeline(model, cuts, microbatches=count, schedule=schedule)
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=ranks, batch=1)))
        for _ in range(2):
            model.train_on_batch(x, x)
        runner.Runner.run = sleeping(seconds)
        try:
            found = []
            for _ in range(FLAGS.steps):
                model.train_on_batch(x, x)
                found.append(tfshard.contrib.pipeline.measured(model).bubble)
        finally:
            runner.Runner.run = original
        times = {(forward, part): seconds * (1 if forward else 3) for forward in (True, False) for part in range(parts)}
        measured = tfshard.contrib.pipeline.measured(model)
        rows.append(
            {
                "schedule": schedule,
                "ranks": ranks,
                "parts": parts,
                "microbatches": count,
                "predicted": round(measured.schedule.bubble(times), 4),
                "measured": round(statistics.median(found), 4),
                "in flight, by schedule": list(measured.schedule.in_flight),
                "in flight": list(measured.in_flight),
            }
        )
    return rows


def gpt(width: int = 128, blocks: int = 6, length: int = 64):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=512, num_layers=blocks, num_heads=4, hidden_dim=width, intermediate_dim=4 * width,
        max_sequence_length=length, dropout=0.0,
    )  # fmt: skip
    tokens = np.random.RandomState(0).randint(0, 512, (32, length)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return keras_hub.models.GPT2CausalLM(backbone=backbone), inputs, tokens


def step() -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    models = {}
    for name in ("stage 3", "pipeline"):
        keras.utils.set_random_seed(0)
        model, inputs, tokens = gpt()
        if name == "pipeline":
            model = tfshard.pipeline(model, 2, microbatches=8)
            mesh = tfshard.create_mesh(pipeline=2, batch=1)
        else:
            tfshard.as_distributed(model)
            mesh = tfshard.create_mesh(batch=2)
        model.compile("adam", loss, weighted_metrics=[], strategy=tfshard.ShardedStrategy(mesh, zero_stage=3))
        models[name] = model
        for _ in range(2):
            model.train_on_batch(inputs, tokens)
    taken, waited = {name: [] for name in models}, []
    for _ in range(FLAGS.steps):
        for name, model in models.items():
            began = time.perf_counter()
            model.train_on_batch(inputs, tokens)
            taken[name].append(time.perf_counter() - began)
        measured = tfshard.contrib.pipeline.measured(models["pipeline"])
        waited.append((measured.schedule.bubble(measured.times), measured.bubble))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "seconds": {name: round(each, 4) for name, each in medians.items()},
        "pipeline / stage 3": round(medians["pipeline"] / medians["stage 3"], 3),
        "bubble, predicted from the times of tasks": round(statistics.median(each for each, _ in waited), 3),
        "bubble, measured": round(statistics.median(each for _, each in waited), 3),
        "cut": [len(part.layers) for part in pipeline_of(models["pipeline"]).cut.parts],
    }


def main(_):
    tfshard.initialize(num_devices=4, device_type="CPU")
    rows, one = bubbles(FLAGS.seconds), step()
    if FLAGS.json:
        print(json.dumps({"bubbles": rows, "step": one}, indent=1))
        return
    print("| schedule | ranks | parts | microbatches | predicted | measured | in flight (schedule) |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['schedule']} | {row['ranks']} | {row['parts']} | {row['microbatches']} | {row['predicted']:.3f} | "
            f"{row['measured']:.3f} | {row['in flight']} ({row['in flight, by schedule']}) |"
        )
    print(json.dumps(one, indent=1))


if __name__ == "__main__":
    app.run(main)
