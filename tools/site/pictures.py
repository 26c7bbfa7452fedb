"""Draw the pictures of the documents, as SVG.

    python -m tools.site.pictures --write     # without the flag: lists the files that differ from the drawings

stages_rest.svg and stages_peak.svg show plans of a GPT-2 of 5.2 million parameters on four devices. saved.svg shows the
tables of tools/bench/memory.py and tools/bench/depth.py in docs/measurements.md. step.svg shows the data flow of a
step.
"""

import argparse
import dataclasses
import html
import pathlib
import re
from collections.abc import Mapping, Sequence

import keras
import numpy as np

import tfshard

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
MIB = 2**20
# The palette of Okabe and Ito (2008), which color-blind people can distinguish.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars of stacked parts.

    Attributes:
        title: The title above the chart.
        unit: The unit of the numbers.
        parts: The names of the stacked parts, from the bottom.
        bars: The name of each bar, and the sizes of its parts.
    """

    title: str
    unit: str
    parts: Sequence[str]
    bars: Mapping[str, Sequence[float]]


def svg(*charts: Chart, width: int = 760, height: int = 320) -> str:
    """Return the SVG text of charts beside each other."""
    each = width / len(charts)
    drawn = [line for i, chart in enumerate(charts) for line in _drawn(chart, i * each, each, height)]
    alt = html.escape("; ".join(chart.title for chart in charts))
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
            f"<title>{alt}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _drawn(chart: Chart, left: float, width: float, height: int) -> list[str]:
    shown = [name for i, name in enumerate(chart.parts) if any(sizes[i] for sizes in chart.bars.values())]
    legend = 16 * len(shown) if len(shown) > 1 else 0
    top, bottom = 44 + legend, height - 30
    most = max(sum(sizes) for sizes in chart.bars.values())
    step = (width - 20) / len(chart.bars)
    lines = [_text(left + 10, 20, f"{chart.title}, {chart.unit}", bold=True)]
    for i, name in enumerate(shown):
        color = COLORS[list(chart.parts).index(name)]
        lines.append(f'<rect x="{left + 10:.1f}" y="{30 + 16 * i}" width="10" height="10" fill="{color}"/>')
        lines.append(_text(left + 26, 39 + 16 * i, name))
    for i, (name, sizes) in enumerate(chart.bars.items()):
        x, y = left + 10 + i * step + step * 0.15, float(bottom)
        for part, size in enumerate(sizes):
            tall = size / most * (bottom - top - 16)
            y -= tall
            if tall:
                size_of = f'width="{step * 0.7:.1f}" height="{tall:.1f}"'
                lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size_of} fill="{COLORS[part]}"/>')
        middle = x + step * 0.35
        lines.append(_text(middle, y - 5, f"{sum(sizes):.1f}", middle=True, bold=True))
        lines.append(_text(middle, bottom + 16, name, middle=True))
    return lines


def _text(x: float, y: float, words: str, *, middle: bool = False, bold: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{weight}>{html.escape(words)}</text>'


# --- stages ------------------------------------------------------------------------------------------

DEVICES = 4
PEAK_PARTS = {
    "stored_bytes": "at rest: parameters and slots",
    "gathered_bytes": "gathered",
    "gradient_bytes": "gradients",
    "reduced_bytes": "buffers of reductions",
    "updated_bytes": "new values",
    "activation_bytes": "activations",
}


def plans() -> dict[int, tfshard.planning.ShardingPlan]:
    """Return a plan for each ZeRO stage.

    The model is a GPT-2 of four blocks of width 256 with 8000 tokens, Adam, and a batch of 8 x 64.
    """
    import keras_hub

    def build() -> keras.Model:
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=8000, num_layers=4, num_heads=4, hidden_dim=256, intermediate_dim=1024,
            max_sequence_length=128,
        )  # fmt: skip
        return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))

    model = tfshard.abstract_model(build)
    tokens = np.zeros((8, 64), "int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return {
        stage: tfshard.plan(model, {"batch": DEVICES}, zero_stage=stage, optimizer="adam", inputs=inputs)
        for stage in range(4)
    }


def stages_rest(by_stage: Mapping[int, tfshard.planning.ShardingPlan]) -> Chart:
    """Chart the bytes that a device holds between steps, and its gradients until the update."""
    kinds = ("parameter", "slot", "gradient")
    return Chart(
        title=f"What one of {DEVICES} devices holds",
        unit="MiB",
        parts=("parameters", "optimizer slots", "gradients until the update"),
        bars={f"stage {s}": [plan.bytes_per_device(kind) / MIB for kind in kinds] for s, plan in by_stage.items()},
    )


def stages_peak(by_stage: Mapping[int, tfshard.planning.ShardingPlan]) -> Chart:
    """Chart the bytes that a device holds at the peak of a step."""
    bars = {}
    for stage, plan in by_stage.items():
        assert plan.peak is not None
        bars[f"stage {stage}"] = [getattr(plan.peak, name) / MIB for name in PEAK_PARTS]
    return Chart(
        title=f"What one of {DEVICES} devices holds at the peak of a step",
        unit="MiB",
        parts=tuple(PEAK_PARTS.values()),
        bars=bars,
    )


# --- measurements ------------------------------------------------------------------------------------


def measured() -> tuple[Chart, Chart]:
    """Chart the memory of a run in three ways, and by depth, from docs/measurements.md."""
    text = (DOCS / "measurements.md").read_text()
    ways = _rows(text, "| | resident, GB | above the start | in use |")
    depths = _rows(text, "| blocks | parameters | rests | a step adds |")
    names = {"stage 3": "stage 3", "stage 3, `reshard_after_forward=False`": "all gathered once"}
    saved = Chart(
        title="Memory of a training process",
        unit="copies of the parameters",
        parts=("above the start",),
        bars={names.get(way, way): [float(cells[1].split()[0])] for way, *cells in ways},
    )
    scaled = Chart(
        title="GPT-2 on four devices, by blocks",
        unit="MiB",
        parts=("at rest, stage 3", "added by a step"),
        bars={f"{blocks}": [float(rests), float(adds)] for blocks, _, rests, adds in depths},
    )
    return saved, scaled


def _rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the first table with this header."""
    table = text.partition(f"{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in table]


# --- a step ------------------------------------------------------------------------------------------

LANES = {"host": (120, 130), "devices": (275, 235), "between": (535, 215)}
# The place and the text of each box: stage 3 on four devices.
STEP = (
    ("host", "a batch of 64 rows"),
    ("devices", "each takes its 16 rows"),
    ("between", "all-gather: the layer's kernel"),
    ("devices", "rows x kernel; the kernel is freed"),
    ("between", "all-reduce: the loss of 64 rows"),
    ("between", "all-gather: the kernel again"),
    ("devices", "gradient of 16 rows; kernel freed"),
    ("between", "reduce-scatter: shards of the sum"),
    ("devices", "optimizer: new shards, kept aside"),
    ("devices", "at the end all shards are written"),
    ("host", "loss and metrics"),
)
# The boxes that repeat for each layer: the first box, the last box, and the label.
LOOPS = ((2, 3, "each layer"), (5, 8, "each layer,", "from the last"))


def step_flow() -> str:
    """Draw the data flow of a step, box to box. Each box is in the lane of its place."""
    height, rows = 44, len(STEP)
    size = (760, 50 + height * rows)
    box = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        "<title>One step at stage 3: what the host, the devices and the links between them do, in order</title>",
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for (lane, (x, width)), color in zip(LANES.items(), COLORS, strict=False):
        lines.append(_text(x + width / 2, 22, {"between": "between devices"}.get(lane, lane), middle=True, bold=True))
        for i, (where, words) in enumerate(STEP):
            if where == lane:
                y = 36 + height * i
                lines.append(
                    f'<rect x="{x}" y="{y}" width="{width}" height="28" rx="4" fill="{color}" fill-opacity="0.15"'
                    f' stroke="{color}"/>'
                )
                lines.append(_text(x + width / 2, y + 18, words, middle=True))
    for i, ((here, _), (there, _)) in enumerate(zip(STEP, STEP[1:], strict=False)):
        (x, width), (to, to_width) = LANES[here], LANES[there]
        top, bottom = 64 + height * i, 35 + height * (i + 1)
        path = f"M{x + width / 2:.0f},{top} V{top + 7} H{to + to_width / 2:.0f} V{bottom}"
        lines.append(f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#end)"/>')
    for first, last, *words in LOOPS:
        top, bottom = 32 + height * first, 68 + height * last
        lines.append(f'<path d="M110,{top} H102 V{bottom} H110" fill="none" stroke="#555"/>')
        lines += [_text(8, (top + bottom) / 2 + 4 + 15 * i, each) for i, each in enumerate(words)]
    return "\n".join([*lines, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Return the text of each picture by file name."""
    by_stage = plans()
    return {
        "stages_rest.svg": svg(stages_rest(by_stage)),
        "stages_peak.svg": svg(stages_peak(by_stage), height=360),
        "saved.svg": svg(*measured(), height=300),
        "step.svg": step_flow(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Write the pictures.")
    write = parser.parse_args().write
    for name, text in pictures().items():
        if write:
            (DOCS / name).write_text(text)
        elif (DOCS / name).read_text() != text:
            print(f"{name} is not as it is drawn")


if __name__ == "__main__":
    main()
