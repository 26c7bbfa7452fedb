"""The half of the check that runs with transformers and PyTorch, without TensorFlow.

python in_transformers.py write MODEL-DTYPE...       # directories with a random model, its logits and their inputs
python in_transformers.py compare WRITTEN=OTHER...    # which tensors of OTHER have other bits, and its logits
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

_WIDTH, _INNER, _VOCABULARY, _LAYERS = 64, 128, 200, 2


def config_of(name: str) -> transformers.PretrainedConfig:
    """Return the config of a small model."""
    common = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _LAYERS}
    decoder = {
        **common, "intermediate_size": _INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=_VOCABULARY, n_embd=_WIDTH, n_layer=_LAYERS, n_head=4, n_positions=64, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    if name == "llama":
        # The maximum number of positions that KerasHub writes for Llama 3.
        return transformers.LlamaConfig(**decoder | {"max_position_embeddings": 8192}, tie_word_embeddings=False)
    if name == "mistral":
        return transformers.MistralConfig(**decoder, sliding_window=64, tie_word_embeddings=False)
    if name == "qwen2":
        return transformers.Qwen2Config(**decoder, tie_word_embeddings=False)
    if name == "gemma":
        # KerasHub exports one key and value head of Gemma.
        return transformers.GemmaConfig(**decoder | {"num_key_value_heads": 1}, head_dim=16)
    if name == "bert":
        return transformers.BertConfig(
            **common, intermediate_size=_INNER, num_attention_heads=4, max_position_embeddings=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    raise ValueError(f"name must be one of gpt2, llama, mistral, qwen2, gemma and bert. Received: name={name!r}")


def _class_of(config: transformers.PretrainedConfig) -> type:
    return transformers.BertModel if config.model_type == "bert" else transformers.AutoModelForCausalLM


def _output(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found = model(torch.from_numpy(tokens))
    result = found.last_hidden_state if hasattr(found, "last_hidden_state") else found.logits
    return result.to(torch.float32).numpy()


def as_kerashub(model: torch.nn.Module) -> torch.nn.Module:
    """Change a model of transformers in the way in which KerasHub is known to differ, in place.

    KerasHub's converter of Mistral casts each tensor to float16. KerasHub's BERT approximates GELU with tanh, where
    transformers uses the error function.
    """
    if model.config.model_type == "mistral":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.float16))
    elif model.config.model_type == "bert":
        for layer in model.encoder.layer:
            layer.intermediate.intermediate_act_fn = transformers.activations.ACT2FN["gelu_pytorch_tanh"]
    return model


def write(directory: pathlib.Path, name: str, dtype: str) -> None:
    """Write a random model as transformers does, and its output in float32."""
    torch.manual_seed(0)
    config = config_of(name)
    model = transformers.BertModel(config) if name == "bert" else _class_of(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Biases and norms, which start as zeros or ones.
                parameter.add_(torch.randn(parameter.shape) * 0.05)
            else:  # At this width the activations are as large as those of a trained model of width 768 and std 0.02.
                parameter.normal_(std=0.07)
    model.eval().to(getattr(torch, dtype)).save_pretrained(directory)
    tokens = np.random.RandomState(0).randint(0, _VOCABULARY, (2, 12))
    output = _output(model.to(torch.float32), tokens)
    np.savez(directory / "expected.npz", tokens=tokens, output=output, kerashub=_output(as_kerashub(model), tokens))
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}))


def compare(directory: pathlib.Path, other: pathlib.Path) -> None:
    """Compare the weights of two directories bit for bit, as transformers loads them, and the outputs."""
    expected = np.load(directory / "expected.npz")
    config = transformers.AutoConfig.from_pretrained(directory)
    source, exported = (_class_of(config).from_pretrained(each, dtype="auto").eval() for each in (directory, other))
    different = _different(exported, source)
    unexplained = _different(exported, as_kerashub(source))
    output = _output(exported.to(torch.float32), expected["tokens"])
    found = {
        "tensors": len(source.state_dict()),
        "different": different,
        "unexplained": unexplained,
        "error": float(np.abs(output - expected["output"]).max()),
        "unexplained_error": float(np.abs(output - expected["kerashub"]).max()),
        "files": len(list(other.glob("*.safetensors"))),
    }
    print(json.dumps(found))


def _different(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    ours, theirs = model.state_dict(), other.state_dict()
    return sorted(ours.keys() ^ theirs.keys()) + [
        key for key in theirs.keys() & ours.keys()
        if ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key])
    ]  # fmt: skip


def main() -> None:
    """Run the command of the command line."""
    transformers.logging.set_verbosity_error()
    command, *arguments = sys.argv[1:]
    for argument in arguments:
        if command == "write":
            path = pathlib.Path(argument)
            write(path, *path.name.split("-"))
        else:
            compare(*map(pathlib.Path, argument.split("=")))


if __name__ == "__main__":
    main()
