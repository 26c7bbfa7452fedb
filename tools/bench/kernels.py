"""Which operations a step spends its time in, added up over devices, beside those of one device: by trace.

    python -m tools.bench.kernels --model=resnet50 --kernel_ways="one device,stage 0,stage 3"

A device that waits for a core counts as computing: of ways with more devices than cores the sums are an upper bound.
Models and ways are those of tools/report.sh that Keras on TensorFlow trains.
"""

from absl import app, flags

from tools.report import __main__ as report
from tools.report import models

_MODEL = flags.DEFINE_enum("model", "gpt 5M", list(models.MODELS), "Which.")
_KERNEL_WAYS = flags.DEFINE_list("kernel_ways", ["one device", "stage 0", "stage 3"], "Which.")
_TYPES = flags.DEFINE_integer("types", 20, "How many types of operations are printed.")


def main(argv: list[str]) -> None:
    del argv
    found = {}
    for way in _KERNEL_WAYS.value:
        with report.process(models.MODELS[_MODEL.value], way) as training:
            training.ask("first")
            found[way] = training.ask("kernels")
    highest = {kind: max(each.get(kind, 0.0) for each in found.values()) for each in found.values() for kind in each}
    print(f"{'ms':>28} " + " ".join(f"{way:>14}" for way in found))
    for kind in ("all", *sorted(highest, key=lambda kind: -highest[kind])[: _TYPES.value]):
        cells = [1e3 * (sum(each.values()) if kind == "all" else each.get(kind, 0.0)) for each in found.values()]
        print(f"{kind:>28} " + " ".join(f"{cell:>14.1f}" for cell in cells))


if __name__ == "__main__":
    app.run(main)
