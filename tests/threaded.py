"""Train, evaluate and predict in several threads of one process, and report the results of each."""

import json
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import tfshard

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(48, 6)).astype("float32")
Y = RANDOM.normal(size=(48, 1)).astype("float32")


def build(strategy: tfshard.ShardedStrategy | None) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])
    if strategy is None:
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    else:
        tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.05), "mse", strategy=strategy)
    return model


class Predicting(keras.callbacks.Callback):
    """Predict within `fit`, in its thread."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.predict(X[:8], verbose=0)


def fit(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[Predicting()]).history["loss"]


def loop(model: keras.Model) -> list[float]:
    """Run a custom loop that reads its results."""
    strategy = model.distribute_strategy

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    train = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(12))
    return [float(train(*batch)) for _ in range(2) for batch in dataset]


def predict(model: keras.Model) -> list[float]:
    found = [model.predict(X, batch_size=12, verbose=0).ravel().tolist() for _ in range(3)]
    assert found[0] == found[1] == found[2]
    return [*found[0], model.evaluate(X, Y, batch_size=12, verbose=0)]


def fed(model: keras.Model) -> list[float]:
    """Train on data that a model makes in the threads of tf.data."""
    teacher = build(model.distribute_strategy)

    def batches():
        for start in range(0, 48, 12):
            yield X[start : start + 12], teacher.predict_on_batch(X[start : start + 12])

    signature = (tf.TensorSpec((12, 6), tf.float32), tf.TensorSpec((12, 1), tf.float32))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return model.fit(dataset, epochs=2, verbose=0).history["loss"]


WORK = {"fit": fit, "loop": loop, "predict": predict, "fed": fed, "fit again": fit}


def main() -> None:
    found: dict[str, object] = {}
    strategies = [tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage) for stage in (3, 0)]
    models = {name: build(strategies[number % 2]) for number, name in enumerate(WORK)}

    def work(name: str) -> None:
        try:
            found[name] = WORK[name](models[name])
        except BaseException as error:
            found[name] = repr(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in WORK]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    tfshard.initialize(num_devices=4, device_type="CPU")
    main()
    sys.exit()
