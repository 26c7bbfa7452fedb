"""What `tfshard.simulate` says of models of 7, 13 and 70 billion parameters on described clusters, beside what others
published: docs/predictions.md.

    python -m tools.bench.published      # half an hour, on one core

Blocks of a decoder are alike, so that what a step takes is a straight line over how many there are: models of two and
of four blocks are traced, and the line is followed to as many as there are. `--check` traces one model whole, beside.
"""

import contextlib
import dataclasses
import datetime
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tfshard.planning import simulation

CLUSTERS = ("a100", "h100", "v5p")
_CHECK = flags.DEFINE_bool("check", False, "Only trace the 7B model whole, and print it beside the line.")
_ONLY = flags.DEFINE_string("only", None, "Only print this part: `beside`, or a model.")
_OUT = flags.DEFINE_string("out", "docs/predictions.md", "Where the page goes.")

TEXT = (pathlib.Path(__file__).parent / "published.md").read_text()
DEVICES = (8, 32, 128, 512, 2048, 4096)
# Samples of a device in a part.
ROWS = (1, 2, 4, 8)
# Blocks of the models that are traced.
SHORT = (2, 4)
PICTURES = pathlib.Path("docs/clusters")
# Llama 2 (Touvron et al. 2023, table 1 and section 2.2): sequences of 4096 tokens, four million tokens a step.
LENGTH, BATCH = 4096, 1024


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder: layers, width, heads, heads of keys and values, and the width between; 0 of the last: a GPT's, of
    four times the width."""

    layers: int
    width: int
    heads: int
    key_heads: int
    between: int = 0
    vocabulary: int = 32000


LLAMA = {
    "7B": Shape(32, 4096, 32, 32, 11008),
    "13B": Shape(40, 5120, 40, 40, 13824),
    "70B": Shape(80, 8192, 64, 8, 28672),
}
MPT = {
    "7b": Shape(32, 4096, 32, 32, vocabulary=50368),
    "13b": Shape(40, 5120, 40, 40, vocabulary=50368),
    "70b": Shape(80, 8192, 64, 64, vocabulary=50368),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """What somebody measured.

    Attributes:
        source: Who, and where.
        cluster: A description that comes with tfshard.
        shape: The model.
        name: What it is called.
        length: Tokens of a sample.
        devices: How many.
        rows: Samples of a device in a part of the batch.
        parts: Parts of the batch.
        recompute: Whether blocks were computed again.
        utilization: Model FLOPs over peak FLOPs.
    """

    source: str
    cluster: str
    shape: Shape
    name: str
    length: int
    devices: int
    rows: int
    parts: int
    recompute: bool
    utilization: float


_FOUNDRY = "LLM Foundry, FSDP, scripts/train/benchmarking/README.md"
PUBLISHED = (
    Published(_FOUNDRY, "a100", MPT["7b"], "MPT 7B", 2048, 8, 6, 2, False, 0.6423),
    Published(_FOUNDRY, "a100", MPT["7b"], "MPT 7B", 4096, 8, 16, 2, True, 0.5484),
    Published(_FOUNDRY, "a100", MPT["13b"], "MPT 13B", 2048, 8, 2, 3, False, 0.5957),
    Published(_FOUNDRY, "a100", MPT["13b"], "MPT 13B", 4096, 8, 10, 3, True, 0.5762),
    Published(_FOUNDRY, "a100", MPT["70b"], "MPT 70B", 2048, 32, 2, 16, True, 0.4856),
    Published(_FOUNDRY, "a100", MPT["70b"], "MPT 70B", 2048, 64, 8, 4, True, 0.5333),
    Published(_FOUNDRY, "h100", MPT["7b"], "MPT 7B", 2048, 8, 6, 1, False, 0.4644),
    Published(_FOUNDRY, "h100", MPT["7b"], "MPT 7B", 4096, 8, 16, 2, True, 0.4042),
    Published(_FOUNDRY, "h100", MPT["13b"], "MPT 13B", 2048, 8, 2, 1, False, 0.3979),
    Published(_FOUNDRY, "h100", MPT["13b"], "MPT 13B", 2048, 64, 2, 1, False, 0.3986),
    Published(_FOUNDRY, "h100", MPT["70b"], "MPT 70B", 2048, 32, 2, 16, True, 0.3615),
    Published(_FOUNDRY, "h100", MPT["70b"], "MPT 70B", 2048, 64, 8, 4, True, 0.4257),
    Published("MaxText, tiering of models", "v5p", LLAMA["70B"], "Llama 2 70B", 4096, 512, 4, 1, True, 0.654),
)


def build(shape: Shape) -> Callable[[], Any]:
    """A function that builds a decoder which computes in bfloat16."""

    def make() -> Any:
        import keras
        import keras_hub

        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            if shape.between:
                backbone = keras_hub.models.LlamaBackbone(
                    vocabulary_size=shape.vocabulary, num_layers=shape.layers, num_query_heads=shape.heads,
                    num_key_value_heads=shape.key_heads, hidden_dim=shape.width, intermediate_dim=shape.between,
                )  # fmt: skip
            else:
                backbone = keras_hub.models.GPT2Backbone(
                    vocabulary_size=shape.vocabulary, num_layers=shape.layers, num_heads=shape.heads,
                    hidden_dim=shape.width, intermediate_dim=4 * shape.width, max_sequence_length=LENGTH, dropout=0.0,
                )  # fmt: skip
            return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
        finally:
            keras.config.set_dtype_policy("float32")

    return make


def fused(machine: Any) -> Any:
    """A machine whose other operations cost nothing: in kernels of products, as FlashAttention and XLA have them."""
    return dataclasses.replace(machine, name=f"{machine.name}, fused", bandwidth=float("inf"), operation_seconds=0.0)


class Line:
    """Predictions of a model, by those of the same with fewer blocks: see above. `Simulator`'s arguments."""

    def __init__(self, shape: Shape, batch: int, **options: Any):
        import tfshard
        from tfshard.planning.simulation import Simulator

        self._parts = (shape.layers - SHORT[0]) / (SHORT[1] - SHORT[0])
        self._simulators = [
            Simulator(tfshard.abstract_model(build(dataclasses.replace(shape, layers=layers))), batch, **options)
            for layers in SHORT
        ]

    def predictions(self, machine: Any, mesh_shape: dict[str, int], stage: int, **options: Any) -> list[Any]:
        """As those of a `Simulator`; whether they fit is not looked at."""
        machine = dataclasses.replace(machine, memory=None)
        found = [each.predictions(machine, mesh_shape, stage, **options) for each in self._simulators]
        return [self._followed(*each) for each in zip(*found, strict=True)]

    def _followed(self, short: Any, longer: Any) -> Any:
        def followed(first: float, second: float) -> float:
            return first + self._parts * (second - first)

        names = ("seconds", "compute_seconds", "collective_seconds", "peak_bytes", "needed_bytes")
        values = {name: followed(getattr(short, name), getattr(longer, name)) for name in names}
        computed = followed(*(each.utilization * each.seconds for each in (short, longer)))
        return dataclasses.replace(short, utilization=computed / values["seconds"], **values)

    def best(self, machine: Any, devices: int) -> Any:
        """The quickest that fits; None if none does."""
        found = []
        for mesh_shape in simulation.meshes(devices, machine.links.devices_per_host, has_model_axis=True):
            with contextlib.suppress(simulation.CannotBeError):
                found += self.predictions(machine, mesh_shape, 3, rows=ROWS)
        fits = [each for each in found if each.needed_bytes <= machine.memory]
        return min(fits, key=lambda each: each.seconds, default=None)


def beside_published() -> list[str]:
    """A table: what is predicted on the mesh of what was published."""
    from tfshard.planning import Machine

    rows = []
    for each in PUBLISHED:
        machine = Machine.load(each.cluster)
        line = Line(each.shape, each.rows * each.parts * each.devices, length=each.length)
        as_is, ideal = (
            line.predictions(
                one, {"batch": each.devices}, 3, rows=[each.rows], recomputes=["auto" if each.recompute else None]
            )[0]
            for one in (machine, fused(machine))
        )
        rows.append(
            f"| {each.name}, {each.length} tokens | {each.devices} {each.cluster} | {each.rows} x {each.parts} | "
            f"{'yes' if each.recompute else 'no'} | {each.utilization:.0%} | {ideal.utilization:.0%} | "
            f"{as_is.utilization:.0%} | {each.source} |"
        )
    head = "| model | devices | samples a device x parts | recomputed | published MFU | predicted, fused | predicted |"
    return [f"{head} source |", "| --- " * 8 + "|", *rows]


def curves(name: str) -> list[str]:
    """Sections: the best meshes for a model, on each cluster."""
    from tfshard.planning import Machine

    lines = []
    line = Line(LLAMA[name], BATCH, length=LENGTH, layout_map="auto")
    for cluster in CLUSTERS:
        machine = Machine.load(cluster)
        found = {count: line.best(machine, count) for count in DEVICES}
        made = simulation.Simulation(machine=machine, best=found, considered={}, problems={})
        picture = PICTURES / f"{name.lower()}_{cluster}.svg"
        fits = any(each is not None for each in found.values())
        if fits:
            made.plot(picture)
        lines += ["", f"## Llama {name} on {machine.name}", ""]
        lines += [
            "| devices | mesh | parts | recomputed | step, s | tokens/s | MFU | needs, GiB |",
            "| --- " * 8 + "|",
        ]
        for count, best in found.items():
            if best is None:
                lines.append(f"| {count} | does not fit | | | | | | |")
                continue
            mesh = " x ".join(f"{axis}={size}" for axis, size in best.mesh_shape.items())
            lines.append(
                f"| {count} | {mesh} | {best.microbatches} | {'yes' if best.recompute else 'no'} | "
                f"{best.seconds:.2f} | {best.samples_per_second * LENGTH:,.0f} | {best.utilization:.0%} | "
                f"{best.needed_bytes / 2**30:.1f} |"
            )
        if fits:
            lines += ["", f"![Samples a second and MFU of {name} on {machine.name}](clusters/{picture.name})"]
    return lines


def check() -> None:
    """Prints what is predicted of the 7B model, traced whole and by the line."""
    import tfshard
    from tfshard.planning import Machine

    machine, options = (
        dataclasses.replace(Machine.load("a100"), memory=None),
        {"rows": [2], "recomputes": [None, "auto"]},
    )
    whole = simulation.Simulator(tfshard.abstract_model(build(LLAMA["7B"])), 16, length=LENGTH)
    line = Line(LLAMA["7B"], 16, length=LENGTH)
    for each in (whole, line):
        for one in each.predictions(machine, {"batch": 8}, 3, **options):
            print(type(each).__name__, one.recompute, one.seconds, one.utilization, one.needed_bytes, flush=True)


def main(argv: list[str]) -> None:
    del argv
    if _CHECK.value:
        check()
        return
    PICTURES.mkdir(exist_ok=True)
    if _ONLY.value:
        print("\n".join(beside_published() if _ONLY.value == "beside" else curves(_ONLY.value)))
        return
    date = datetime.date.today().isoformat()
    text = TEXT.format(date=date, beside=said("beside"), curves="\n\n".join(said(name) for name in LLAMA))
    pathlib.Path(_OUT.value).write_text(text)


def said(part: str) -> str:
    """What a process prints of a part: one that traces several models holds tens of gigabytes."""
    command = [sys.executable, "-m", "tools.bench.published", f"--only={part}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip("\n")


if __name__ == "__main__":
    app.run(main)
