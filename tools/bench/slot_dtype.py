"""What optimizer slots in bfloat16 change: losses and weights after some steps of a small GPT-2, against float32.

    python tools/bench/slot_dtype.py

Each row trains the same model on the same batches twice, at stage 3 on four devices. *Loss* is that of the last step.
*Weights apart* is the norm of their difference over the norm of what training had changed.
"""

import common
import gpt_flags
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 200, "Steps.")
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Of all optimizers.")


def train(optimizer: str, slot_dtype: str) -> tuple[float, list, list, int]:
    """The last loss, the weights before and after, and the bytes of slots on one device."""
    import keras
    import numpy as np

    import tfshard

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    with common.scope("stage 3", slot_dtype=slot_dtype):
        model, (x, y) = gpt_flags.gpt2(steps=_STEPS.value)
        model.compile(
            getattr(keras.optimizers, optimizer)(_RATE.value, **options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    before = [np.array(each) for each in model.trainable_variables]
    history = model.fit(x, y, batch_size=gpt_flags.BATCH_SIZE.value, shuffle=False, verbose=0)
    strategy: tfshard.ShardedStrategy = model.distribute_strategy
    after = [np.array(each) for each in model.trainable_variables]
    return history.history["loss"][-1], before, after, strategy.report(model).bytes_per_device("slot")


def main(argv):
    del argv
    import numpy as np

    print(f"{common.origin()}, {_STEPS.value} steps, rate {_RATE.value}")
    heads = ("loss, float32", "bfloat16", "apart", "weights apart", "bytes")
    print(f"{'optimizer':>10}" + "".join(f"{head:>14}" for head in heads))
    for optimizer in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion"):
        loss, before, after, bytes_ = train(optimizer, "float32")
        narrow_loss, _, narrow, narrow_bytes = train(optimizer, "bfloat16")
        moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True)))
        apart = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(after, narrow, strict=True))) / moved
        print(
            f"{optimizer:>10}{loss:>14.5f}{narrow_loss:>14.5f}{abs(narrow_loss - loss) / loss:>14.1e}{apart:>14.3f}"
            f"{narrow_bytes / bytes_:>14.2f}"
        )


if __name__ == "__main__":
    app.run(main)
