"""What a step sends and holds with LoRA, and with LoRA on layers quantized to 8 bits, by trace.

    python tools/bench/adapters.py
    python tools/bench/adapters.py --mesh=batch:2,model:2

An MLP of Dense layers of width 1024 with biases, at stage 3 on four devices, Adam. *Kernel* is the largest piece that a
step sends at once for a kernel, *sent* all that it sends, both on one device, without what the trace leaves out (256
KiB and less). *Rests* is what a device holds between steps, *added* what a step adds at its peak. Each row is one
process.
"""

import json

import common
from absl import app, flags

_MESH = flags.DEFINE_string("mesh", "batch:4", "Mesh axes.")
_LAYERS = flags.DEFINE_integer("layers", 6, "Dense layers.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Their width.")
_RANK = flags.DEFINE_integer("rank", 8, "Of the adapters.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_WAY = flags.DEFINE_enum("way", None, ["all trained", "LoRA", "LoRA on int8"], "Measure this here, and print JSON.")


def build(way: str):
    """The model."""
    import keras

    inputs = x = keras.Input((_WIDTH.value,))
    for number in range(_LAYERS.value):
        x = keras.layers.Dense(_WIDTH.value, activation="gelu", name=f"dense_{number}")(x)
    model = keras.Model(inputs, x)
    for layer in model.layers[1:]:
        if way != "all trained":
            layer.enable_lora(_RANK.value)
        if way == "LoRA on int8":
            layer.quantize("int8")
    return model


def measure(way: str) -> dict:
    """Profiles a step in this process."""
    import keras
    import numpy as np

    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    mesh = {name: int(size) for name, size in (axis.split(":") for axis in _MESH.value.split(","))}
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(build(way))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), "auto" if "model" in mesh else None)
    model.compile("adam", "mse", strategy=strategy)
    batch = np.random.RandomState(0).normal(size=(_BATCH_SIZE.value, _WIDTH.value)).astype("float32")
    profile = tfshard.profile_step(model, (batch, batch))
    sent = [(each.kind, each.count, each.bytes) for each in profile.collectives if each.bytes]
    return {
        "largest": max((bytes_ // count for _, count, bytes_ in sent), default=0),
        "sent": sum(bytes_ for _, _, bytes_ in sent),
        "kinds": sorted({kind for kind, _, _ in sent}),
        "rests": strategy.report(model).bytes_per_device(),
        "added": profile.peak.device_added,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    print("MiB on a device" + "".join(f"{name:>12}" for name in ("kernel", "sent", "rests", "added")))
    for way in ("all trained", "LoRA", "LoRA on int8"):
        found = common.run_child(f"--way={way}")
        numbers = [f"{found[name] / (1 << 20):>12.2f}" for name in ("largest", "sent", "rests", "added")]
        print(f"{way:<15}{''.join(numbers)}  {', '.join(found['kinds'])}", flush=True)
    print(f"{_MESH.value}, {found['origin']}")


if __name__ == "__main__":
    app.run(main)
