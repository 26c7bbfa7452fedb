"""Train in the actors of a Ray cluster, with `ray` alone.

    python examples/on_ray.py --num_workers=2

Each actor is one process of a tfshard run. Ray Train's TensorflowTrainer (`pip install "ray[train]"`) does what `main`
does here: it starts actors and sets TF_CONFIG. `train` is the same there.
"""

import argparse
import json
import os
import socket

import ray


def train(steps: int) -> list[float]:
    """Join the run, train, and return the loss of each step."""
    # Imported in the actors: the driver needs neither TensorFlow nor tfshard.
    import keras
    import numpy as np

    import tfshard

    try:
        started = tfshard.initialize()
        random = np.random.RandomState(0)
        x, y = random.randn(8, 6).astype("float32"), random.randn(8, 2).astype("float32")
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        model = tfshard.as_distributed(model)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=started.num_devices))
        model.compile(keras.optimizers.Adam(0.1), "mse", strategy=strategy)
        return [float(model.train_on_batch(x, y)) for _ in range(steps)]
    finally:
        # The actor's process goes on after this function.
        tfshard.shutdown()


class Worker:
    """An actor. Ray gives each a process of its own."""

    def address(self, host: str | None) -> str:
        """Return a free address of this process's machine."""
        host = host or ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((host, 0))
            return f"{host}:{sock.getsockname()[1]}"

    def train(self, addresses: list[str], index: int, steps: int) -> list[float]:
        """Train as worker `index` of the workers at `addresses`."""
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        return train(steps)


def main(num_workers: int, steps: int, host: str | None = None, **options) -> list[list[float]]:
    """Train on a Ray cluster, or on a local one that this starts. Returns the losses of each worker.

    Args:
        num_workers: The number of workers.
        steps: The number of steps.
        host: The address of all workers and of a local Ray. By default the address of each machine.
        **options: Options of `ray.init`.
    """
    variables = {"PYTHONHASHSEED": "0", "TFSHARD_DEVICES_PER_PROCESS": "1"}
    local = {} if host is None else {"_node_ip_address": host}
    ray.init(runtime_env={"env_vars": variables}, **local, **options)
    try:
        # On GPUs (not run): num_gpus=1. Ray then sets CUDA_VISIBLE_DEVICES of each worker.
        workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(num_workers)]
        addresses = ray.get([worker.address.remote(host) for worker in workers])
        return ray.get([worker.train.remote(addresses, index, steps) for index, worker in enumerate(workers)])
    finally:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host", help="The address of all workers, such as 127.0.0.1 for a local Ray.")
    for index, losses in enumerate(main(**vars(parser.parse_args()))):
        print(f"worker {index}: {', '.join(f'{loss:.6f}' for loss in losses)}")
