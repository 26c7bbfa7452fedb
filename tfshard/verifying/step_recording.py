"""Runs one training step, sharded or on one device, and records its values for `verification`."""

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
from tfshard.operations import compiled_blocks, draws, layer_patch
from tfshard.operations.layer_patch import Method
from tfshard.storage import optimizer_kinds, steps
from tfshard.training import failures
from tfshard.verifying.subject import Subject, axes_of, differing_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """The identity of a value of a step, equal in the sharded step and in the step on one device.

    Attributes:
        kind: `"random"`, `"layer"`, `"loss"`, `"gradient"` or `"metric"`.
        path: The path of the layer or the variable; the name of the metric.
        call: The number of the call of the layer, the loss or the optimizer, or of the draw of the layer.
        part: The number of the tensor in a layer's result, or of the gradient among variables with the same path.
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
        if self.kind == "random":
            return f"random numbers {self.call + 1} of {f'layer {self.path!r}' if self.path else 'the step'}"
        if self.kind != "layer":
            return f"{self.kind} '{self.path}'" + (f" #{self.part + 1}" if self.part else "") + call
        part = f"output {self.part + 1} of " if self.part else ""
        return f"{part}layer '{self.path}' ({self.type}){call}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationSpan:
    """The operations of the graph that a call of a layer made.

    Attributes:
        layer: The name of the layer in messages.
        path: The path of the layer.
        begin: The number of operations before the call.
        end: The number of operations after the call.
    """

    layer: str
    path: str
    begin: int
    end: int


class Recorder:
    """Records the values of a step while it is traced.

    Attributes:
        graph: The graph of the step.
        values: Random numbers, outputs of layers, loss and gradients, in the order of the step; a gradient may be None.
        spans: The calls of layers.
        left_out: The values that cannot be compared, with the reasons.
        compiled: The paths of the layers inside compiled blocks. Only the outputs of the blocks are compared.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        instead: Mapping[Key, np.ndarray | None] | None = None,
    ):
        """Make a recorder in the graph of a step.

        Args:
            subject: The model and its optimizers.
            instead: Values that replace the gradients of this step, and the outputs of TensorFlow's stateful random
                operations, which keep their state in the kernel.
        """
        self.graph = tf.compat.v1.get_default_graph()
        self.values: dict[Key, tf.Tensor | None] = {}
        self.spans: list[OperationSpan] = []
        self.left_out: dict[str, None] = {}
        self.compiled: set[str] = set()
        self._subject = subject
        self._given = instead
        self._calls: dict[tuple[object, ...], int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the model's layers, its loss and its optimizers while this context is open."""
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
        """Record the result of a step: the values of metrics."""
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
            path = layer.path or layer.name  # The path is known once the layer is built.
            if steps.is_local_trace():
                self.compiled.add(path)
                return call(*args, **kwargs)
            number, inside = self._number("layer", path), tf.compat.v1.get_default_graph() is self.graph
            begin = len(self.graph.get_operations())
            outputs = call(*args, **kwargs)
            if inside:
                span = OperationSpan(layer=f"layer '{path}' ({type(layer).__name__})", path=path, begin=begin,
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
                named[path] += 1  # Layers of the same name have variables of the same path.
                if gradient is None:
                    self.values[key] = None
                    continue
                self._note(key, gradient)
                # The update of a variable of a kind depends on the form of the gradient.
                is_ordinary = self._subject.strategy.config.kind_at(path) is None
                if self._given is not None and is_ordinary:
                    if isinstance(gradient, tf.IndexedSlices) and not optimizer_kinds.adds_up_rows(optimizer):
                        self.left_out[
                            f"update '{path}' with a sparse gradient: Keras on TensorFlow squares each lookup of a "
                            f"row separately, the strategy squares their sum; tables='{path}' matches Keras on "
                            "TensorFlow"
                        ] = None
                    given[i] = self._instead(gradient, self._given.get(key))
            return apply(given, trainable_variables)

        return recorded

    def _instead(self, gradient: tf.Tensor | tf.IndexedSlices, other: np.ndarray | None) -> tf.Tensor:
        # Dense, like a sparse gradient under the strategy, which adds up rows that occur twice.
        gradient = tf.convert_to_tensor(gradient)
        if other is None or other.shape != tuple(gradient.shape):
            return gradient
        return _constant(other)

    def _random(self, output: tf.Tensor) -> tf.Tensor:
        layers = [caller for caller in _private.scope_callers() if isinstance(caller, keras.Layer)]
        path = (layers[-1].path or layers[-1].name) if layers else ""
        if steps.is_local_trace() or (layers and compiled_blocks.is_compiled(layers[-1])):
            self.compiled.add(path)
            return output
        key = Key(kind="random", path=path, call=self._number("random", path))
        if output.op.type in draws.STATEFUL and self._given is not None:
            _private.global_seed_generator(create=True).next()  # As the sharded step, which draws by this state.
            given = self._given.get(key)
            if given is None:
                self.left_out[f"{key}: TensorFlow's stateful generators draw other numbers on one device"] = None
            else:
                output = self._instead(output, given)
        self._note(key, output)
        return output

    def layer_of(self, operation: tf.Operation) -> str | None:
        """Return the innermost layer that made an operation, or that made the operation's forward operation."""
        span = self.span_of(operation)
        return None if span is None else span.layer

    def span_of(self, operation: tf.Operation) -> OperationSpan | None:
        """Return the innermost call of a layer that made an operation, or that made its forward operation."""
        numbers = {op.name: i for i, op in enumerate(self.graph.get_operations())}
        number = numbers.get(operation.name)
        found = [span for span in self.spans if number is not None and span.begin <= number < span.end]
        if not found and operation.name.startswith("gradient_tape/"):
            forward = operation.name.removeprefix("gradient_tape/").rpartition("/")[0]
            names = [op.name for op in self.graph.get_operations()]
            found = [s for s in self.spans if any(n.rpartition("/")[0] == forward for n in names[s.begin : s.end])]
        return min(found, key=lambda span: span.end - span.begin) if found else None


def _constant(value: np.ndarray) -> tf.Tensor:
    """Return a host value in a graph. The value is outside of the graph's definition, which has a size limit."""
    with tf.init_scope():
        outside = tf.constant(value)
    return tf.identity(outside)


def _is_comparable(dtype: tf.DType) -> bool:
    return any((dtype.is_floating, dtype.is_integer, dtype.is_bool, dtype.is_complex))


# --- Running -----------------------------------------------------------------------------------------

# Selects additional tensors for a traced step to return.
Select = Callable[[Recorder], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """A completed step.

    Attributes:
        recorder: The recorder of the trace.
        values: The full values, on the host.
        layouts: The layout in which a sharded step computed each value.
        differing: The values with different copies on different devices: a text for each.
        selected: The selected tensors, by name.
        after: The variables after the step, by name.
    """

    recorder: Recorder
    values: Mapping[Key, np.ndarray | None]
    layouts: Mapping[Key, Axes]
    differing: Mapping[str, str]
    selected: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]


class StepFailure(Exception):
    """A traced step that failed on the devices.

    Attributes:
        error: The TensorFlow error.
        recorder: The recorder of the trace.
    """

    def __init__(self, error: Exception, recorder: Recorder):
        super().__init__(str(error))
        self.error, self.recorder = error, recorder


def run_sharded(subject: Subject, batch: Any, select: Select | None = None) -> Observed:
    """Run a training step like `fit`, on a batch on the mesh. The variables change.

    Args:
        subject: The model and its optimizers.
        batch: The batch, on the mesh.
        select: Selects additional tensors to return.
    """
    strategy = subject.strategy

    def run_step(step: Method, data: Any) -> Any:
        # A reduction of an extension may differ from the gradients of one device by design.
        with strategy.extended.results_stay_sharded(), strategy.extended.sending_exactly():
            return strategy.run(step, args=(data,))

    with failures.translated_errors(f"A step of model '{subject.model.name}'"):
        return _run(subject, batch, run_step, Recorder, select)


def run_on_one_device(subject: Subject, batch: Any, sharded: Observed | None, select: Select | None = None) -> Observed:
    """Run a training step in `subject.on_one_device()`. Optimizers get the gradients of the sharded step."""

    def recorder(subject: Subject) -> Recorder:
        return Recorder(subject, instead=None if sharded is None else sharded.values)

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
        tensors = [tensor for tensor in recorder.values.values() if tensor is not None]
        tensors += select(recorder) if select is not None else []
        chosen[id(recorder.graph)] = list({id(tensor): tensor for tensor in tensors}.values())
        return [tf.identity(tensor) if tensor.op.type == "Placeholder" else tensor
                for tensor in chosen[id(recorder.graph)]]  # fmt: skip

    function = tf.function(traced, jit_compile=False, autograph=False).get_concrete_function(batch)
    recorder = next(r for r in reversed(recorders) if r.graph is function.graph)
    # The step may make variables while it is traced, such as the slots of an optimizer in a custom train_step.
    subject.remember(function.graph.variables)
    known = {key: tensor for key, tensor in recorder.values.items() if tensor is not None}
    try:
        results = function(*[leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)])
    except tf.errors.OpError as error:
        if "{{node" not in str(error):
            raise  # The step could not be compiled.
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
        selected={tensor.name: hosts[id(tensor)] for tensor in chosen[id(recorder.graph)]},
        after=subject.values(),
    )
