"""Compare a GPT on one GPU, trained with plain Keras, with the step time and memory that `tfshard.simulate` predicts.

    python tools/bench/one_gpu.py --machine=h100 --policy=mixed_bfloat16 --layers=12 --width=768 --heads=12 \
        --vocabulary=50257 --sequence_length=1024 --batch_size=8

Without a GPU, only the prediction is printed. If the card's memory differs from the machine's, pass the bandwidth of
its data sheet as `--bandwidth`, in bytes a second. A program reaches 0.8 of that bandwidth, as
tfshard/planning/clusters/h100.yaml assumes.
"""

import dataclasses

import common
import gpt_flags
from absl import app, flags

_MACHINE = flags.DEFINE_string("machine", "h100", "Argument of tfshard.planning.Machine.load.")
_POLICY = flags.DEFINE_string("policy", "mixed_bfloat16", "Keras's dtype policy.")
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth", None, "Bandwidth of the card's memory in bytes a second. By default the machine's."
)
_STEPS = flags.DEFINE_integer("steps", 8, "Steps of an epoch.", lower_bound=2)
# The share of a data sheet's memory bandwidth that a program reaches.
_REACHED = 0.8


def predicted() -> tuple[float, float]:
    """Predict the seconds and the peak bytes of a step."""
    import tfshard
    from tfshard.planning import Machine

    machine = Machine.load(_MACHINE.value)
    if _BANDWIDTH.value:
        reached = _REACHED * _BANDWIDTH.value
        update = machine.update_bandwidth * reached / machine.bandwidth
        machine = dataclasses.replace(machine, bandwidth=reached, product_bandwidth=reached, update_bandwidth=update)
    model = tfshard.abstract_model(lambda: gpt_flags.gpt2()[0])
    found = tfshard.simulate(
        model, machine, devices=[1], batch=gpt_flags.BATCH_SIZE.value, length=gpt_flags.SEQUENCE.value, optimizer="adam"
    ).best[1]
    return found.seconds, found.peak_bytes


def main(argv):
    del argv
    import keras
    import tensorflow as tf

    keras.config.set_dtype_policy(_POLICY.value)
    seconds, peak = predicted()
    print(f"predicted: {1e3 * seconds:.0f} ms, {peak / 1e9:.2f} GB")
    if not tf.config.list_physical_devices("GPU"):
        return
    model, data = gpt_flags.gpt2(steps=_STEPS.value)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    times = common.fit_times(model, data, batch_size=gpt_flags.BATCH_SIZE.value)
    held = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    print(f"measured:  {1e3 * times['step']:.0f} ms, {held / 1e9:.2f} GB; first step {times['first']:.0f} s")


if __name__ == "__main__":
    app.run(main)
