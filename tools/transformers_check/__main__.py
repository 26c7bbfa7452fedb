"""Check weights of Hugging Face transformers in sharded models and back (tools/transformers_check.sh).

For each model, transformers writes a random model. KerasHub loads the directory under `strategy.scope()`, and computes
its output on the mesh. tfshard exports the sharded model, and transformers compares all weights bit for bit.

Then the script measures the memory of the process while a larger model is loaded and exported.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags

from tools.transformers_check import memory

_PYTHON = flags.DEFINE_string(
    "transformers_python", None, "Python of the environment with transformers.", required=True
)
_MODELS = flags.DEFINE_list("models", ["gpt2", "llama", "mistral", "qwen2", "gemma", "bert"], "The models.")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-5, "Largest difference of an output.")
_MEMORY = flags.DEFINE_bool("memory", True, "Whether to measure memory too.")

# KerasHub exports no BERT.
_EXPORTED = ("gpt2", "llama", "mistral", "qwen2", "gemma")
_SHARD_SIZE = 100_000 / 2**30


def main(argv: list[str]) -> None:
    del argv
    import keras
    import keras_hub

    import tfshard

    tfshard.initialize(num_devices=4, device_type="CPU")
    versions = _peer("-c", "import torch, transformers; print(transformers.__version__, torch.__version__)").split()
    print(
        f"tfshard {tfshard.__version__}, Keras {keras.__version__}, KerasHub {keras_hub.__version__}, transformers "
        f"{versions[0]}, PyTorch {versions[1]}; 4 CPU devices"
    )
    print(f"{'model':8} {'dtype':9} {'parameters':>10} {'sharded':>8} {'output':>8}  exported")
    failed = False
    for name in _MODELS.value:
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as directory:
                failed |= _check(pathlib.Path(directory), name, dtype)
    if _MEMORY.value:
        memory.run()
    sys.exit(int(failed))


def _check(directory: pathlib.Path, name: str, dtype: str) -> bool:
    """Check a model, print a row, and return whether the check failed."""
    import keras
    import keras_hub
    import numpy as np

    import tfshard

    keras.backend.clear_session()
    source = directory / "source"
    written = json.loads(_peer(_script(), "write", str(source), name, dtype).splitlines()[-1])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), {".*": ()})
    with strategy.scope():
        backbone = keras_hub.models.Backbone.from_preset(str(source), dtype=dtype)
    expected = np.load(source / "expected.npz")
    inputs = {"token_ids": expected["tokens"], "padding_mask": np.ones_like(expected["tokens"])}
    if name == "bert":
        model = backbone
        inputs["segment_ids"] = np.zeros_like(expected["tokens"])
    else:
        kinds = {
            cls.backbone_cls.__name__: cls
            for cls in vars(keras_hub.models).values()
            if hasattr(cls, "generate_step") and cls.backbone_cls is not None
        }
        model = kinds[type(backbone).__name__](backbone=backbone, preprocessor=None)
    tfshard.as_distributed(model)
    model.compile(optimizer=None, loss=None, strategy=strategy)
    sharded = sum(tuple(each.value.layout.storage) != (None,) * len(each.shape) for each in model.trainable_variables)
    error = "-"
    failed = sharded == 0
    if dtype == "float32":
        output = model.predict(inputs, verbose=0)
        difference = float(np.abs((output["sequence_output"] if name == "bert" else output) - expected["output"]).max())
        failed |= not difference <= _TOLERANCE.value
        error = f"{difference:.1e}"
    text = "no export in KerasHub"
    if name in _EXPORTED:
        done = [_compared(model, source, directory / f"export{size}", size) for size in (None, _SHARD_SIZE)]
        failed |= any(each["different"] for each in done)
        text = "; ".join(
            f"{each['tensors']} tensors, {len(each['different'])} with other bits, in {each['files']} file(s)"
            for each in done
        )
    print(f"{name:8} {dtype:9} {written['parameters']:10,} {sharded:8} {error:>8}  {text}", flush=True)
    return failed


def _compared(model: object, source: pathlib.Path, target: pathlib.Path, shard_size: float | None) -> dict:
    import tfshard

    tfshard.export_to_transformers(model, target, max_shard_size=shard_size)
    files = len(list(target.glob("*.safetensors")))
    return {**json.loads(_peer(_script(), "compare", str(source), str(target)).splitlines()[-1]), "files": files}


def _script() -> str:
    return str(pathlib.Path(__file__).with_name("in_transformers.py"))


def _peer(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [_PYTHON.value, *command], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    if done.returncode > 1 or not done.stdout:
        raise RuntimeError(f"transformers failed in {command}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    app.run(main)
