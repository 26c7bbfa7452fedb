"""Replace functions of TensorFlow and Keras for the whole process, and list the replacements.

Every replacement that outlives a context is made by `replace`. `tfshard doctor` prints `made()`, and
tests/test_patches.py compares it with what really differs in TensorFlow's and Keras's modules.
"""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """A function or attribute of TensorFlow or Keras that tfshard replaced in this process.

    Attributes:
        target: The attribute, with its module and class.
        reason: What the replacement does that the original does not.
    """

    target: str
    reason: str


_made: dict[str, Patch] = {}
# For each target: the owner, the attribute, and the original, or `_ABSENT`.
_originals: dict[str, tuple[Any, str, Any]] = {}
_ABSENT = object()


def replace(owner: Any, name: str, value: Any, reason: str) -> None:
    """Set an attribute of a module, class or object of TensorFlow or Keras for the rest of the process.

    Args:
        owner: The module, class or object.
        name: The attribute.
        value: The replacement.
        reason: What the replacement does, for `tfshard doctor`.
    """
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    if inspect.ismodule(owner):
        place = owner.__name__
    else:
        cls = owner if inspect.isclass(owner) else type(owner)
        place = f"{cls.__module__}.{cls.__qualname__}"
    target = f"{place}.{name}"
    _made.setdefault(target, Patch(target=target, reason=reason))
    _originals.setdefault(target, (owner, name, original))


def undo(targets: Iterable[str]) -> None:
    """Restore the originals of some targets of `made()`."""
    for target in targets:
        owner, name, original = _originals.pop(target)
        del _made[target]
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def made() -> list[Patch]:
    """Return the replacements in this process, in the order in which they were made."""
    return list(_made.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A place where tfshard searches the interpreter's objects, its call stack, or Keras's name scopes.

    Attributes:
        function: The module and the function.
        uses: The function that searches.
        reason: Why Keras and TensorFlow offer nothing else.
    """

    function: str
    uses: str
    reason: str


_FRAMES, _SCOPES = "sys._getframe", "_private.scope_callers"

# All of them; tests/test_patches.py compares the list with the sources.
SEARCHES = (
    Search(function="tfshard.errors:warn", uses=_FRAMES, reason="a warning names the line of the user's program"),
    Search(
        function="tfshard.training.distributions:_note_layout",
        uses=_SCOPES,
        reason="Keras creates a slot without naming its optimizer, and a slot has the layout of its parameter",
    ),
    Search(
        function="tfshard.operations.origins:_owner",
        uses=_FRAMES,
        reason="an error names the layer, metric or loss whose method is running; Keras keeps no stack of "
        "running methods",
    ),
    Search(
        function="tfshard._private.models:record_models",
        uses="gc.get_referrers",
        reason="models may exist before tfshard is imported, and Keras keeps no list of models. Once, at import",
    ),
    Search(
        function="tfshard._private.models:clone_being_made",
        uses=_FRAMES,
        reason="`clone_model` asks a model for its compile config, and does not pass the clone",
    ),
    Search(
        function="tfshard._private.graphs:_resource_name",
        uses="gc.get_objects",
        reason="an error names the variable of a handle; a handle does not refer to its variable",
    ),
    Search(
        function="tfshard._private.graphs:traced_arguments",
        uses=_FRAMES,
        reason="a tf.function is traced without the values of its arguments, and a batch that is not on the mesh "
        "is an error",
    ),
    Search(
        function="tfshard._private.graphs:is_called_by",
        uses=_FRAMES,
        reason="TensorFlow's gradients and tf.lite call the same operations as a user's program",
    ),
    Search(
        function="tfshard.graph.inventory:loop_optimizers",
        uses="gc.collect",
        reason="an optimizer that a loop no longer uses is in a reference cycle, and stays alive until it is collected",
    ),
    Search(
        function="tfshard.training.batch_sizes:_free",
        uses="gc.collect",
        reason="the graph of a try is a reference cycle, and its memory would count in the next try",
    ),
    Search(
        function="tfshard.training.step_functions:StepFunctions._first_run",
        uses="gc.collect",
        reason="a graph is a reference cycle: TensorFlow keeps its compiled functions until it is collected",
    ),
    Search(
        function="tfshard.training.hooks:ShardedExtended._create_sharded",
        uses=_SCOPES,
        reason="Keras creates a slot without naming its optimizer, and a weight without naming its layer",
    ),
    Search(
        function="tfshard.training.hooks:ShardedExtended.update",
        uses=_SCOPES,
        reason="`StrategyExtended.update` is given a function and a variable, and no optimizer",
    ),
    Search(
        function="tfshard.storage.outside:_is_updated",
        uses=_SCOPES,
        reason="an assignment does not say whether an optimizer makes it",
    ),
    Search(
        function="tfshard.storage.variables:ShardedVariable.set_from_host",
        uses=_SCOPES,
        reason="a value that is set while a layer is being built is an initial value",
    ),
    Search(
        function="tfshard.operations.draws:_shapes_of_layers",
        uses=_SCOPES,
        reason="a random operation does not say which layer draws",
    ),
    Search(
        function="tfshard.verifying.step_recording:Recorder._random",
        uses=_SCOPES,
        reason="an operation does not say which layer it belongs to",
    ),
)
