"""Patches: tfshard's functions that replace methods of a layer, metric or variable of a user's model.

A patch is on the object, never on its class: `apply` puts a `LayerPatch` into the object's attributes, in front of the
attribute that was there, once for each `Change`. `patches_of` finds the patch there, and the patch dies with its
object: nothing else refers to it. Objects that Keras makes from configs and files (clones, copies, unpickled and loaded
models) have no patch.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import keras

from tfshard import _private


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A kind of patch.

    Attributes:
        of: The patched objects, in words.
        attribute: The attribute that is replaced.
        why: What does the replacement do that the original does not?
        module: The module of the replacement.
        knows_mesh: True if the replacement holds only on the mesh of the model's strategy.
    """

    of: str
    attribute: str
    why: str
    module: str
    knows_mesh: bool = False


# This list, and the changes that extensions register, are also in docs/design.md.
TABLE_READ = Change(
    of="matrices whose rows a model axis shards",
    attribute="sparse_read",
    why="each device looks up its local rows, where `tf.gather` would gather the table",
    module="vocabulary",
    knows_mesh=True,
)
METRIC_UPDATE = Change(
    of="compiled accuracy and top-k metrics",
    attribute="update_state",
    why="counts which classes score above the label's, where an argmax would gather the logits",
    module="vocabulary",
    knows_mesh=True,
)
OUTPUT_LOSS = Change(
    of="metrics of the losses of several outputs",
    attribute="update_state",
    why="counts a batch once where Keras on one device does not know its size",
    module="output_losses",
)
CONVOLUTION = Change(
    of="layers that convolve with kernels that a model axis shards",
    attribute="convolution_op",
    why="sums of matrix products, where DTensor refuses the convolution",
    module="convolution",
    knows_mesh=True,
)
GROUPS = Change(
    of="convolutions of volumes in groups",
    attribute="convolution_op",
    why="TensorFlow has no CPU kernel for them outside of XLA",
    module="convolution",
)
RECURRENCE = Change(
    of="recurrent layers",
    attribute="inner_loop",
    why="each device runs the loop on its local rows, without a collective",
    module="loops",
    knows_mesh=True,
)
LOOKUP = Change(
    of="lookups of integers",
    attribute="_lookup_dense",
    why="searches the sorted vocabulary, where a table is a resource of the host",
    module="lookups",
)
ADAPTER = Change(
    of="Dense, EinsumDense and Embedding layers with LoRA",
    attribute="call",
    why="multiplies by the adapter's two matrices, where Keras adds their product to the kernel",
    module="adapters",
)
QUANTIZED_ADAPTER = Change(
    of="the same, where they are quantized",
    attribute="quantized_call",
    why="multiplies by them without merging dims that are sharded",
    module="adapters",
)
SEQUENCE = Change(
    of="layers with kernels, with `sequence_parallel=True`",
    attribute="call",
    why="gathers the input, or scatters the result, along the sequence",
    module="sequence",
    knows_mesh=True,
)
ATTENTION = Change(
    of="attention layers",
    attribute="_compute_attention",
    why="computes in blocks, where Keras computes a score for each pair of a query and a key",
    module="attention",
    knows_mesh=True,
)
POSITIONS = Change(
    of="position embeddings, on a mesh with a context axis",
    attribute="call",
    why="takes the positions of chunks, where a layer counts from the first position that it sees",
    module="context_parallel",
    knows_mesh=True,
)
BLOCK = Change(
    of="blocks of `strategy.recompute`",
    attribute="call",
    why="tells the step which operations to recompute in the backward pass",
    module="blocks",
)
COMPILED = Change(
    of="blocks of a model that is compiled with `jit_compile=True`",
    attribute="call",
    why="runs the forward pass as one XLA program on each device, and the backward pass as another",
    module="compiled_blocks",
    knows_mesh=True,
)
HEAD = Change(
    of="Dense layers and reversible embeddings, with `chunked_cross_entropy`",
    attribute="call",
    why="records its input and weights, from which the loss computes logits by chunks of tokens",
    module="projection_heads",
    knows_mesh=True,
)
REMAT = Change(
    of="layers that were made under a `keras.RematScope`",
    attribute="rematerialized_call",
    why="tells the step the same, where `tf.recompute_grad` reads variables that are not in the step's graph",
    module="blocks",
)
AVERAGES = Change(
    of="optimizers with `use_ema`",
    attribute="_update_model_variables_moving_average",
    why="averages shards, where each weight would be gathered",
    module="averages",
)
ASSIGNED_ARRAY = Change(
    of="variables of 1 MiB and more",
    attribute="assign",
    why="sends an array to the devices directly, where Keras first makes a tensor of it, with two more copies",
    module="assignments",
)
RECORDED_CALL = Change(
    of="all layers, while `verify` traces a step",
    attribute="call",
    why="records the outputs of a layer",
    module="step_recording",
)
RECORDED_LOSS = Change(
    of="the model, while `verify` traces a step",
    attribute="compute_loss",
    why="records the loss",
    module="step_recording",
)
RECORDED_GRADIENTS = Change(
    of="optimizers, while `verify` or `check_consistency` traces a step",
    attribute="apply",
    why="records the gradients, and passes the gradients of the sharded step to the optimizer on one device",
    module="step_recording",
)
CHANGES = [
    TABLE_READ, METRIC_UPDATE, OUTPUT_LOSS, CONVOLUTION, GROUPS, RECURRENCE, LOOKUP, ADAPTER, QUANTIZED_ADAPTER,
    SEQUENCE, ATTENTION, POSITIONS, COMPILED, HEAD, BLOCK, REMAT, AVERAGES, ASSIGNED_ARRAY, RECORDED_CALL,
    RECORDED_LOSS, RECORDED_GRADIENTS,
]  # fmt: skip


def register(change: Change) -> Change:
    """Add a kind of patch of an extension to the list, and return it."""
    CHANGES.append(change)
    return change


# A layer, a function in a functional model, a metric, variable, optimizer or model.
Owner: TypeAlias = keras.Operation | keras.Metric | keras.Variable | keras.optimizers.Optimizer
# A method of an owner, or its replacement.
Method = Callable[..., Any]


class LayerPatch:
    """A function that replaces an attribute of an object. Its callers call it like the original.

    Attributes:
        owner: The layer, function, metric, variable, optimizer or model.
        change: The kind of patch.
        replacement: tfshard's function.
        before: The object's attribute before the patch, perhaps another patch. None if the attribute was the class's,
            or did not exist.
    """

    def __init__(self, owner: Owner, change: Change, replacement: Method):
        original = getattr(owner, change.attribute, None)
        if original is not None:
            # Keras looks at the arguments of a layer's call. First, because it copies the attributes of another patch.
            functools.update_wrapper(self, original)
        self.owner, self.change, self.replacement = owner, change, replacement
        self.before: LayerPatch | Method | None = vars(owner).get(change.attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.replacement(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<LayerPatch {self.change.attribute} of {getattr(self.owner, 'name', self.owner)}: {self.change.why}>"


def apply(change: Change, owner: Owner, make: Callable[[Any], Method]) -> LayerPatch:
    """Patch an object, unless it has this patch.

    Args:
        change: The kind of patch.
        owner: The object.
        make: Returns the replacement of the original. Its argument is the current attribute of the object, or None.

    Returns:
        The patch that the object has now, perhaps from an earlier call.
    """
    patch = next((patch for patch in patches_on(owner) if patch.change is change), None)
    if patch is None:
        patch = LayerPatch(owner, change, make(getattr(owner, change.attribute, None)))
        # Set behind Keras's back: Keras tracks attributes that are set on layers.
        vars(owner)[change.attribute] = patch
    return patch


@contextlib.contextmanager
def applied(change: Change, owner: Owner, make: Callable[[Any], Method]) -> Iterator[None]:
    """Patch an object until the scope ends."""
    patch = apply(change, owner, make)
    try:
        yield
    finally:
        _take_back(patch)


def patches_on(owner: Owner) -> list[LayerPatch]:
    """Return the patches on one object. For each attribute, the last patch comes first."""
    found = []
    for value in vars(owner).values():
        while isinstance(value, LayerPatch):
            found.append(value)
            value = value.before
    return found


def patches_of(model: keras.Model) -> list[LayerPatch]:
    """Return all patches on a model, and on its layers, variables, compiled metrics and optimizer."""
    return [patch for owner in _parts(model) for patch in patches_on(owner)]


def undo_of(change: Change, owner: Owner) -> None:
    """Undo a patch of an object, if the object has it."""
    for patch in patches_on(owner):
        if patch.change is change:
            _take_back(patch)


def undo(model: keras.Model, changes: Collection[Change] | None = None) -> None:
    """Undo patches of a model, by default all. Functions that were traced before keep them."""
    for patch in patches_of(model):
        if changes is None or patch.change in changes:
            _take_back(patch)


def _take_back(patch: LayerPatch) -> None:
    attributes, name = vars(patch.owner), patch.change.attribute
    outer = attributes[name]
    if outer is not patch:
        while outer.before is not patch:
            outer = outer.before
        outer.before = patch.before
    elif patch.before is None:
        del attributes[name]
    else:
        attributes[name] = patch.before


def operations_of(model: keras.Model) -> list[keras.Operation]:
    """Return a model's layers, and the functions of keras.ops in functional models, each once."""
    layers = _private.flatten_layers(model)
    functional = [operation for layer in layers for operation in getattr(layer, "operations", ())]
    return list({id(each): each for each in (*layers, *functional)}.values())


def _parts(model: keras.Model) -> list[Owner]:
    """Return the objects of a model that may have patches, each once."""
    found: list[Owner] = []
    found += operations_of(model)
    for layer in _private.flatten_layers(model):
        found += _private.layer_variables(layer)
    found += _private.compiled_metrics(model)
    found += _private.output_losses(model)
    found += _private.optimizer_chain(getattr(model, "optimizer", None))
    return list({id(part): part for part in found}.values())
