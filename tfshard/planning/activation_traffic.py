"""Predict the activations that a training step sends over a model axis, from the model's graph and its layouts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard.errors import LayoutError
from tfshard.graph.auto_layout import variable_places
from tfshard.graph.dim_rules import PRODUCTS, Blocked, Contracted, Flow, Lookup, Summed, advance, rearranged
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A tensor that devices of the model axis send each other in a step.

    Attributes:
        kind: `"all-reduce"` or `"all-gather"`.
        what: The path of its variable, or the name of the operation.
        why: `"row"`, `"lookup"`, `"experts"`, `"column"`, `"softmax"`, `"scale"`, `"loss"` or
            `"cut"`.
        shape: The full shape.
        bytes: The bytes of the full tensor.
        count: The number of times that a step sends it.
    """

    kind: str
    what: str
    why: str
    shape: tuple[int, ...]
    bytes: int
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Obstacle:
    """An operation that needs a sharded dim in full, or cannot use its sharding. DTensor sends more than the
    prediction.

    Attributes:
        operation: The name of the operation.
        kernel: The path of the operation's variable, if it has one.
        arrives_sharded: True if the activation arrives sharded at a kernel that does not fit it. Otherwise the kernel
            is sharded along a dim along which its input is not.
        reason: The reason.
    """

    operation: str
    kernel: str | None
    arrives_sharded: bool
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of a step, in the order of the forward pass.

    Attributes:
        sent: The tensors.
        merges: True if some tensors do not depend on each other: DTensor may merge their collectives.
        obstacles: The operations for which DTensor decides what more is sent.
    """

    sent: tuple[Sent, ...]
    merges: bool
    obstacles: tuple[Obstacle, ...] = ()


_FORMULAS = {
    "row": "bytes(output) over the model axis, forward: row layers",
    "lookup": "bytes(output) over the model axis, forward: lookups in tables sharded by rows",
    "experts": "bytes(output) over the model axis, forward: sums over experts",
    "column": "bytes(input) over the model axis, backward: column layers",
    "softmax": "4 bytes for each row of the softmax: its largest and its sum",
    "loss": "4 bytes for each label: softmax cross entropy's largest logit, sum and label logit",
    "scale": "4 bytes for each quantized row: its largest magnitude",
    "cut": "bytes(activation), backward: a replicated activation that was sliced to match a sharded activation",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedActivations:
    """The activations in a plan.

    Attributes:
        collectives: The collectives of activations over model axes in a step.
        uses: How often the forward pass uses each variable, by path; None if unknown.
        unknown: Why the collectives are unknown; empty if they are known.
    """

    collectives: tuple[Collective, ...] = ()
    uses: Mapping[str, int] | None = None
    unknown: str = ""


def plan(
    model: ModelOrSpecs, planned: Sequence[VariableLayout], mesh_shape: Mapping[str, int], inputs: Any = None
) -> PlannedActivations:
    """Predict the activations that a step sends over each model axis.

    Args:
        model: A built `keras.Model`. The result is unknown for a list of specs.
        planned: The layouts of its variables.
        mesh_shape: Axis name to size.
        inputs: The inputs of a step, for bytes.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    dims = {axis: variable_layout.sharded_dims(planned, axis) for axis in mesh_axes.tensor if mesh_axes[axis] > 1}
    if not any(dims.values()):
        return PlannedActivations()
    if not isinstance(model, keras.Model):
        return PlannedActivations(unknown="the activations' traffic over model axes is known only for a keras.Model")
    try:
        graph = trace(model, inputs)
    except LayoutError as e:
        return PlannedActivations(unknown=str(e))
    devices, shards = mesh_axes.data_size, mesh_axes.sample_shards
    # A batch that does not divide is replicated.
    shared = inputs is not None and all(tuple(leaf.shape)[0] % shards == 0 for leaf in keras.tree.flatten(inputs))
    collectives, unknown = [], []
    for axis in dims:
        traffic = predict(graph, dims[axis], mesh_shape[axis])
        unknown += [f"operation '{each.operation}' {each.reason}" for each in traffic.obstacles]
        for sent in traffic.sent:
            collectives.append(
                Collective(
                    kind=sent.kind,
                    what=sent.what,
                    axis=axis,
                    count=sent.count,
                    bytes=None if inputs is None else sent.bytes // (devices if shared else 1),
                    formula=_FORMULAS[sent.why],
                    merges=traffic.merges,
                )
            )
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return PlannedActivations(
        collectives=tuple(collectives),
        uses=_uses(graph),
        unknown=f"DTensor decides whether more is sent, for {unknown[0]}{more}" if unknown else "",
    )


def _uses(graph: ModelGraph) -> dict[str, int]:
    """Return how many gradients each variable collects."""
    found = {}
    for name, spec in graph.variables.items():
        users = [graph.operations[place] for place, _ in graph.consumers.get(name, ())]
        found[spec.path] = sum(operation.type not in _NO_GRADIENT for operation in users)
    return found


def predict(graph: ModelGraph, dims: Mapping[str, int], devices: int) -> Traffic:
    """Predict the traffic of a step for sharded dims of variables.

    By Megatron-LM's count (Shoeybi et al. 2019, section 3): forward, a sum over a sharded dim (row kernels, lookups) is
    one all-reduce of its result. Backward, a full tensor that goes into kernels sharded by column collects their
    gradients in one all-reduce. A softmax over a sharded dim sends its maximum and its sum; softmax cross entropy of
    sharded outputs also sends the label's score.

    Args:
        graph: The model.
        dims: The sharded dim of each variable, by path.
        devices: The size of the model axis.
    """
    return _TrafficPrediction(graph, dims, devices).run()


def sharded_dim(graph: ModelGraph, dims: Mapping[str, int], devices: int, tensor: str) -> int | None:
    """Return the dim along which the devices of a model axis shard a tensor of the forward pass; None if they do not.

    Args:
        graph: The model.
        dims: The sharded dim of each variable, by path.
        devices: The size of the model axis.
        tensor: The name of the tensor.
    """
    prediction = _TrafficPrediction(graph, dims, devices)
    prediction.run()
    return prediction.sharded.get(tensor)


# Operations through which no gradient comes back.
_NO_GRADIENT = frozenset(
    "Shape ShapeN Size Rank StopGradient ZerosLike OnesLike Equal NotEqual Greater GreaterEqual Less LessEqual ArgMax "
    "ArgMin All Any IsFinite IsNan IsInf".split()
)


class _TrafficPrediction:
    def __init__(self, graph: ModelGraph, dims: Mapping[str, int], devices: int):
        self.graph, self.dims, self.devices = graph, dims, devices
        # The path of the variable that a tensor is, by the tensor's name.
        self.variable_of = {name: path for (name, _), (path, _) in variable_places(graph).items()}
        self.sharded: dict[str, int] = {
            name: dims[spec.path] for name, spec in graph.variables.items() if spec.path in dims
        }
        # The source of each tensor that only rearranges another. If several layers reshape a source, the source counts
        # once.
        self.base: dict[str, tf.Tensor] = {}
        # The operation through which such a tensor came from its base.
        self.step: dict[str, tf.Operation] = {}
        self.without_gradient = {op.name for op in graph.operations if op.type in _NO_GRADIENT}
        self.sent: list[Sent] = []
        self.obstacles: list[Obstacle] = []
        self.collected: set[str] = set()
        # By the name of a base: its place in `sent`, and the operations that bring it to kernels sharded by column.
        self.columns: dict[str, tuple[int, set[str], int]] = {}
        # The forward collectives that a tensor depends on, as bits.
        self.after: dict[str, int] = {}
        self.merges = False

    def run(self) -> Traffic:
        for operation in self.graph.operations:
            before = 0
            for tensor in operation.inputs:
                before |= self.after.get(tensor.name, 0)
            reduced = self._forward(operation)
            if reduced is not None:
                number = sum(each.why in ("row", "lookup", "experts") for each in self.sent)
                self.merges |= before != (1 << number) - 1
                self.sent.append(reduced)
                before |= 1 << number
            self._backward(operation)
            for tensor in operation.outputs:
                self.after[tensor.name] = before
            self._note_base(operation)
        self._separate_columns()
        self._losses()
        return Traffic(sent=tuple(self.sent), merges=self.merges, obstacles=tuple(self.obstacles))

    def _forward(self, operation: tf.Operation) -> Sent | None:
        """Carry sharded dims through an operation. Return the tensor that the operation reduces, or None."""
        inputs = [(number, self.sharded[t.name]) for number, t in enumerate(operation.inputs) if t.name in self.sharded]
        reduced = None
        for number, dim in inputs:
            outcome = advance(operation, number, dim, self.devices)
            if isinstance(outcome, Flow):
                for output, to in outcome.outputs:
                    self.sharded.setdefault(operation.outputs[output].name, to)
                if operation.inputs[number].name not in self.variable_of:
                    self._cut(operation, outcome)
                if outcome.statistics and not outcome.outputs:
                    self._note("all-reduce", operation.name, "scale", tuple(operation.outputs[0].shape), 1)
                elif outcome.statistics:
                    output, to = outcome.outputs[0]
                    shape = tuple(n for i, n in enumerate(operation.outputs[output].shape) if i != to)
                    self._note("all-reduce", operation.name, "softmax", shape, outcome.statistics)
            elif isinstance(outcome, Lookup):
                path = self.variable_of.get(operation.inputs[number].name)
                reduced = _sent("all-reduce", path or operation.name, "lookup", operation.outputs[0])
            elif isinstance(outcome, Contracted):
                kernel = next((n for n in (number, outcome.other) if operation.inputs[n].name in self.variable_of), 0)
                path = self.variable_of.get(operation.inputs[kernel].name)
                both = self.sharded.get(operation.inputs[outcome.other].name) == outcome.dim
                if both or number == kernel:
                    reduced = _sent("all-reduce", path or operation.name, "row", operation.outputs[0])
                if not both:
                    # DTensor decides about a kernel with another sharded dim.
                    reason = "sums over a dim that is sharded in one input only"
                    self._obstacle(operation, path, number != kernel, reason)
            elif isinstance(outcome, Summed):
                reduced = _sent("all-reduce", operation.name, "experts", operation.outputs[0])
            elif isinstance(outcome, Blocked):
                self._obstacle(operation, None, False, outcome.reason)
        return reduced

    def _obstacle(self, operation: tf.Operation, kernel: str | None, arrives_sharded: bool, reason: str) -> None:
        self.obstacles.append(
            Obstacle(operation=operation.name, kernel=kernel, arrives_sharded=arrives_sharded, reason=reason)
        )

    def _cut(self, operation: tf.Operation, flow: Flow) -> None:
        """Record the gathers of the gradient of a full activation that is cut along with a sharded activation."""
        for other, _ in flow.aligned:
            tensor = operation.inputs[other]
            trained = tensor.name in self.graph.trained and tensor.name not in self.variable_of
            if trained and tensor.name not in self.sharded and tensor.name not in self.collected:
                self.collected.add(tensor.name)
                self.sent.append(_sent("all-gather", operation.name, "cut", self.base.get(tensor.name, tensor)))
        for other in flow.repeated:
            tensor = self.base.get(operation.inputs[other].name, operation.inputs[other])
            trained = tensor.name in self.graph.trained and tensor.name not in self.variable_of
            if trained and tensor.name not in self.sharded and tensor.name not in self.collected | self.columns.keys():
                self.collected.add(tensor.name)
                self.sent.append(_sent("all-reduce", operation.name, "cut", tensor))
                self.merges = True

    def _backward(self, operation: tf.Operation) -> None:
        """Record the all-reduce of the gradient of a full activation that meets a kernel sharded by column."""
        for number, kernel in enumerate(operation.inputs):
            dim = self.sharded.get(kernel.name)
            if dim is None or kernel.name not in self.variable_of or len(operation.inputs) != 2:
                continue
            outcome = advance(operation, number, dim, self.devices)
            other = operation.inputs[1 - number]
            contraction = operation.type in PRODUCTS
            is_replicated = other.name not in self.sharded and other.name in self.graph.trained
            if contraction and isinstance(outcome, Flow) and is_replicated:
                base = self.base.get(other.name, other)
                step = self.step.get(other.name, operation)
                if base.name not in self.columns:
                    path = self.variable_of.get(operation.inputs[number].name)
                    self.columns[base.name] = (len(self.sent), set(), 0)
                    self.sent.append(_sent("all-reduce", path or operation.name, "column", base))
                place, users, count = self.columns[base.name]
                self.columns[base.name] = (place, users | {step.name}, count + 1)

    def _separate_columns(self) -> None:
        """DTensor sums the gradients of several kernels before it reduces them, if nothing else is added to them.

        A residual that begins at the same tensor (post-norm blocks) is added too: then they are reduced one by one, and
        merged into one all-reduce of all their bytes.
        """
        for name, (place, users, count) in self.columns.items():
            consumers = {self.graph.operations[i].name for i, _ in self.graph.consumers[name]}
            others = consumers - users - self.without_gradient
            if others and count > 1:
                self.sent[place] = dataclasses.replace(self.sent[place], bytes=count * self.sent[place].bytes)

    def _losses(self) -> None:
        outputs = {t.name: t for op in self.graph.operations for t in op.outputs if t.name in self.graph.outputs}
        for name, tensor in sorted(outputs.items()):
            if self.sharded.get(name) == tensor.shape.rank - 1:
                self._note("all-reduce", f"output {name}", "loss", tuple(tensor.shape[:-1]), 3)

    def _note(self, kind: str, what: str, why: str, shape: tuple[int, ...], count: int) -> None:
        self.sent.append(Sent(kind=kind, what=what, why=why, shape=shape, bytes=4 * math.prod(shape), count=count))

    def _note_base(self, operation: tf.Operation) -> None:
        if not operation.inputs or operation.inputs[0].name in self.variable_of:
            return
        source = operation.inputs[0]
        if any(rearranged(operation, 0, dim) for dim in range(source.shape.rank or 0)):
            for output in operation.outputs:
                self.base[output.name] = self.base.get(source.name, source)
                self.step[output.name] = self.step.get(source.name, operation)


def _sent(kind: str, what: str, why: str, tensor: tf.Tensor) -> Sent:
    shape = tuple(tensor.shape)
    bytes_ = math.prod(shape) * variable_layout.itemsize(tensor.dtype.name)
    return Sent(kind=kind, what=what, why=why, shape=shape, bytes=bytes_)
