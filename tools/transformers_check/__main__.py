"""Check weights of Hugging Face transformers in sharded models and back (tools/transformers_check.sh).

For each model, transformers writes a random model. KerasHub loads the directory under `strategy.scope()`, and computes
its output on the mesh. tfshard exports the sharded model, and transformers compares all weights bit for bit.

Then the script measures the memory of the process while a larger model is loaded and exported.
"""

import dataclasses
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
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        cases = [(name, dtype) for name in _MODELS.value for dtype in ("float32", "bfloat16")]
        sources = [root / f"{name}-{dtype}" for name, dtype in cases]
        written = _lines("write", *map(str, sources))
        loaded = [_load(*case, source) for case, source in zip(cases, sources, strict=True)]
        pairs = [f"{source}={target}" for source, case in zip(sources, loaded, strict=True) for target in case.exported]
        compared = iter(_lines("compare", *pairs))
        for (name, dtype), model, case in zip(cases, written, loaded, strict=True):
            results = [next(compared) for _ in case.exported]
            error = max((result["error"] for result in results), default=0.0)
            failed |= case.sharded == 0 or not case.error <= _TOLERANCE.value
            failed |= any(result["different"] for result in results) or (
                dtype == "float32" and error > _TOLERANCE.value
            )
            text = "; ".join(
                f"{result['tensors']} tensors, {len(result['different'])} with other bits, {result['files']} file(s)"
                for result in results
            )
            output = f"{case.error:.1e}" if dtype == "float32" else "-"
            parameters = model["parameters"]
            print(
                f"{name:8} {dtype:9} {parameters:10,} {case.sharded:8} {output:>8}  {text or 'KerasHub has no export'}"
            )
    if _MEMORY.value:
        memory.run()
    sys.exit(int(failed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A sharded model.

    Attributes:
        sharded: The number of sharded parameters.
        error: The largest difference of the output from transformers, in float32.
        exported: The directories to which it was exported.
    """

    sharded: int
    error: float
    exported: list[pathlib.Path]


def _load(name: str, dtype: str, source: pathlib.Path) -> _Loaded:
    """Load a model on a mesh, compute its output, and export it in one file and in several files."""
    import keras
    import keras_hub
    import numpy as np

    import tfshard

    keras.backend.clear_session()
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
    error = 0.0
    if dtype == "float32":
        output = model.predict(inputs, verbose=0)
        error = float(np.abs((output["sequence_output"] if name == "bert" else output) - expected["output"]).max())
    exported = []
    if name in _EXPORTED:
        for number, size in enumerate((None, _SHARD_SIZE)):
            exported.append(source.with_name(f"{source.name}-export-{number}"))
            tfshard.export_to_transformers(model, exported[-1], max_shard_size=size)
    return _Loaded(sharded=sharded, error=error, exported=exported)


def _lines(*command: str) -> list[dict]:
    """Run the half of the check that needs transformers, and return its lines of JSON."""
    return [json.loads(line) for line in _peer(_script(), *command).splitlines() if line.startswith("{")]


def _script() -> str:
    return str(pathlib.Path(__file__).with_name("in_transformers.py"))


def _peer(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [_PYTHON.value, *command], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"transformers failed in {command}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    app.run(main)
