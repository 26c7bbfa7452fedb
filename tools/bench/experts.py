"""Measure training steps of a mixture of experts whose experts are sharded over four devices.

    python tools/bench/experts.py
    python tools/bench/experts.py --rounds=1 --ways="dense,shared"

A way is a process of its own, and ways take turns. The model is one mixture of experts with a residual, trained with
SGD on one batch. Each result is the median of the steps after two untimed ones.

- `dense`: plain Keras on one device. All experts compute all tokens, and most weights of the results are zero, as in
  KerasHub's models.
- `dense xla`: the same, compiled by XLA.
- `one device`: plain Keras on one device. Each expert computes its tokens.
- `shared`: four devices with `experts=True`. Tokens go to the devices of their experts.
- `every device`: four devices without `experts=`, stage 3. Each device gathers all experts.

The aim is a step of `shared` below 1.1 of `dense` divided by experts / top_k.
"""

import json
import statistics
import time

import common
from absl import app, flags

WAYS = ("dense", "dense xla", "one device", "shared", "every device")
_WAYS = flags.DEFINE_list("ways", list(WAYS), f"Ways to measure, of {WAYS}.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Processes of each way.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 5, "Timed steps of a process.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 8, "Experts.", lower_bound=1)
_TOP_K = flags.DEFINE_integer("top_k", 2, "Experts of a token.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a batch: samples of 128 tokens.", lower_bound=512)
_WIDTH = flags.DEFINE_integer("width", 512, "Features of a token; an expert has four times as many.", lower_bound=1)
_WAY = flags.DEFINE_string("way", None, "Measure this way in this process, and print JSON.")

LENGTH = 128


def build(is_dense: bool):
    """Build the model without a strategy."""
    import keras
    from keras import ops

    import tfshard

    class Dense(tfshard.layers.MixtureOfExperts):
        """Computes all experts for all tokens."""

        def call(self, inputs, training=None):
            tokens = ops.reshape(inputs, (-1, inputs.shape[-1]))
            probabilities = ops.softmax(ops.matmul(tokens, self.router_kernel))
            weights, ids = ops.top_k(probabilities, self.top_k)
            weights = weights / ops.sum(weights, axis=-1, keepdims=True)
            chosen = ops.sum(ops.one_hot(ids, self.num_experts) * weights[..., None], axis=1)
            hidden = ops.silu(ops.einsum("th,ehm->etm", tokens, self.expert_up_kernel))
            results = ops.einsum("etm,emh->eth", hidden, self.expert_down_kernel)
            return ops.reshape(ops.sum(results * ops.transpose(chosen)[..., None], axis=0), ops.shape(inputs))

    made = Dense if is_dense else tfshard.layers.MixtureOfExperts
    inputs = keras.Input((LENGTH, _WIDTH.value))
    layer = made(_EXPERTS.value, 4 * _WIDTH.value, top_k=_TOP_K.value, load_balancing=0.0, name="mixture")
    return keras.Model(inputs, inputs + layer(keras.layers.LayerNormalization()(inputs)))


def measure(way: str) -> dict:
    """Train in this process."""
    import keras
    import numpy as np

    import tfshard

    keras.utils.set_random_seed(0)
    is_sharded = way in ("shared", "every device")
    if is_sharded:
        common.start()
    model = build(way.startswith("dense"))
    # A small rate, so that the router hardly changes.
    optimizer, options = keras.optimizers.SGD(1e-3), {"jit_compile": way == "dense xla"}
    if is_sharded:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES), experts=way == "shared")
        model, options = tfshard.as_distributed(model), {"strategy": strategy}
    model.compile(optimizer, "mse", **options)
    random = np.random.RandomState(0)
    x = random.normal(size=(_TOKENS.value // LENGTH, LENGTH, _WIDTH.value)).astype("float32")
    batch = (x, np.roll(x, 1, axis=1))
    times = []
    for _ in range(2 + _STEPS.value):
        begin = time.perf_counter()
        loss = float(model.train_on_batch(*batch))
        times.append(time.perf_counter() - begin)
    return {"way": way, "seconds": statistics.median(times[2:]), "loss": loss}


def main(_) -> None:
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    found = common.rounds(_WAYS.value, _ROUNDS.value)
    share = _TOP_K.value / _EXPERTS.value
    print(
        f"{common.origin()}\n{_EXPERTS.value} experts of {_WIDTH.value} x {4 * _WIDTH.value}, top_k={_TOP_K.value}, "
        f"{_TOKENS.value} tokens\n"
    )
    print("| way | step, ms | over dense x top_k / experts | loss |\n|---|---|---|---|")
    for way, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        ratios = [
            run["seconds"] / (dense["seconds"] * share)
            for run, dense in zip(runs, found.get("dense", ()), strict=False)
        ]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        print(f"| {way} | {seconds * 1e3:.0f} | {ratio} | {runs[-1]['loss']:.6f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
