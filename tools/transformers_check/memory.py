"""Measure the memory of the process while weights of transformers are loaded and exported.

The devices are CPU devices, whose memory is the process's: what the sharded model stores is subtracted.
"""

import json
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable

_MIB = 1 << 20


class Peak:
    """The largest anonymous memory of the process in a context, in bytes above its beginning."""

    def __enter__(self) -> "Peak":
        self._start = self._highest = _anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._highest = max(self._highest, _anonymous())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = self._highest - self._start


def _anonymous() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def write_llama(directory: pathlib.Path, *, dtype: str, width: int = 512, layers: int = 8, rows: int = 32_000) -> int:
    """Write a random Llama as transformers does, a file of 245 MiB in float32, and return the number of its values."""
    import numpy as np
    import tensorflow as tf
    from safetensors.numpy import save_file

    inner, heads, kv_heads = 4 * width, 8, 4
    shapes = {
        "model.embed_tokens.weight": (rows, width),
        "lm_head.weight": (rows, width),
        "model.norm.weight": (width,),
    }
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name, size in (("q", width), ("k", width * kv_heads // heads), ("v", width * kv_heads // heads)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (size, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, width)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{layer}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": width,
        "intermediate_size": inner, "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    random, numpy_dtype = np.random.default_rng(0), tf.as_dtype(dtype).as_numpy_dtype
    tensors = {name: random.standard_normal(shape, np.float32).astype(numpy_dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def run() -> None:
    """Measure, and print a table."""
    import keras_hub

    import tfshard

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    llama = keras_hub.models.Llama3Backbone

    def load(directory: pathlib.Path) -> object:
        with strategy.scope():
            return llama.from_preset(str(directory))

    print("Memory of the process above the sharded model, in units of the largest tensor (62.5 MiB in float32):")
    print(f"{'what':34} {'model MiB':>9} {'above MiB':>9} {'tensors':>8}")
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        write_llama(root / "small", dtype="float32", width=64, layers=1, rows=64)
        tfshard.export_to_transformers(load(root / "small"), root / "small export")  # Imports and traces.
        for dtype in ("float32", "bfloat16"):
            values = write_llama(root / dtype, dtype=dtype)
            model, extra = _measured(lambda dtype=dtype: load(root / dtype))
            _row(f"from_preset of a {dtype} file", 4 * values, extra - 4 * values)
        _, extra = _measured(lambda: tfshard.export_to_transformers(model, root / "ours"))
        _row("export_to_transformers", 4 * values, extra)
        _, extra = _measured(lambda: type(model).export_to_transformers(model, str(root / "theirs")))
        _row("KerasHub's own export", 4 * values, extra)
        _, extra = _measured(lambda: tfshard.export(model, root / "ours.safetensors"))
        _row("tfshard.export to safetensors", 4 * values, extra)
        _, extra = _measured(lambda: tfshard.import_weights(model, root / "ours.safetensors"))
        _row("tfshard.import_weights", 4 * values, extra)


def _measured(function: Callable[[], object]) -> tuple[object, int]:
    with Peak() as peak:
        result = function()
    return result, peak.bytes


def _row(what: str, model: int, above: int) -> None:
    print(f"{what:34} {model / _MIB:9.0f} {above / _MIB:9.0f} {above / (32_000 * 512 * 4):8.2f}", flush=True)
