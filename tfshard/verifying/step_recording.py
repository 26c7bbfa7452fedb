"""One training step, sharded or on one device, with what it computes on the way noted for `verification`."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import layer_patch, rewrites
from tfshard.operations.layer_patch import Method
from tfshard.training import failures
from tfshard.verifying.subject import Subject, axes_of, differing_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What a value of a step is. The same in the sharded step and in that on one device.

    Attributes:
        kind: `"layer"`, `"loss"`, `"gradient"` or `"metric"`.
        path: Of the layer or the variable; the name of the metric.
        call: The how manyth call of the layer, the loss or the optimizer it comes from.
        part: The how manyth tensor of what a layer returned, or gradient of a variable of this path.
        type: The class of a layer.
    """

    kind: str
    path: str = ""
    call: int = 0
    part: int = 0
    type: str = ""

    def __str__(self) -> str:
        call = f", call {self.call + 1}" if self.call else ""
        if self.kind == "loss":
            return f"the loss{call}"
        if self.kind != "layer":
            return f"{self.kind} '{self.path}'" + (f" #{self.part + 1}" if self.part else "") + call
        part = f"output {self.part + 1} of " if self.part else ""
        return f"{part}layer '{self.path}' ({self.type}){call}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Which operations of the graph a call of a layer made.

    Attributes:
        layer: What it is called in messages.
        begin: The number of operations before.
        end: The number of operations after.
    """

    layer: str
    begin: int
    end: int


class Recorder:
    """Notes what a step computes while it is traced.

    Attributes:
        graph: The graph of the step.
        values: Outputs of layers, loss and gradients, in the order of the step; a gradient may be None.
        randoms: The results of the random operations, in order.
        spans: The calls of layers.
        left_out: What cannot be compared, and why.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        pin: Callable[[tf.Tensor], tf.Tensor] | None = None,
        randoms: list[np.ndarray] | None = None,
        gradients: Mapping[Key, np.ndarray | None] | None = None,
    ):
        """Args:
        subject: What is trained.
        pin: Brings the result of a random operation to the layout in which it can be returned.
        randoms: Numbers that random operations give, in order, instead of their own.
        gradients: What optimizers get instead of the gradients of this step.
        """
        self.graph = tf.compat.v1.get_default_graph()
        self.values: dict[Key, tf.Tensor | None] = {}
        self.randoms: list[tf.Tensor] = []
        self.spans: list[Span] = []
        self.left_out: dict[str, None] = {}
        self._subject = subject
        self._pin, self._random_numbers = pin, randoms
        self._gradients = gradients
        self._calls: dict[tuple[object, ...], int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it is open, the model's layers, its loss and its optimizers are recorded."""
        model = self._subject.model
        with contextlib.ExitStack() as stack:
            for layer in _private.flatten_layers(model):
                record = functools.partial(self._call, layer)
                stack.enter_context(layer_patch.applied(layer_patch.RECORDED_CALL, layer, record))
            stack.enter_context(layer_patch.applied(layer_patch.RECORDED_LOSS, model, self._loss))
            for optimizer in self._subject.optimizers:
                record = functools.partial(self._apply, optimizer)
                stack.enter_context(layer_patch.applied(layer_patch.RECORDED_GRADIENTS, optimizer, record))
            stack.enter_context(_private.recorded_outputs(_private.ALL_RANDOM_OPS, self._random))
            yield

    def note_metrics(self, logs: Any) -> None:
        """What a step returns: the results of metrics."""
        named = logs if isinstance(logs, Mapping) else {"result": logs}
        for name, value in named.items():
            for part, tensor in enumerate(tf.nest.flatten(value)):
                self._note(Key(kind="metric", path=str(name), part=part), tensor)

    def _number(self, *what: object) -> int:
        number = self._calls.get(what, 0)
        self._calls[what] = number + 1
        return number

    def _note(self, key: Key, value: Any) -> None:
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        if not isinstance(value, tf.Tensor) or not _is_comparable(value.dtype):
            return
        if not _private.is_eager() and value.graph is not self.graph:
            self.left_out[f"{key}: it is computed inside of a tf.cond or tf.while_loop"] = None
            return
        self.values[key] = value

    def _call(self, layer: keras.Layer, call: Method) -> Method:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            path = layer.path or layer.name  # Known when the layer is built.
            number, inside = self._number("layer", path), tf.compat.v1.get_default_graph() is self.graph
            begin = len(self.graph.get_operations())
            outputs = call(*args, **kwargs)
            if inside:
                span = Span(layer=f"layer '{path}' ({type(layer).__name__})", begin=begin,
                            end=len(self.graph.get_operations()))  # fmt: skip
                self.spans.append(span)
            for part, output in enumerate(tf.nest.flatten(outputs)):
                self._note(Key(kind="layer", path=path, call=number, part=part, type=type(layer).__name__), output)
            return outputs

        return recorded

    def _loss(self, compute_loss: Method) -> Method:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            self._note(Key(kind="loss", call=self._number("loss")), loss)
            return loss

        return recorded

    def _apply(self, optimizer: keras.optimizers.Optimizer, apply: Method) -> Method:
        def recorded(
            grads: Sequence[tf.Tensor | None], trainable_variables: Sequence[keras.Variable] | None = None
        ) -> Any:
            variables = trainable_variables
            if variables is None:
                variables = _private.optimizer_references(optimizer)
            given, number, named = list(grads), self._number("apply", id(optimizer)), collections.Counter[str]()
            for i, (gradient, variable) in enumerate(zip(given, variables, strict=True)):
                path = getattr(variable, "path", variable.name)
                key = Key(kind="gradient", path=path, call=number, part=named[path])
                named[path] += 1  # Layers of one name have variables of one path.
                if gradient is None:
                    self.values[key] = None
                    continue
                self._note(key, gradient)
                tables = self._subject.strategy.tables
                is_table = tables is not None and tables.matches_path(path)
                if self._gradients is not None and not is_table:  # Whose squares depend on how it is sparse.
                    given[i] = self._instead(gradient, self._gradients.get(key))
            return apply(given, trainable_variables)

        return recorded

    def _instead(self, gradient: tf.Tensor | tf.IndexedSlices, other: np.ndarray | None) -> tf.Tensor:
        # Dense, which is what a sparse gradient means under the strategy: rows that occur twice are added up.
        gradient = tf.convert_to_tensor(gradient)
        if other is None or other.shape != tuple(gradient.shape):
            return gradient
        return _constant(other)

    def _random(self, output: tf.Tensor) -> tf.Tensor:
        place = f"the numbers of random operation '{output.op.name}'"
        if output.graph is not self.graph:
            self.left_out[f"{place}: it is inside of a tf.cond or tf.while_loop, and each step draws its own"] = None
            return output
        number = len(self.randoms)
        if self._pin is not None:
            output = self._pin(output)
        self.randoms.append(output)
        if self._random_numbers is None:
            return output
        fits = number < len(self._random_numbers) and output.shape.is_compatible_with(
            self._random_numbers[number].shape
        )
        if not fits:
            self.left_out[f"{place}: the sharded step has another one in its place, and each draws its own"] = None
            return output
        return _constant(self._random_numbers[number])

    def returned_randoms(self) -> list[tf.Tensor]:
        """The results of random operations that can be returned from the step without changing it."""
        return self.randoms if self._pin is not None else []

    def layer_of(self, operation: tf.Operation) -> str | None:
        """The innermost layer whose call made an operation, or whose operation it is the gradient of."""
        numbers = {op.name: i for i, op in enumerate(self.graph.get_operations())}
        number = numbers.get(operation.name)
        found = [span for span in self.spans if number is not None and span.begin <= number < span.end]
        if not found and operation.name.startswith("gradient_tape/"):
            forward = operation.name.removeprefix("gradient_tape/").rpartition("/")[0]
            names = [op.name for op in self.graph.get_operations()]
            found = [s for s in self.spans if any(n.rpartition("/")[0] == forward for n in names[s.begin : s.end])]
        return min(found, key=lambda span: span.end - span.begin).layer if found else None


def _constant(value: np.ndarray) -> tf.Tensor:
    """A host value in a graph; not in its definition, which may not be large."""
    with tf.init_scope():
        outside = tf.constant(value)
    return tf.identity(outside)


def _is_comparable(dtype: tf.DType) -> bool:
    return any((dtype.is_floating, dtype.is_integer, dtype.is_bool, dtype.is_complex))


# --- Running -----------------------------------------------------------------------------------------

# Chooses tensors of a traced step that are returned too.
Select = Callable[[Recorder], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """A step that was run.

    Attributes:
        recorder: What was noted when it was traced.
        values: The values, whole on the host.
        layouts: The layout in which each value was computed; in a sharded step.
        differing: Values of which devices hold different copies: a text for each.
        randoms: The results of random operations, if they were pinned.
        selected: The tensors that were chosen, by name.
        after: The variables after the step, by name.
    """

    recorder: Recorder
    values: Mapping[Key, np.ndarray | None]
    layouts: Mapping[Key, Axes]
    differing: Mapping[str, str]
    randoms: list[np.ndarray]
    selected: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]


class StepFailure(Exception):
    """A step that was traced and failed on the devices.

    Attributes:
        error: What TensorFlow raised.
        recorder: What was noted when the step was traced.
    """

    def __init__(self, error: Exception, recorder: Recorder):
        super().__init__(str(error))
        self.error, self.recorder = error, recorder


def run_sharded(subject: Subject, batch: Any, select: Select | None = None, *, return_randoms: bool) -> Observed:
    """Runs a training step as `fit` does, on a batch on the mesh. The variables change.

    Args:
        subject: What is trained.
        batch: The batch, on the mesh.
        select: Chooses what is returned besides.
        return_randoms: Whether to return the results of random operations. A result that is returned is not laid out
            as one that is not, so they are brought to the layout of a batch.
    """
    strategy = subject.strategy

    def pin(output: tf.Tensor) -> tf.Tensor:
        if not output.shape.is_fully_defined():
            return output
        axes = rewrites.random_axes(tuple(output.shape), strategy.mesh_shape)
        return transfer.relayout(output, axes, strategy.mesh)

    def recorder(subject: Subject) -> Recorder:
        return Recorder(subject, pin=pin if return_randoms else None)

    def run_step(step: Method, data: Any) -> Any:
        # Compressed gradients are not those of one device, nor meant to be.
        with strategy.extended.results_stay_sharded(), strategy.extended.adding_up_exactly():
            return strategy.run(step, args=(data,))

    with failures.translated_errors(f"A step of model '{subject.model.name}'"):
        return _run(subject, batch, run_step, recorder, select)


def run_on_one_device(subject: Subject, batch: Any, sharded: Observed | None, select: Select | None = None) -> Observed:
    """Runs a training step in `subject.on_one_device()`, with the random numbers of a sharded step, and its gradients
    for the optimizers."""

    def recorder(subject: Subject) -> Recorder:
        if sharded is None:
            return Recorder(subject)
        return Recorder(subject, randoms=sharded.randoms, gradients=sharded.values)

    return _run(subject, batch, lambda step, data: step(data), recorder, select)


def _run(
    subject: Subject,
    batch: Any,
    run_step: Callable[[Method, Any], Any],
    make: Callable[[Subject], Recorder],
    select: Select | None,
) -> Observed:
    recorders: list[Recorder] = []
    chosen: dict[int, list[tf.Tensor]] = {}

    def traced(data: Any) -> list[tf.Tensor]:
        recorder = make(subject)

        def step(data: Any) -> Any:
            with recorder.recording():
                return subject.model.train_step(data)

        recorder.note_metrics(run_step(step, data))
        recorders.append(recorder)
        tensors = [t for t in [*recorder.values.values(), *recorder.returned_randoms()] if t is not None]
        tensors += select(recorder) if select is not None else []
        chosen[id(recorder.graph)] = list({id(tensor): tensor for tensor in tensors}.values())
        return [tf.identity(tensor) if tensor.op.type == "Placeholder" else tensor
                for tensor in chosen[id(recorder.graph)]]  # fmt: skip

    function = tf.function(traced, jit_compile=False, autograph=False).get_concrete_function(batch)
    recorder = next(r for r in reversed(recorders) if r.graph is function.graph)
    # What the step made while it was traced, such as the slots of an optimizer of a custom train_step.
    subject.remember(function.graph.variables)
    known = {key: tensor for key, tensor in recorder.values.items() if tensor is not None}
    try:
        results = function(*[leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)])
    except tf.errors.OpError as error:
        if "{{node" not in str(error):
            raise  # It could not be compiled.
        raise StepFailure(error, recorder) from error
    hosts, layouts, differing = {}, {}, {}
    for tensor, result in zip(chosen[id(recorder.graph)], results, strict=True):
        hosts[id(tensor)] = np.array(transfer.to_host(result))
        if transfer.is_dtensor(result):
            layouts[id(tensor)] = axes_of(result)
            copies = differing_copies(dtensor.unpack(result), layouts[id(tensor)], subject.strategy.mesh)
            if copies is not None:
                differing[tensor.name] = copies
    return Observed(
        recorder=recorder,
        values={key: None if t is None else hosts[id(t)] for key, t in recorder.values.items()},
        layouts={key: layouts[id(t)] for key, t in known.items() if id(t) in layouts},
        differing=differing,
        randoms=[hosts[id(tensor)] for tensor in recorder.returned_randoms()],
        selected={tensor.name: hosts[id(tensor)] for tensor in chosen[id(recorder.graph)]},
        after=subject.values(),
    )
