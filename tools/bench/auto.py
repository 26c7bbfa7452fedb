"""Compare the choices of `strategy="auto"` with every mesh and stage that fits, on ten models and three memory sizes.

    python -m tools.bench.auto --models=gpt,bert --results=/tmp/auto.jsonl    # adds lines to the file
    python -m tools.bench.auto --results=/tmp/auto.jsonl --write              # writes benchmarks/auto.md

The three memory sizes of a device follow from what `advise` says a model needs: *ample*, 1 GiB; *tight*, what stage 3
needs on the batch axis, so that lower stages do not fit there; *very tight*, less than any mesh and stage needs, so
that only recomputation and microbatches help, or, if they do not help, what the smallest configuration needs.

The hand-chosen configurations are all meshes of four devices with axes batch and model at stages 0 to 3. In very tight
memory they are the predicted fastest of each mesh, with recomputation and with microbatches. Models are trained by
`train_on_batch`, one after the other in rounds, in one process. A time is the median over rounds. The memory of a
device is what it stores and what a profiled step adds on the fullest device; allocations below 256 KiB are not in the
trace.
"""

import gc
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tools.bench import common

_RESULTS = flags.DEFINE_string("results", None, "The file with a line of JSON for each model.", required=True)
_MODELS = flags.DEFINE_list("models", [], "Measure these models.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds of timed steps.", lower_bound=1)
_BESIDE = flags.DEFINE_string("beside", "nothing", "What ran beside the measurement, for the page.")
_WRITE = flags.DEFINE_bool("write", False, "Write the table from the results.")

TABLE = pathlib.Path(__file__).parents[2] / "benchmarks" / "auto.md"
# The first step compiles, and the second may still be slower.
_WARM_STEPS = 2
_PROFILES = 1
_WIDE = 1 << 30


def _transformer(kind: str):
    import keras
    import keras_hub
    import numpy as np

    vocabulary, width, length, samples = 1000, 128, 64, 16
    sizes = {
        "vocabulary_size": vocabulary,
        "num_layers": 2,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
    }
    tokens = np.random.RandomState(0).randint(1, vocabulary, (samples, length))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    if kind == "gpt":
        backbone = keras_hub.models.GPT2Backbone(**sizes, num_heads=4, max_sequence_length=length, dropout=0.0)
        outputs = backbone.output
    elif kind == "bert":
        backbone = keras_hub.models.BertBackbone(
            **sizes, num_heads=4, max_sequence_length=length, dropout=0.0, num_segments=2
        )
        outputs, inputs["segment_ids"] = backbone.output["sequence_output"], np.zeros_like(tokens)
    else:
        backbone = keras_hub.models.LlamaBackbone(**sizes, num_query_heads=4, num_key_value_heads=2)
        outputs = backbone.output
    return keras.Model(backbone.input, backbone.token_embedding(outputs, reverse=True)), inputs, tokens


def _vit():
    import keras
    import keras_hub
    import numpy as np

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(32, 32, 3), patch_size=4, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=512, dropout_rate=0.0
    )
    model = keras.Model(backbone.input, keras.layers.Dense(10, name="head")(backbone.output[:, 0]))
    return model, *_images(np, 16, 32)


def _images(np, samples: int, size: int):
    rs = np.random.RandomState(0)
    return rs.randn(samples, size, size, 3).astype("float32"), rs.randint(0, 10, samples)


def _cnn():
    import keras
    import numpy as np

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same")(inputs)
    for stage, width in enumerate((32, 64)):
        for block in range(2):
            name = f"conv{stage}_block{block}"
            y = keras.layers.Conv2D(width, 3, strides=1 + (block == 0 < stage), padding="same", name=f"{name}_1_conv")(
                x
            )
            y = keras.layers.BatchNormalization(name=f"{name}_1_bn")(y)
            y = keras.layers.ReLU(name=f"{name}_1_relu")(y)
            y = keras.layers.Conv2D(width, 3, padding="same", name=f"{name}_2_conv")(y)
            x = y if x.shape != y.shape else keras.layers.Add(name=f"{name}_add")([x, y])
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), *_images(np, 16, 32)


def _separable():
    import keras
    import numpy as np

    layers: list[Any] = [keras.layers.Conv2D(32, 3, strides=2, padding="same")]
    for number, width in enumerate((64, 128, 128, 256)):
        layers += [
            keras.layers.DepthwiseConv2D(3, strides=1 + number % 2, padding="same", name=f"block{number}_depthwise"),
            keras.layers.Conv2D(width, 1, activation="relu", name=f"block{number}_pointwise"),
            keras.layers.LayerNormalization(name=f"block{number}_norm"),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64, 64, 3)), *layers]), *_images(np, 16, 64)


def _mlp():
    import keras
    import numpy as np

    rs = np.random.RandomState(0)
    hidden = [keras.layers.Dense(768, activation="relu", name=f"block{number}_dense") for number in range(6)]
    model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10)])
    return model, rs.randn(256, 256).astype("float32"), rs.randint(0, 10, 256)


def _autoencoder():
    import keras
    import numpy as np

    x = np.random.RandomState(0).rand(512, 784).astype("float32")
    widths = (512, 128, 32, 128, 512)
    hidden = [keras.layers.Dense(width, activation="gelu", name=f"block{n}_dense") for n, width in enumerate(widths)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(784)]), x, x


def _embedding():
    import keras
    import numpy as np

    rs = np.random.RandomState(0)
    inputs = keras.Input((20,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20000, 64, name="table")(inputs))
    x = keras.layers.Dense(128, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    return model, rs.randint(0, 20000, (128, 20)).astype("int32"), rs.randint(0, 10, 128)


def _lstm():
    import keras
    import numpy as np

    rs = np.random.RandomState(0)
    layers = [keras.layers.LSTM(128, return_sequences=True, name="first"), keras.layers.LSTM(128, name="second")]
    model = keras.Sequential([keras.Input((24, 32)), *layers, keras.layers.Dense(10)])
    return model, rs.randn(64, 24, 32).astype("float32"), rs.randint(0, 10, 64)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: _transformer("gpt"),
    "bert": lambda: _transformer("bert"),
    "llama": lambda: _transformer("llama"),
    "vit": _vit,
    "cnn": _cnn,
    "separable": _separable,
    "mlp": _mlp,
    "autoencoder": _autoencoder,
    "embedding": _embedding,
    "lstm": _lstm,
}


class Trained:
    """A model that trains in one configuration."""

    def __init__(self, name: str, strategy: Any, *, recompute: bool = False):
        import keras

        keras.utils.set_random_seed(0)
        self.model, x, y = MODELS[name]()
        self.batch = x, y
        loss = "mse" if name == "autoencoder" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile("adam", loss, strategy=strategy)
        if recompute:
            strategy.recompute(self.model)
        for _ in range(_WARM_STEPS):
            self.model.train_on_batch(*self.batch)
        self.seconds: list[float] = []

    def step(self) -> None:
        begin = time.perf_counter()
        self.model.train_on_batch(*self.batch)
        self.seconds.append(time.perf_counter() - begin)

    def device_bytes(self) -> int | None:
        """Return the measured bytes of the fullest device at the peak of a step: the least of some profiled steps."""
        import tfshard

        peaks = [tfshard.profile_step(self.model, self.batch).peak for _ in range(_PROFILES)]
        stored = self.model.distribute_strategy.report(self.model).bytes_per_device()
        added = sorted(each.device_added for each in peaks if each is not None)
        return stored + added[len(added) // 2] if added else None


def measure(name: str) -> dict:
    """Measure a model in this process."""
    import keras

    import tfshard
    from tfshard.planning import known_machines
    from tfshard.training import automatic

    common.start()
    model, x, y = MODELS[name]()
    del y
    rows = len(keras.tree.flatten(x)[0])

    def advised(memory: int):
        return tfshard.advise(
            model, common.DEVICES, memory, rows, optimizer="adam", layout_map="auto", inputs=x,
            machine=known_machines.here(), pipelines=False,
        )  # fmt: skip

    def key(candidate) -> str:
        text = automatic.code_of(candidate)
        return f"{text} recompute" if candidate.recompute else text

    wide = advised(_WIDE)
    plain = [each for each in wide.candidates if each.problem is None and not each.recompute]
    limits = {"ample": _WIDE}
    stage_3 = [each for each in plain if each.mesh_shape["batch"] == common.DEVICES and each.zero_stage == 3]
    limits["tight"] = int(1.01 * stage_3[0].needed_bytes)
    least = int(0.97 * min(each.needed_bytes for each in plain))
    narrow = advised(least)
    if narrow.recommended is None:
        least = int(1.01 * min(each.needed_bytes for each in narrow.candidates if each.problem is None))
        narrow = advised(least)
    limits["very tight"] = least
    trained: dict[str, Trained] = {}
    chosen, needed = {}, {}
    for size, limit in limits.items():
        tfshard.initialize(memory_per_device=limit)
        auto = Trained(name, "auto")
        found = automatic.state_of(auto.model).chosen
        chosen[size] = key(found)
        needed[size] = found.needed_bytes
        trained.setdefault(key(found), auto)
    by_hand = {key(each): each for each in plain if each.mesh_shape["batch"] > 1 or each.zero_stage == 0}
    fitting = [
        each for each in narrow.candidates if each.fits and (each.mesh_shape["batch"] > 1 or not each.zero_stage)
    ]
    kinds = set()
    for each in sorted(fitting, key=lambda each: each.step_seconds):
        kind = each.recompute, each.microbatches > 1, tuple(each.mesh_shape.items())
        if kind not in kinds:
            kinds.add(kind)
            by_hand[key(each)] = each
    for label, each in by_hand.items():
        if label not in trained:
            trained[label] = Trained(name, automatic.strategy_of(each), recompute=each.recompute)
    runs = list(trained.values())
    gc.collect()
    gc.freeze()
    for number in range(_ROUNDS.value):
        for place in range(len(runs)):
            runs[(place + number) % len(runs)].step()
    times = {label: statistics.median(each.seconds) for label, each in trained.items()}
    memory = {label: trained[label].device_bytes() for label in dict.fromkeys(chosen.values())}
    found = {key(each): each for each in (*wide.candidates, *narrow.candidates) if each.problem is None}
    rows_of = []
    for size, limit in limits.items():
        fits = {label: times[label] for label, each in by_hand.items() if each.needed_bytes <= limit}
        best = min(fits, key=lambda label: fits[label])
        rows_of.append(
            {
                "memory": size, "limit": limit, "chosen": chosen[size], "needed": needed[size],
                "measured": memory[chosen[size]], "seconds": times[chosen[size]], "best": best,
                "best_seconds": fits[best], "worst_seconds": max(fits.values()), "fitting": len(fits),
            }
        )  # fmt: skip
    candidates = {
        label: {"seconds": times[label], "predicted": found[label].step_seconds, "needed": found[label].needed_bytes}
        for label in times
    }
    return {
        "model": name,
        "parameters": runs[0].model.count_params(),
        "rows": rows_of,
        "candidates": candidates,
        "origin": common.origin(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict[str, dict]) -> str:
    """Return the page with the results."""
    from tfshard import tables

    def short(label: str) -> str:
        text = label.removeprefix("tfshard.ShardedStrategy(tfshard.create_mesh(").replace('layout_map="auto", ', "")
        axes, _, rest = text.partition("), ")
        recompute = ", recompute" if rest.endswith(" recompute") else ""
        stage, _, more = rest.removesuffix(" recompute").removesuffix(")").removeprefix("zero_stage=").partition(", ")
        return f"{axes.replace(', ', ' x ')}, stage {stage}{', ' if more else ''}{more}{recompute}"

    some = next(iter(results.values()))
    dates = sorted({each["date"] for each in results.values()})
    rows = [(name, result, row) for name, result in results.items() for row in result["rows"]]
    ratios = [row["seconds"] / row["best_seconds"] for _, _, row in rows]
    within = sum(ratio <= 1.1 for ratio in ratios)
    inside = sum(row["measured"] is not None and row["measured"] <= row["limit"] for _, _, row in rows)
    lines = [
        '# The choices of `strategy="auto"`',
        "",
        f"`python -m tools.bench.auto --models=... --results=FILE`, then `--write` ({' and '.join(dates)},",
        f"{some['origin']} on two cores, beside {_BESIDE.value}). Each model trains by Adam, for three",
        "memory sizes of a device. Tight memory is what stage 3 needs on the batch axis. Very tight memory is less",
        "than any mesh and stage needs, so that recomputation or microbatches are necessary; if they do not help a",
        "model, it is what its smallest configuration needs. The best configuration is the fastest of all meshes and",
        "stages that fit by `advise`; in very tight memory, the fastest of those with recomputation or microbatches",
        "that `advise` predicts as fast, one of each mesh and kind. All configurations take steps in turn in one",
        "process, and times are medians. The measured memory is what a device stores and what a profiled step adds,",
        "without allocations below 256 KiB.",
        "",
        f"**{within} of {len(rows)} choices take at most 1.10 of the time of the best configuration; at worst "
        f"{max(ratios):.2f}. The measured memory of {inside} of {len(rows)} choices is within the limit.**",
        "",
        "| model | memory | limit | chosen | needs | measured | step, ms | best | its step, ms | ratio | slowest that "
        "fits, ratio | fit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result, row in rows:
        lines.append(
            f"| {name}, {result['parameters'] / 1e6:.1f}M | {row['memory']} | {tables.size(row['limit'])} | "
            f"{short(row['chosen'])} | {tables.size(row['needed'])} | "
            f"{'-' if row['measured'] is None else tables.size(row['measured'])} | {1e3 * row['seconds']:.1f} | "
            f"{short(row['best'])} | {1e3 * row['best_seconds']:.1f} | {row['seconds'] / row['best_seconds']:.2f} | "
            f"{row['worst_seconds'] / row['best_seconds']:.2f} | {row['fitting']} |"
        )
    return "\n".join(lines) + "\n"


def main(argv):
    del argv
    path = pathlib.Path(_RESULTS.value)
    for name in _MODELS.value:
        # Each model in a process of its own: DTensor and TensorFlow keep what they have compiled.
        result = measure(name) if len(_MODELS.value) == 1 else common.run_child(f"--models={name}", "--nowrite")
        if len(_MODELS.value) == 1:
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result))
    if _WRITE.value:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        results = {each["model"]: each for each in lines}
        TABLE.write_text(table({name: results[name] for name in MODELS if name in results}))


if __name__ == "__main__":
    app.run(main)
