"""A client that profiles many steps, separately and in a fit; run by test_launched_profiles.py."""

import json

import keras
import numpy as np
import tensorflow as tf

import tfshard

PROFILES = 20
LAYERS = 8
X = np.random.RandomState(0).randn(8, 32).astype("float32")


def compiled() -> keras.Model:
    """Return a model that gathers and reduces each kernel and each bias separately.

    The more collectives a step has, the more threads its trace has.
    """
    keras.utils.set_random_seed(1)
    model = tfshard.Sequential([keras.Input((32,)), *[keras.layers.Dense(32, "tanh") for _ in range(LAYERS)]])
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(batch=4), analyzer=tfshard.ParameterAnalyzer(group_threshold_bytes=0)
    )
    model.compile("adam", "mse", strategy=strategy)
    return model


def main() -> None:
    tfshard.initialize(device_type="CPU")
    started = []
    profile = tf.profiler.experimental.Profile
    tf.profiler.experimental.Profile = lambda *arguments: started.append(1) or profile(*arguments)
    model = compiled()
    profiles = [tfshard.profile_step(model, (X, X)) for _ in range(PROFILES)]
    by_hand = len(started)
    telemetry = tfshard.callbacks.Telemetry(profile_every=2)
    data = tf.data.Dataset.from_tensors((X, X)).repeat(2 * PROFILES)
    history = model.fit(data, verbose=0, callbacks=[telemetry]).history
    found = {
        "started": [by_hand, len(started) - by_hand],
        "counts": [profile.count() for profile in profiles],
        "last": [[each.kind, each.name, each.seconds] for each in profiles[-1].collectives],
        "hidden": [profile.hidden for profile in profiles],
        "devices": len(profiles[-1].variable_bytes),
        "collective_seconds": history["collective_seconds"],
        "loss": history["loss"],
    }
    print(f"FOUND {json.dumps(['profiles', found])}", flush=True)


if __name__ == "__main__":
    main()
