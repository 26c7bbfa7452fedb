"""KerasHub's export of models to the format of Hugging Face transformers, and its layers with experts."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

# Takes a backbone, and whether to include the head, and returns weights by their names in transformers.
WeightsMap = Callable[..., dict[str, Any]]


def hub_weights_maps() -> dict[str, WeightsMap]:
    """Return KerasHub's functions that name a backbone's weights, by the name of the backbone's class.

    Empty if KerasHub is not installed, or is older than its export (`hf_exporter.MODEL_EXPORTERS`).
    """
    try:
        module = importlib.import_module("keras_hub.src.utils.transformers.export.hf_exporter")
    except ImportError:
        return {}
    found: dict[str, WeightsMap] = getattr(module, "MODEL_EXPORTERS", {})
    return found


@contextlib.contextmanager
def replaced_weights_map(backbone: keras.Model, replacement: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """Replace the function that names a backbone's weights while the context is open.

    Args:
        backbone: A backbone of a class in `hub_weights_maps`.
        replacement: Receives KerasHub's function, and then the arguments of the function.
    """
    maps, name = hub_weights_maps(), type(backbone).__name__
    original = maps[name]
    maps[name] = lambda *args, **kwargs: replacement(original, *args, **kwargs)
    try:
        yield
    finally:
        maps[name] = original


# The layers that compute all experts of a mixture for all tokens: `(tokens, width)` to `(experts, tokens, width)`. The
# first dim of each of their variables is the expert.
_EXPERT_BANKS = (
    "GptOssExperts",
    "MixtralMoeExperts",
    "Qwen3MoeExperts",
    "Qwen3_5MoeExperts",
    "QwenMoeExperts",
)


def is_expert_bank(layer: keras.Layer) -> bool:
    """Return whether a layer is one of KerasHub's layers with all experts of a mixture of experts."""
    return type(layer).__name__ in _EXPERT_BANKS and type(layer).__module__.startswith("keras_hub.")
