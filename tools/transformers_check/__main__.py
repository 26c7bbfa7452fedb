"""Check weights of Hugging Face transformers in sharded models and back (tools/transformers_check.sh).

For each model, transformers writes a random model. KerasHub loads the directory under `strategy.scope()`, and computes
its output on the mesh. tfshard exports the sharded model, and transformers compares all weights bit for bit.

KerasHub also loads and exports the directory on one device without tfshard. Each row must have the weights and the
export of this plain model bit for bit, and its output. Each row must also match transformers, but for the differences
that KerasHub is known to have, which `as_kerashub` in in_transformers.py applies to the model of transformers.

Then the script measures the memory of the process while a larger model is loaded and exported.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

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
    print("Largest differences of the output, in float32, and tensors of the export with other bits:")
    print(
        f"{'model':8} {'dtype':8} {'parameters':>10} {'sharded':>7} | {'output: transformers':>20} {'explained':>9} "
        f"{'plain':>8} | {'tensors':>7} {'files':>5} {'bits: transformers':>18} {'explained':>9} {'plain':>5}"
    )
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
            passed = _passes(dtype, case, results)
            failed |= not passed
            left = f"{name:8} {dtype:8} {model['parameters']:10,} {case.sharded:7} | {case.outputs}"
            for number, result in enumerate(results):
                plain = case.other_bits[number]
                print(
                    f"{left} | {result['tensors']:7} {result['files']:5} {len(result['different']):18} "
                    f"{len(result['unexplained']):9} {plain:5}{'' if passed else '  FAILED'}"
                )
            if not results:
                print(f"{left} | KerasHub has no export{'' if passed else '  FAILED'}")
    print("explained: transformers with the known differences of KerasHub; plain: KerasHub on one device, no tfshard")
    if _MEMORY.value:
        memory.run()
    sys.exit(int(failed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A sharded model, compared with transformers and with a plain model of KerasHub.

    Attributes:
        sharded: The number of sharded parameters.
        same_weights: Whether all weights have the bits of the plain model.
        errors: The largest differences of the output from transformers, from transformers with the known differences
            of KerasHub, and from the plain model; None where the output is not compared.
        exported: The directories to which it was exported.
        other_bits: For each of these, the number of tensors that are not those of the plain model's export.
    """

    sharded: int
    same_weights: bool
    errors: tuple[float, float, float] | None
    exported: list[pathlib.Path]
    other_bits: list[int]

    @property
    def outputs(self) -> str:
        """The columns of the outputs in the table."""
        widths = (20, 9, 8)
        values = ["-"] * 3 if self.errors is None else [f"{error:.1e}" for error in self.errors]
        return " ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _passes(dtype: str, case: _Loaded, results: list[dict]) -> bool:
    """Return whether a model matches plain KerasHub, and transformers but for the known differences of KerasHub."""
    tolerance = _TOLERANCE.value
    passes = case.sharded > 0 and case.same_weights and not any(case.other_bits)
    if case.errors is not None:
        transformers, explained, plain = case.errors
        passes &= plain <= tolerance and min(transformers, explained) <= tolerance
    for result in results:
        passes &= not result["different"] or not result["unexplained"]
        if dtype == "float32":
            passes &= min(result["error"], result["unexplained_error"]) <= tolerance
    return passes


def _load(name: str, dtype: str, source: pathlib.Path) -> _Loaded:
    """Load a model on a mesh and on one device, compute the outputs, and export in one file and in several files."""
    import keras
    import numpy as np

    import tfshard

    keras.backend.clear_session()
    plain = _task(name, str(source), dtype)
    keras.backend.clear_session()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), {".*": ()})
    with strategy.scope():
        model = _task(name, str(source), dtype)
    tfshard.as_distributed(model)
    model.compile(optimizer=None, loss=None, strategy=strategy)
    sharded = sum(tuple(each.value.layout.storage) != (None,) * len(each.shape) for each in model.trainable_variables)
    weights = [[(each.path, each.numpy().tobytes()) for each in one.weights] for one in (model, plain)]
    errors = None
    if dtype == "float32":
        expected = np.load(source / "expected.npz")
        output, plain_output = (_output(name, one, expected["tokens"]) for one in (model, plain))
        others = (expected["output"], expected["kerashub"], plain_output)
        errors = tuple(float(np.abs(output - other).max()) for other in others)
    exported = []
    if name in _EXPORTED:
        plain_export = source.with_name(f"{source.name}-plain")
        plain.export_to_transformers(str(plain_export))
        for number, size in enumerate((None, _SHARD_SIZE)):
            exported.append(source.with_name(f"{source.name}-export-{number}"))
            tfshard.export_to_transformers(model, exported[-1], max_shard_size=size)
    return _Loaded(
        sharded=sharded,
        same_weights=weights[0] == weights[1],
        errors=errors,
        exported=exported,
        other_bits=[_other_bits(each, plain_export) for each in exported],
    )


def _task(name: str, source: str, dtype: str) -> Any:
    """Return KerasHub's model of a directory."""
    import keras_hub

    backbone = keras_hub.models.Backbone.from_preset(source, dtype=dtype)
    if name == "bert":
        return backbone
    kinds = {
        cls.backbone_cls.__name__: cls
        for cls in vars(keras_hub.models).values()
        if hasattr(cls, "generate_step") and cls.backbone_cls is not None
    }
    return kinds[type(backbone).__name__](backbone=backbone, preprocessor=None)


def _output(name: str, model: Any, tokens: Any) -> Any:
    import numpy as np

    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    if name == "bert":
        return model.predict(inputs | {"segment_ids": np.zeros_like(tokens)}, verbose=0)["sequence_output"]
    return model.predict(inputs, verbose=0)


def _other_bits(directory: pathlib.Path, other: pathlib.Path) -> int:
    """Return the number of tensors that differ in two directories, in bits, dtype, shape or name."""
    ours, theirs = _tensors(directory), _tensors(other)
    return sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys())


def _tensors(directory: pathlib.Path) -> dict[str, tuple]:
    from safetensors.numpy import load_file

    return {
        key: (value.dtype.name, value.shape, value.tobytes())
        for file in directory.glob("*.safetensors")
        for key, value in load_file(file).items()
    }


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
