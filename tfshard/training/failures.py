"""Errors of a step that failed on the devices: the operation, its layer, and the variables that may have changed.

# Note: the state after a failed step

DTensor runs synchronously (`_private.make_dtensor_synchronous`), so the call that ran the step raises the exception.
The healthy devices are stopped at their next collective. A variable is written when its new value is ready (steps.py).
If the new value depends on the failed operation, the variable keeps its old value on every device: the dependence
goes through a collective or lies on the device itself. Gradients depend on the full forward pass, and so do
weights and slots. Counters, seeds and metrics are written after all other variables. Only variables with values that
were complete before the failure may have changed, such as the variables of late layers when the gradient of an early
layer fails. `not_as_before` finds these variables in the graph, and the message names them.
"""

import contextlib
import dataclasses
import linecache
import re
from collections.abc import Iterator

import tensorflow as tf

from tfshard.devices import clients
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.operations import origins
from tfshard.storage.traced_steps import traced
from tfshard.storage.writes import Writable

_MEMORY = (
    "The devices are out of memory. A step needs less memory with strategy.recompute(model), "
    "ShardedStrategy(microbatches=4), a higher zero_stage or slot_dtype='bfloat16'. tfshard.advise(model, devices, "
    "memory_per_device, batch) says which mesh and stage fit."
)


@contextlib.contextmanager
def explained(step: str) -> Iterator[None]:
    """Add to the exception of a failed step where it came from, and which variables may have changed.

    The exception keeps the type that plain Keras raises, such as `InvalidArgumentError`.

    Args:
        step: The name of the step, for the message.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = _find(str(error.message))
        remedy = [_MEMORY] if isinstance(error, tf.errors.ResourceExhaustedError) else []
        if isinstance(error.__cause__, tf.errors.OpError):  # An inner `explained` has already explained it.
            raise
        if found is None:
            if not remedy:
                raise
            raise type(error)(error.node_def, error.op, "\n".join([str(error.message), *remedy])) from error
        lines = [f"{step} failed on the devices. {error.message}", *remedy, found.origin()]
        storages = found.not_as_before()
        if not storages:
            lines.append("Variables are as before the step.")
        else:
            names = sorted(storage.name for storage in storages)
            lines.append(
                "Variables are as before the step, apart from these, which may have been written: " + ", ".join(names)
            )
            # A launched run ends here: its clients load a checkpoint together.
            differing = [storage.name for storage in storages if not clients.here().is_launched and storage.equalize()]
            if differing:
                lines.append(
                    "Devices held different values of some variables. All devices now have the values of "
                    "the first device: " + ", ".join(sorted(differing))
                )
            lines.append("Load a checkpoint to restore all variables.")
        raise type(error)(error.node_def, error.op, "\n".join(lines)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failed:
    """The failed operation in the graph of its step."""

    graph: tf.Graph
    operation: tf.Operation

    def origin(self) -> str:
        scope = self.operation.name.rpartition("/")[0]
        where = f" in '{scope}'" if scope else ""
        frame = origins.user_frame(self.operation)
        line = ""
        if frame is not None:
            code = linecache.getline(frame.filename, frame.lineno).strip()
            line = f", made at {frame.filename}:{frame.lineno} in {frame.name}: {code}"
        return f"It was operation {self.operation.type}{where}{line}"

    def not_as_before(self) -> list[Writable]:
        """Return the storages that the step may have written: their new values do not depend on this operation."""
        reached, waiting = set(), [self.operation]
        while waiting:
            operation = waiting.pop()
            if operation.name not in reached:
                reached.add(operation.name)
                waiting += [consumer for output in operation.outputs for consumer in output.consumers()]
        writes = traced[self.graph].writes
        storages = [write.storage() for write in writes if write.tensor.partition(":")[0] not in reached]
        return [storage for storage in storages if storage is not None]


def _find(message: str) -> _Failed | None:
    """Find the operation that an error message names, in the traced steps."""
    nodes = re.findall(r"\{\{node ([^}]+)\}\}", message)
    numbers = [int(number) for number in re.findall(r"\{\{function_node __inference_\w*?_(\d+)(?:__|\}\})", message)]
    # The last graph that was traced before the function was made.
    graphs = sorted(traced, key=lambda graph: traced[graph].number, reverse=True)
    graphs = [graph for graph in graphs if not numbers or traced[graph].number < numbers[0]]
    for graph in graphs:
        for node in nodes:
            # DTensor prefixes the names of its calls.
            parts = node.split("/")
            for begin in range(len(parts)):
                try:
                    return _Failed(graph=graph, operation=graph.get_operation_by_name("/".join(parts[begin:])))
                except (KeyError, ValueError):
                    continue
    return None


_ABORTED = "Collective ops is aborted"
_LOST_PEER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


@contextlib.contextmanager
def translated_errors(step: str) -> Iterator[None]:
    """Replace DTensor's compiler error by an error that names the operation which DTensor could not expand.

    Args:
        step: The name of the step, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        if "Mixing different tf.distribute.Strategy" not in str(error):
            raise
        raise StrategyError(
            f"{step} uses an optimizer that belongs to another strategy, or to none. Make the optimizer under "
            "strategy.scope(), or make it an attribute of the model before compile."
        ) from error
    except tf.errors.OpError as error:
        # A client that lost a peer, or whose collectives were aborted, gets an error of the operation that was running.
        if "dtensor" not in str(error).lower() or isinstance(error, _LOST_PEER) or _ABORTED in str(error):
            raise
        first = str(error).partition("\n")[0]
        # The refused operation, or the operation that DTensor was expanding.
        found = re.search(r"'tf\.(\w+)' op|\"tf\.(\w+)\"\(", str(error))
        operation = (found.group(1) or found.group(2)) if found else "?"
        places = origins.find(operation)
        made = f" It is made by: {'; '.join(places)}." if places else ""
        raise UnsupportedOperationError(
            f"{step} cannot be expanded to the mesh: DTensor refuses TensorFlow operation '{operation}'.{made} "
            "Replace it in the layer, loss or metric that makes it, or do that part in the input pipeline. `tfshard "
            f"docs layers` lists what works. The process and the model remain usable. Received from DTensor: {first}"
        ) from error
