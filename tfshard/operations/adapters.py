"""Layers with LoRA are called by the two matrices of their adapters (`tfshard.graph.adapters`)."""

import functools

import keras

from tfshard.graph import adapters
from tfshard.operations import layer_patch


def install(model: keras.Model) -> None:
    """Patch the layers of a model that have LoRA."""
    for layer in adapters.adapted(model):
        for change in (layer_patch.ADAPTER, layer_patch.QUANTIZED_ADAPTER):
            layer_patch.apply(change, layer, functools.partial(adapters.call_function, layer))
