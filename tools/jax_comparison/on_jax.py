"""Train a model of tools/report/models.py under keras.distribution.ModelParallel, in the environment with JAX.

parity.py starts this program. The layout map is the pickled result of `plan.to_keras_layout_map()`. The program prints
JSON.
"""

import json
import pathlib
import pickle

from absl import app, flags

from tools.jax_comparison import losses
from tools.report import models

_MODEL = flags.DEFINE_string("model", None, "Sizes, as JSON.", required=True)
_STEPS = flags.DEFINE_integer("steps", None, "Number of steps.", required=True)
_LAYOUT_MAP = flags.DEFINE_string("layout_map", None, "File of the pickled layout map.", required=True)
_WEIGHTS = flags.DEFINE_string("weights", None, "File of the initial weights (.npz).", required=True)
_RESULT = flags.DEFINE_string("result", None, "File for the final weights (.npz).", required=True)


def main(argv: list[str]) -> None:
    del argv
    import jax
    import keras
    import numpy as np

    if keras.backend.backend() != "jax":
        raise app.UsageError(f"Keras on JAX is needed. Received: {keras.backend.backend()}")
    layout_map = pickle.loads(pathlib.Path(_LAYOUT_MAP.value).read_bytes())
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    model = models.Model(**json.loads(_MODEL.value))
    built = models.build(model)
    sharded = {v.path: str(v.value.sharding.spec) for v in built.weights if not v.value.sharding.is_fully_replicated}
    if set(sharded) != set(layout_map):
        raise SystemExit(f"Sharded variables: {sorted(sharded)}. Layout map: {sorted(layout_map)}")
    stored = np.load(_WEIGHTS.value)
    built.set_weights([stored[v.path] for v in built.weights])
    built.compile(**models.options())
    found = losses.of(built, model, _STEPS.value)
    np.savez(_RESULT.value, **{v.path: np.asarray(v.value) for v in built.weights})
    print(json.dumps({"jax": jax.__version__, "keras": keras.__version__, "sharded": sharded, "losses": found}))


if __name__ == "__main__":
    app.run(main)
