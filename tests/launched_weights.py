"""A client that loads and exports weights in a folder of all clients; run by test_launched_weights.py."""

import json
import pathlib
import sys

import keras_hub
import numpy as np
from safetensors.numpy import load_file

import tfshard


def main(directory: pathlib.Path) -> None:
    """Load a directory of transformers, export it in three formats, read one back, and report what is the same."""
    rank = tfshard.collectives.rank()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), {".*": ()})
    with strategy.scope():
        model = keras_hub.models.GPT2Backbone.from_preset(str(directory / "gpt2"))
    sharded = sum("batch" in v.value.layout.storage for v in model.trainable_variables)
    weights = model.get_weights()
    read = {
        "one": tfshard.export(model, directory / "one.safetensors"),
        "several": tfshard.export(model, directory / "several.safetensors", max_shard_size=4000 / 2**30),
        "keras": tfshard.export(model, directory / "keras.weights.json", max_shard_size=16_000 / 2**30),
        "transformers": tfshard.export_to_transformers(model, directory / "exported"),
    }
    paths = {name: str(path.relative_to(directory)) for name, path in read.items()}
    same = {}
    for name in ("one", "several", "keras"):
        model.set_weights([np.zeros_like(each) for each in weights])
        tfshard.import_weights(model, read[name])
        same[name] = all(map(np.array_equal, model.get_weights(), weights))
    model.export_to_transformers(str(directory / "method"))
    method, source = (load_file(directory / each / "model.safetensors") for each in ("method", "gpt2"))
    same["method"] = all(np.array_equal(method[name], value) for name, value in source.items())
    left = sorted(path.name for path in directory.iterdir() if ".tmp-" in path.name)
    found = {"rank": rank, "sharded": sharded, "paths": paths, "same": same, "left": left}
    print("FOUND " + json.dumps(["weights", found]), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
