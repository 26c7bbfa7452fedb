"""Measure what gathers in codes change: the error of weights, loss and gradients, the losses of a training, the bytes.

    python tools/bench/gather_error.py                                  # a GPT-2 of 5.2 million parameters
    python tools/bench/gather_error.py --layers=2 --width=128 --vocabulary=1000 --steps=20

A GPT-2 trains at stage 3 on four logical devices, once with each gather dtype, from the same weights on the same
batches. *Weights* is the error of all weights that are gathered in codes, *gradients* that of all gradients of the
first step: the norm of the difference over the norm. *Loss* is the difference of the first step's loss over the loss.
*Last loss* is the mean of the last five losses. *MiB* is measured: the bytes that gathers give one device in a step.
*Of exact* divides by the bytes of exact gathers.
"""

import common
import gpt_flags
import numpy as np
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 60, "Steps of each training.", lower_bound=5)
_POLICY = flags.DEFINE_string("policy", "float32", "The dtype policy of the model.")
_RATE = flags.DEFINE_float("rate", 1e-3, "The learning rate of Adam.")

DTYPES = (None, "int8", "float8_e4m3fn")


def relative(values: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return the norm of the difference over the norm."""
    squares = [(np.sum(np.square(a.astype("float64") - b)), np.sum(np.square(b.astype("float64"))))
               for a, b in zip(values, exact, strict=True)]  # fmt: skip
    return float(np.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares)))


def measure(gather_dtype: str | None) -> dict:
    """Train with a gather dtype."""
    import keras
    import tensorflow as tf

    import tfshard

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(_POLICY.value)
    model, (x, y) = gpt_flags.gpt2(steps=8)
    keras.config.set_dtype_policy("float32")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES), gather_dtype=gather_dtype)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfshard.as_distributed(model).compile(keras.optimizers.Adam(_RATE.value), loss, strategy=strategy)
    size = gpt_flags.BATCH_SIZE.value
    batches = [
        ({key: each[size * n : size * (n + 1)] for key, each in x.items()}, y[size * n : size * (n + 1)])
        for n in range(8)
    ]
    coded = [each for each in model.weights if each.value.layout.gather_dtype or gather_dtype is None]

    @tf.function
    def read():
        return {each.path: tf.identity(each.value) for each in coded}

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            value = model.compute_loss(x, y, model(x, training=False))
        return value, tape.gradient(value, model.trainable_weights)

    weights = {path: each.numpy() for path, each in strategy.run(read).items()}
    first, found = strategy.run(gradients, args=batches[0])
    losses = [float(model.train_on_batch(*batches[step % 8])) for step in range(_STEPS.value)]
    profile = tfshard.profile_step(model, batches[0])
    return {
        "weights": weights,
        "loss": float(first.numpy()),
        "gradients": [tf.convert_to_tensor(each).numpy() for each in found],
        "losses": losses,
        "gathered": profile.bytes("all-gather"),
    }


def main(argv):
    del argv
    common.start()
    exact = measure(None)
    print(f"{common.origin()}; policy {_POLICY.value}, {_STEPS.value} steps of Adam, rate {_RATE.value}")
    print(f"{'gathers':>14} {'weights':>9} {'loss':>9} {'gradients':>9} {'last loss':>9} {'MiB':>8} {'of exact':>8}")
    for dtype in DTYPES:
        found = exact if dtype is None else measure(dtype)
        paths = sorted(found["weights"])
        weights = relative([found["weights"][each] for each in paths], [exact["weights"][each] for each in paths])
        print(
            f"{dtype or 'exact':>14} {weights:>9.5f} {abs(found['loss'] / exact['loss'] - 1):>9.6f} "
            f"{relative(found['gradients'], exact['gradients']):>9.5f} {np.mean(found['losses'][-5:]):>9.4f} "
            f"{found['gathered'] / 2**20:>8.2f} {found['gathered'] / exact['gathered']:>8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
