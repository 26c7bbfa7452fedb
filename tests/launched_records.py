"""A client that trains on its part of TFRecords; run by test_recipes.py."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "training"))

import test_recipes

import tfshard


def main(directory: pathlib.Path) -> None:
    tfshard.initialize(device_type="CPU")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), already_sharded=True)
    model = test_recipes.classifier(strategy=strategy)
    shard = strategy.input_shard
    data = test_recipes.records(directory, clients=shard.count, client=shard.index)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False).history
    rows = int(next(iter(data))[0].shape[0])
    print(f"FOUND {json.dumps(['history', history])}", flush=True)
    print(f"FOUND {json.dumps(['rows', rows])}", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
