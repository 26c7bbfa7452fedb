"""Runs in the environment with JAX: trains the model of gpt.py under keras.distribution.ModelParallel, prints JSON.

Started by parity.py and timing.py. The layout map is the pickled object that `plan.to_keras_layout_map()` made.
"""

import json
import pathlib
import pickle

import gpt
from absl import app, flags

_CONFIG = flags.DEFINE_string("config", None, "Sizes, as JSON.", required=True)
_LAYOUT_MAP = flags.DEFINE_string("layout_map", None, "File of the pickled layout map.", required=True)
_WEIGHTS = flags.DEFINE_string("weights", None, "File of the initial weights (.npz); without it, random ones.")
_RESULT = flags.DEFINE_string("result", None, "File for the final weights (.npz).")
_TIME = flags.DEFINE_bool("time", False, "Measure the time of a step instead of losses.")


def main(argv):
    del argv
    import jax
    import keras
    import numpy as np

    config = gpt.Config.from_json(_CONFIG.value)
    if keras.backend.backend() != "jax" or len(jax.devices()) != gpt.DEVICES:
        raise app.UsageError(f"Keras on JAX with {gpt.DEVICES} devices is needed. Received: {jax.devices()}")
    layout_map = pickle.loads(pathlib.Path(_LAYOUT_MAP.value).read_bytes())
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    keras.utils.set_random_seed(0)
    model = gpt.build(config)
    sharded = {v.path: str(v.value.sharding.spec) for v in model.weights if not v.value.sharding.is_fully_replicated}
    if set(sharded) != set(layout_map):
        raise SystemExit(f"Sharded variables: {sorted(sharded)}. Layout map: {sorted(layout_map)}")
    if _WEIGHTS.value:
        stored = np.load(_WEIGHTS.value)
        model.set_weights([stored[v.path] for v in model.weights])
    model.compile(**gpt.compile_options())
    result = {"jax": jax.__version__, "keras": keras.__version__, "sharded": sharded}
    if _TIME.value:
        import common

        result |= common.fit_times(model, gpt.data(config), batch_size=config.batch)
    else:
        result["losses"] = gpt.losses(model, config)
    if _RESULT.value:
        np.savez(_RESULT.value, **{v.path: np.asarray(v.value) for v in model.weights})
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
