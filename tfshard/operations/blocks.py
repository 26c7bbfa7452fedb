"""Choose the layers that are blocks: the backward pass computes them again (`tfshard.storage.recomputing`).

A block is a layer that holds other layers, such as a transformer layer. In a flat model, a block is a group of layers
with names that begin alike, such as `conv2_block1_1_conv`. Layers that were made under a `keras.RematScope` are blocks
with Keras's meaning.
"""

import collections
import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras

from tfshard import _private
from tfshard.errors import StrategyError
from tfshard.operations import layer_patch
from tfshard.operations.layer_patch import BLOCK, REMAT
from tfshard.storage import recomputing, steps

AUTO = "auto"

# The layers that are blocks, each with the name of its block, by the id of the layer.
_Blocks: TypeAlias = dict[int, tuple[keras.Layer, str]]

# How flat models name the layers of a block: conv2_block1_1_conv, block_3_expand, block2a_dwconv, mixed4.
_NAMED_BLOCK = re.compile(r"(.*?block_?\d+[a-z]?)_.*")


def install(model: keras.Model, blocks: str | Sequence[str], keep_products: bool) -> list[str]:
    """Mark the blocks of a model.

    Args:
        model: A built model.
        blocks: `"auto"`, or regular expressions of layers' paths.
        keep_products: True to keep the results of matrix products and convolutions in memory.

    Returns:
        The names of the blocks.

    Raises:
        StrategyError: The model is not built or has no blocks, or a pattern matches no layer or is no regular
            expression.
    """
    found = _blocks_of(model, blocks)
    keeps = recomputing.PRODUCTS if keep_products else frozenset()
    for layer, name in found.values():
        _mark(layer, name, keeps)
    return list(dict.fromkeys(name for _, name in found.values()))


@contextlib.contextmanager
def marked(model: keras.Model, blocks: str | Sequence[str] = AUTO) -> Iterator[None]:
    """Mark the blocks of layers that are not marked yet, until the scope ends.

    Raises:
        StrategyError: As `install`.
    """
    found = _blocks_of(model, blocks)
    with contextlib.ExitStack() as stack:
        for layer, name in found.values():
            if all(patch.change is not BLOCK for patch in layer_patch.patches_on(layer)):
                make = functools.partial(_BlockCall, name=name, keeps=frozenset())
                stack.enter_context(layer_patch.applied(BLOCK, layer, make))
        yield


def can_mark(model: keras.Model) -> bool:
    """Return whether `marked` finds blocks in a model without marked blocks."""
    if has_marked(model):
        return False
    try:
        return bool(_blocks_of(model, AUTO))
    except StrategyError:
        return False


def repeated_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a built model that hold several layers with weights and repeat, the outermost ones."""
    return _repeated([layer for layer in _private.flatten_layers(model) if layer is not model])


def compilable_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the repeated layers, and the layers with layers inside that patterns made blocks, the outermost ones."""
    marked = [patch.owner for patch in marks(model) if isinstance(patch.owner, keras.Layer)]
    with_layers = [layer for layer in marked if len(_private.flatten_layers(layer)) > 1]
    found = {id(layer): layer for layer in (*with_layers, *repeated_layers(model))}
    below = [_private.flatten_layers(layer) for layer in found.values()]
    inside = {id(each) for layers in below for each in layers if each is not layers[0]}
    return [layer for layer in found.values() if id(layer) not in inside]


def keeps_of(patch: layer_patch.LayerPatch) -> frozenset[str]:
    """Return the types of operations whose results stay in memory, of a patch that marks a block."""
    return patch.replacement.keeps if isinstance(patch.replacement, _BlockCall) else frozenset()


def has_marked(model: keras.Model) -> bool:
    """Return whether a model has blocks that are computed again."""
    return any(patch.change in (BLOCK, REMAT) for patch in layer_patch.patches_of(model))


def marks(model: keras.Model) -> list[layer_patch.LayerPatch]:
    """Return the patches of a model's layers that are blocks. A later call of `install` makes other patches."""
    return [
        patch
        for layer in _private.flatten_layers(model)
        for patch in layer_patch.patches_on(layer)
        if patch.change is BLOCK
    ]


def mark_opened(model: keras.Model) -> None:
    """Mark the layers of nested models that are blocks: a pipeline calls these layers, and not the nested models."""
    inside: set[int] = set()
    for patch in marks(model):
        owner, made = patch.owner, patch.replacement
        if id(owner) in inside or not isinstance(owner, keras.Model) or not isinstance(made, _BlockCall):
            continue
        for layer in _private.flatten_layers(owner):
            if layer is not owner:
                inside.add(id(layer))
                _mark(layer, made.name, made.keeps)


def _mark(layer: keras.Layer, name: str, keeps: frozenset[str]) -> None:
    """Make a layer a block, in place of the block that it was."""
    layer_patch.undo_of(BLOCK, layer)
    layer_patch.apply(BLOCK, layer, functools.partial(_BlockCall, name=name, keeps=keeps))


def install_remat(model: keras.Model) -> None:
    """Make blocks of layers that were made under a `keras.RematScope`, in place of Keras's `tf.recompute_grad`.

    `tf.recompute_grad` refuses keyword arguments in graphs, and hides its variable reads from the step.
    """
    for operation in layer_patch.operations_of(model):
        if _private.remat_mode(operation) is not None:
            layer_patch.apply(REMAT, operation, functools.partial(_rematerialized, operation))


def _blocks_of(model: keras.Model, blocks: str | Sequence[str]) -> _Blocks:
    """Return the layers that are blocks."""
    if not model.built:
        raise StrategyError(
            f"Model '{model.name}' is not built, so its blocks are not known. Give it a keras.Input, or call "
            f"model.build(input_shape). Received: model={model!r}"
        )
    layers = [layer for layer in _private.flatten_layers(model) if layer is not model]
    return _found(layers) if blocks == AUTO else _matched(layers, blocks)


def _repeated(layers: Sequence[keras.Layer]) -> list[keras.Layer]:
    """Return the outermost layers that hold several layers with weights and repeat."""
    inside: set[int] = set()
    by_kind: dict[tuple[type, frozenset[type]], list[keras.Layer]] = collections.defaultdict(list)
    for layer in layers:
        below = [each for each in _private.flatten_layers(layer) if each is not layer]
        weighty = [each for each in below if each.weights]
        if id(layer) not in inside and len(weighty) > 1:
            by_kind[type(layer), frozenset(map(type, weighty))].append(layer)
    repeated = [layer for alike in by_kind.values() if len(alike) > 1 for layer in alike]
    # The outermost: a layer in a block is part of it.
    for layer in repeated:
        inside.update(id(each) for each in _private.flatten_layers(layer) if each is not layer)
    return [layer for layer in repeated if id(layer) not in inside]


def _found(layers: Sequence[keras.Layer]) -> _Blocks:
    """Return the layers of repeated blocks."""
    found = {id(layer): (layer, layer.path or layer.name) for layer in _repeated(layers)}
    if found:
        return found
    named = {id(layer): (layer, match.group(1)) for layer in layers if (match := _NAMED_BLOCK.fullmatch(layer.name))}
    if not named:
        raise StrategyError(
            "Found no blocks to recompute: no layer that holds two layers with weights repeats, and no layer has a "
            "name such as 'conv2_block1_1_conv'. Name the blocks by regular expressions of layers' paths. Some: "
            f"{_some(layers)}"
        )
    return named


def _matched(layers: Sequence[keras.Layer], blocks: str | Sequence[str]) -> _Blocks:
    """Return the layers whose paths match regular expressions."""
    patterns = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    found: _Blocks = {}
    for pattern in patterns:
        try:
            matches = [(layer, re.fullmatch(pattern, layer.path or layer.name)) for layer in layers]
        except (TypeError, re.error) as error:
            raise StrategyError(
                f"blocks must be 'auto' or regular expressions of layers' paths. Received: {pattern!r}"
            ) from error
        new = {
            id(layer): (layer, "/".join(map(str, match.groups())) or match.group()) for layer, match in matches if match
        }
        if not new:
            raise StrategyError(f"blocks match no layer: {pattern!r}. Some paths: {_some(layers)}")
        found |= new
    return found


def _some(layers: Sequence[keras.Layer]) -> list[str]:
    return [layer.path or layer.name for layer in layers if not isinstance(layer, keras.layers.InputLayer)][:8]


class _BlockCall:
    """A layer's `call` that tells the step which operations belong to a block.

    Attributes:
        name: The name of the block.
        keeps: Types of operations. Their results stay in memory.
    """

    def __init__(self, call: layer_patch.Method, *, name: str, keeps: frozenset[str]):
        functools.update_wrapper(self, call)
        self._call, self.name, self.keeps = call, name, keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = steps.block_recorder()
        if recorder is None:
            return self._call(*args, **kwargs)
        with recorder.block(self.name, self.keeps):
            return self._call(*args, **kwargs)


def _rematerialized(operation: keras.Operation, original: layer_patch.Method) -> layer_patch.Method:
    """Replace the method that Keras calls to wrap a `call` for recomputation."""

    @functools.wraps(original)
    def given(call: layer_patch.Method, *args: Any, **kwargs: Any) -> layer_patch.Method:
        if (
            steps.block_recorder() is None or original(call, *args, **kwargs) is call
        ):  # A mode may leave this layer out.
            return call
        keeps = recomputing.PRODUCTS if _private.remat_mode(operation) == "activations" else frozenset[str]()
        return _BlockCall(call, name=getattr(operation, "path", None) or operation.name, keeps=keeps)

    return given
