"""Directories with the files that Hugging Face transformers writes, of tiny models, and the models of KerasHub."""

import json
import pathlib

import keras_hub
import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file

WIDTH, INNER, VOCABULARY = 16, 32, 40


def _linear(shapes: dict, name: str, inputs: int, outputs: int, bias: bool = True) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: dict, name: str) -> None:
    shapes.update({f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)})


def gpt2() -> tuple[dict, dict]:
    shapes = {"transformer.wte.weight": (VOCABULARY, WIDTH), "transformer.wpe.weight": (8, WIDTH)}
    for layer in ("transformer.h.0", "transformer.h.1"):
        _norm(shapes, f"{layer}.ln_1")
        _norm(shapes, f"{layer}.ln_2")
        # GPT-2's "Conv1D" stores kernels as Keras does.
        for name, inputs, outputs in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            shapes.update({f"{layer}.{name}.weight": (inputs, outputs), f"{layer}.{name}.bias": (outputs,)})
    _norm(shapes, "transformer.ln_f")
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCABULARY, "n_layer": 2,
        "n_head": 2, "n_embd": WIDTH, "n_positions": 8, "resid_pdrop": 0.0,
    }  # fmt: skip
    return config, shapes


def _decoder(shapes: dict, heads: int, kv_heads: int, head_dim: int) -> None:
    shapes["model.embed_tokens.weight"] = (VOCABULARY, WIDTH)
    for layer in ("model.layers.0", "model.layers.1"):
        for name, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            _linear(shapes, f"{layer}.self_attn.{name}_proj", WIDTH, outputs * head_dim, bias=False)
        _linear(shapes, f"{layer}.self_attn.o_proj", heads * head_dim, WIDTH, bias=False)
        for name in ("gate", "up"):
            _linear(shapes, f"{layer}.mlp.{name}_proj", WIDTH, INNER, bias=False)
        _linear(shapes, f"{layer}.mlp.down_proj", INNER, WIDTH, bias=False)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (WIDTH,)
    shapes["model.norm.weight"] = (WIDTH,)


def llama() -> tuple[dict, dict]:
    shapes: dict = {}
    _decoder(shapes, heads=4, kv_heads=2, head_dim=4)
    _linear(shapes, "lm_head", WIDTH, VOCABULARY, bias=False)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": WIDTH,
        "intermediate_size": INNER, "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None,
    }  # fmt: skip
    return config, shapes


def mistral() -> tuple[dict, dict]:
    config, shapes = llama()
    names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return {**config, **names, "rms_norm_eps": 1e-6, "sliding_window": 8}, shapes


def gemma() -> tuple[dict, dict]:
    shapes: dict = {}
    _decoder(shapes, heads=2, kv_heads=1, head_dim=8)
    config = {
        "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "vocab_size": VOCABULARY,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "hidden_size": WIDTH, "intermediate_size": INNER,
    }  # fmt: skip
    return config, shapes


def bert() -> tuple[dict, dict]:
    shapes = {
        f"bert.embeddings.{name}_embeddings.weight": (rows, WIDTH)
        for name, rows in (("word", VOCABULARY), ("position", 8), ("token_type", 2))
    }
    _norm(shapes, "bert.embeddings.LayerNorm")
    for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        for name in ("query", "key", "value"):
            _linear(shapes, f"{layer}.attention.self.{name}", WIDTH, WIDTH)
        _linear(shapes, f"{layer}.attention.output.dense", WIDTH, WIDTH)
        _norm(shapes, f"{layer}.attention.output.LayerNorm")
        _linear(shapes, f"{layer}.intermediate.dense", WIDTH, INNER)
        _linear(shapes, f"{layer}.output.dense", INNER, WIDTH)
        _norm(shapes, f"{layer}.output.LayerNorm")
    _linear(shapes, "bert.pooler.dense", WIDTH, WIDTH)
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": VOCABULARY, "num_hidden_layers": 2,
        "num_attention_heads": 2, "hidden_size": WIDTH, "intermediate_size": INNER, "max_position_embeddings": 8,
    }  # fmt: skip
    return config, shapes


MODELS = {
    "gpt2": (gpt2, keras_hub.models.GPT2Backbone),
    "llama": (llama, keras_hub.models.Llama3Backbone),
    "mistral": (mistral, keras_hub.models.MistralBackbone),
    "gemma": (gemma, keras_hub.models.GemmaBackbone),
    "bert": (bert, keras_hub.models.BertBackbone),
}


def write(name: str, directory: pathlib.Path, *, dtype: str = "float32", files: int = 1) -> pathlib.Path:
    """Write the directory of a model with random weights.

    Args:
        name: The model.
        directory: The directory.
        dtype: The dtype of the weights.
        files: The number of safetensors files. Several files have an index.
    """
    config, shapes = MODELS[name][0]()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.RandomState(0)
    numpy_dtype = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    tensors = {key: random.normal(size=shape).astype("float32").astype(numpy_dtype) for key, shape in shapes.items()}
    names = sorted(tensors)
    parts = [names[number::files] for number in range(files)]
    file_of = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    if files == 1:
        file_of = ["model.safetensors"]
    else:
        weight_map = {key: file for part, file in zip(parts, file_of, strict=True) for key in part}
        index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for part, file in zip(parts, file_of, strict=True):
        save_file({key: tensors[key] for key in part}, directory / file, metadata={"format": "pt"})
    return directory
