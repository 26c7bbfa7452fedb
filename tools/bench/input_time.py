"""What a step of `fit` waits for its batch: until it is read, which goes on beside steps, and until it is on the mesh.

    python tools/bench/input_time.py

Medians of the steps of the last epochs, on four devices.
"""

import statistics
import time
from unittest import mock

import common
import numpy as np
from absl import app


def waited(name: str, model, data, batch_size: int) -> None:
    """Prints the time of a step, of `next` of the batches, and of that on the way to the mesh."""
    import keras

    import tfshard
    from tfshard.training import datasets

    times: dict[str, list[float]] = {"next": [], "to the mesh": []}

    def timed(what, function):
        def run(*arguments):
            begin = time.perf_counter()
            result = function(*arguments)
            times[what].append(time.perf_counter() - begin)
            return result

        return run

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES))
    model = tfshard.as_distributed(model)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), strategy=strategy)
    iterator = datasets.ShardedIterator
    with (
        mock.patch.object(iterator, "__next__", timed("next", iterator.__next__)),
        mock.patch.object(datasets, "batch_to_mesh", timed("to the mesh", datasets.batch_to_mesh)),
    ):
        step = common.fit_times(model, data, batch_size=batch_size)["step"]
    found = ", ".join(f"{what} {1e3 * statistics.median(each):.2f} ms" for what, each in times.items())
    print(f"{name}: step {1e3 * step:.1f} ms, {found}", flush=True)


def main(argv):
    del argv
    import keras

    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    print(common.origin())
    layers = [keras.layers.Conv2D(width, 3, 2, activation="relu") for width in (32, 64)]
    images = keras.Sequential(
        [keras.Input((96, 96, 3)), *layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    )
    samples = np.random.RandomState(0).uniform(size=(256, 96, 96, 3)).astype("float32")
    waited("64 images of 96 x 96", images, (samples, np.zeros(256, "int32")), 64)
    gpt, data = common.gpt2(layers=2, width=128, heads=4, vocabulary=1500, sequence=128, samples=32)
    waited("8 x 128 tokens", gpt, data, 8)


if __name__ == "__main__":
    app.run(main)
