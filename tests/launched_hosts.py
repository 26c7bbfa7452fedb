"""Train at some stages: launched, on hosts with a network between them; imported, on one device."""

import json

import keras
import numpy as np

import parity
import tfshard
from tfshard.devices import transfer
from tools.host_runs import network

DEVICES = 4
STEPS = 6
# All one-time messages are sent before these steps.
COUNTED = 4
# Stage, and whether variables share a buffer.
WAYS = {"stage 0": (0, True), "stage 3": (3, True), "stage 3, alone": (3, False)}
RANDOM = np.random.RandomState(0)
BATCH = RANDOM.randn(8, 256).astype("float32"), RANDOM.randn(8, 256).astype("float32")


def build() -> keras.Sequential:
    """Return a model of 1 MiB. Compared to that, heartbeats send little."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, "tanh"), keras.layers.Dense(256)])


def plain() -> list[float]:
    """Return the losses of plain Keras."""
    model = build()
    model.compile(parity.dense_gradients(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
    return [float(model.train_on_batch(*BATCH)) for _ in range(STEPS)]


def sent_in_a_ring(kind: str, size: int) -> float:
    """Return the bytes that each device sends to the next device for a collective of a plan."""
    share = (DEVICES - 1) / DEVICES * size
    # A CPU completes the reduction before it scatters.
    return share if kind == "all-gather" else 2 * share


def sent_so_far() -> int:
    """Return the bytes that this host has sent, once all clients have received everything."""
    tfshard.collectives.barrier()
    return network.own_traffic().sent


def train(stage: int, grouped: bool) -> dict:
    """Return the losses, the bytes that this host sent in a step, and the planned bytes."""
    options = {} if grouped else {"analyzer": None}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=DEVICES), zero_stage=stage, **options)
    model = tfshard.as_distributed(build())
    model.compile(keras.optimizers.Adam(1e-3), "mse", strategy=strategy)
    losses = [float(model.train_on_batch(*BATCH)) for _ in range(STEPS - COUNTED)]
    before = sent_so_far()
    losses += [float(model.train_on_batch(*BATCH)) for _ in range(COUNTED)]
    sent = (sent_so_far() - before) / COUNTED
    collectives = strategy.plan(model, inputs=BATCH[0]).collectives
    planned = sum(each.count * sent_in_a_ring(each.kind, each.bytes) for each in collectives)
    return {"losses": losses, "sent": sent, "planned": planned, "kinds": sorted({each.kind for each in collectives})}


def values() -> dict[str, float]:
    """Return the bytes that each host sends for a value of 1 MiB, relative to the expected bytes.

    A host sends its rows or local shard to the other host, or takes part in a ring of the two clients.
    """
    value = RANDOM.randn(512, 512).astype("float32")
    mesh = tfshard.create_mesh(model=2, batch=2)
    sharded = {axes: transfer.host_to_mesh(value, axes, mesh) for axes in (("batch", "model"), (None, "model"))}
    ways = {
        "all_reduce": lambda: tfshard.collectives.all_reduce(value),
        "all_gather": lambda: tfshard.collectives.all_gather(value),
        "broadcast": lambda: tfshard.collectives.broadcast(value),
        # Both devices of a client send their local shard, or the gathered value.
        **{f"to host from {axes}": lambda tensor=tensor: transfer.to_host(tensor) for axes, tensor in sharded.items()},
    }
    found = {}
    for name, way in ways.items():
        way()
        before = sent_so_far()
        way()
        found[name] = (sent_so_far() - before) / value.nbytes
    return found


if __name__ == "__main__":
    # Run before a strategy chooses how steps gather.
    print(f"FOUND {json.dumps(['values', values()])}", flush=True)
    for name, way in WAYS.items():
        print(f"FOUND {json.dumps([name, train(*way)])}", flush=True)
