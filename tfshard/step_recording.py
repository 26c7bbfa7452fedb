"""One training step, sharded or on one device, with what it computes on the way noted for `verification`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, placement, rewrites, support
from tfshard.layouts import Axes
from tfshard.operation_check import worst_of
from tfshard.storage import Storage
from tfshard.variables import ShardedVariable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What a value of a step is. The same in the sharded step and in that on one device.

    Attributes:
        kind: `"layer"`, `"loss"`, `"gradient"` or `"metric"`.
        path: Of the layer or the variable; the name of the metric.
        call: The how manyth call of the layer, the loss or the optimizer it comes from.
        part: The how manyth tensor of what a layer returned.
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
            return f"{self.kind} '{self.path}'{call}"
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
        subject: "Subject",
        *,
        pin: Callable[[tf.Tensor], tf.Tensor] | None = None,
        randoms: list | None = None,
        gradients: Mapping[Key, Any] | None = None,
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
        self._calls: dict[Any, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it is open, the model's layers, its loss and its optimizers are recorded."""
        model: Any = self._subject.model
        with contextlib.ExitStack() as stack:
            for layer in _private.flatten_layers(model):
                stack.enter_context(_replaced(layer, "call", self._call(layer, layer.call)))
            stack.enter_context(_replaced(model, "compute_loss", self._loss(model.compute_loss)))
            for optimizer in self._subject.optimizers:
                stack.enter_context(_replaced(optimizer, "apply", self._apply(optimizer, optimizer.apply)))
            stack.enter_context(_private.recorded_outputs(_private.ALL_RANDOM_OPS, self._random))
            yield

    def note_metrics(self, logs: Any) -> None:
        """What a step returns: the results of metrics."""
        named = logs if isinstance(logs, Mapping) else {"result": logs}
        for name, value in named.items():
            for part, tensor in enumerate(tf.nest.flatten(value)):
                self._note(Key(kind="metric", path=str(name), part=part), tensor)

    def _number(self, *what: Any) -> int:
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

    def _call(self, layer: Any, call: Callable) -> Callable:
        @functools.wraps(call)  # Keras's wrappers of layers look at the arguments.
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

    def _loss(self, compute_loss: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            self._note(Key(kind="loss", call=self._number("loss")), loss)
            return loss

        return recorded

    def _apply(self, optimizer: Any, apply: Callable) -> Callable:
        def recorded(grads: Any, trainable_variables: Any = None) -> Any:
            variables = trainable_variables
            if variables is None:
                variables = _private.optimizer_references(optimizer)
            given, number = list(grads), self._number("apply", id(optimizer))
            for i, (gradient, variable) in enumerate(zip(given, variables, strict=True)):
                key = Key(kind="gradient", path=getattr(variable, "path", variable.name), call=number)
                if gradient is None:
                    self.values[key] = None
                    continue
                self._note(key, gradient)
                if self._gradients is not None:
                    given[i] = self._instead(gradient, self._gradients.get(key))
            return apply(given, trainable_variables)

        return recorded

    def _instead(self, gradient: Any, other: Any) -> Any:
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
    return dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this object only, without Keras taking note of it."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is missing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


# --- What is trained, its values, and the way back ----------------------------------------------------


class Subject:
    """A model under a strategy, with all that a step of it reads and writes.

    Attributes:
        model: The model.
        strategy: Its strategy.
        optimizers: The model's own, and those that it has as attributes.
    """

    def __init__(self, model: Any, strategy: Any):
        self.model, self.strategy = model, strategy
        self.optimizers: list[Any] = []
        for value in vars(model).values():
            among = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for each in among:
                if isinstance(each, keras.optimizers.Optimizer) and all(each is not known for known in self.optimizers):
                    self.optimizers.append(each)

    def variables(self) -> dict[str, keras.Variable]:
        """All Keras variables of layers, optimizers, metrics and seeds, each once, by a name of its own."""
        found = [variable for variable, _ in support.owned_variables(self.model)]
        for optimizer in self.chain():
            found += _private.optimizer_own_variables(optimizer)
        for metric in _private.compiled_metrics(self.model):
            found += metric.variables
        generator = _private.global_seed_generator()
        found += [] if generator is None else [generator.state]
        named: dict[str, keras.Variable] = {}
        seen = set()
        for variable in found:
            if id(variable) in seen or _private.backend_variable(variable) is None:
                continue
            seen.add(id(variable))
            name, number = variable.path, 1
            while name in named:
                number += 1
                name = f"{variable.path} #{number}"
            named[name] = variable
        return named

    def chain(self) -> list:
        """The optimizers and those that they wrap."""
        return [part for optimizer in self.optimizers for part in _private.optimizer_chain(optimizer)]

    def raw_variables(self) -> list[tuple[Any, str, ShardedVariable]]:
        """The variables that layers have without Keras: object, attribute, variable."""
        found = []
        for layer in _private.flatten_layers(self.model):
            for name, value in vars(layer).items():
                if isinstance(value, ShardedVariable):
                    found.append((layer, name, value))
        return found

    def storages(self) -> dict[Storage, str]:
        """Where the variables live, each once, with the name of the first."""
        found: dict[Storage, str] = {}
        for name, variable in self.variables().items():
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable):
                found.setdefault(current.storage, name)
        for _, _, raw in self.raw_variables():
            found.setdefault(raw.storage, raw.path)
        return found

    def values(self) -> dict[str, np.ndarray]:
        """The whole values on the host, by name."""
        named = {name: _private.backend_variable(variable) for name, variable in self.variables().items()}
        named |= {f"{raw.path} (of no Keras variable)": raw for _, _, raw in self.raw_variables()}
        return {name: np.array(placement.to_host(current)) for name, current in named.items()}

    def snapshot(self) -> dict[Storage, list[np.ndarray]]:
        """What each device holds, for `restore`."""
        return {storage: [np.array(piece) for _, piece in storage.local_tensors()] for storage in self.storages()}

    def restore(self, pieces: Mapping[Storage, list[np.ndarray]]) -> None:
        """Brings every device back to what it held."""
        for storage, held in pieces.items():
            storage.set_local(held)

    @contextlib.contextmanager
    def on_one_device(self) -> Iterator[None]:
        """While it is open, variables are plain ones with the same values, and the model is under no strategy."""
        default = tf.distribute.get_strategy()
        owners = {id(owner): (owner, _private.distribute_strategy(owner)) for owner in [self.model, *self.chain()]}
        inside = {id(variable): variable for variable in self.variables().values()}
        before = {key: _private.backend_variable(variable) for key, variable in inside.items()}
        plain = {key: _private.plain_variable(placement.to_host(current), current) for key, current in before.items()}
        with contextlib.ExitStack() as stack:
            for layer, name, raw in self.raw_variables():
                value = _private.plain_variable(raw.numpy(), raw)
                stack.enter_context(_replaced(layer, name, value))
            try:
                for key, variable in inside.items():
                    _private.set_backend_variable(variable, plain[key])
                for owner, _ in owners.values():
                    _private.set_distribute_strategy(owner, None if owner is self.model else default)
                yield
            finally:
                for key, variable in inside.items():
                    _private.set_backend_variable(variable, before[key])
                for owner, strategy in owners.values():
                    _private.set_distribute_strategy(owner, strategy)


# --- Running -----------------------------------------------------------------------------------------

# Chooses tensors of a traced step that are returned too.
Select = Callable[[Recorder], list]


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
        return placement.relayout(output, axes, strategy.mesh)

    def recorder(subject: Subject) -> Recorder:
        return Recorder(subject, pin=pin if return_randoms else None)

    def run_step(step: Callable, data: Any) -> Any:
        with strategy.extended.results_stay_sharded():
            return strategy.run(step, args=(data,))

    with support.translated_errors(f"A step of model '{subject.model.name}'"):
        return _run(subject, batch, run_step, recorder, select)


def run_on_one_device(subject: Subject, batch: Any, sharded: Observed | None, select: Select | None = None) -> Observed:
    """Runs a training step in `subject.on_one_device()`, with the random numbers of a sharded step, and its gradients
    for the optimizers."""

    def recorder(subject: Subject) -> Recorder:
        if sharded is None:
            return Recorder(subject)
        return Recorder(subject, randoms=sharded.randoms, gradients=sharded.values)

    return _run(subject, batch, lambda step, data: step(data), recorder, select)


def _run(subject: Subject, batch: Any, run_step: Callable, make: Callable, select: Select | None) -> Observed:
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
    try:
        results = function(*[leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)])
        _private.wait_for_devices()
    except tf.errors.OpError as error:
        if "{{node" not in str(error):
            raise  # It could not be compiled.
        raise StepFailure(error, recorder) from error
    hosts, layouts, differing = {}, {}, {}
    for tensor, result in zip(chosen[id(recorder.graph)], results, strict=True):
        hosts[id(tensor)] = np.array(placement.to_host(result))
        if placement.is_dtensor(result):
            layouts[id(tensor)] = axes_of(result)
            copies = differing_copies(dtensor.unpack(result), layouts[id(tensor)], subject.strategy.mesh)
            if copies is not None:
                differing[tensor.name] = copies
    known = {key: tensor for key, tensor in recorder.values.items() if tensor is not None}
    return Observed(
        recorder=recorder,
        values={key: None if t is None else hosts[id(t)] for key, t in recorder.values.items()},
        layouts={key: layouts[id(t)] for key, t in known.items() if id(t) in layouts},
        differing=differing,
        randoms=[hosts[id(tensor)] for tensor in recorder.returned_randoms()],
        selected={tensor.name: hosts[id(tensor)] for tensor in chosen[id(recorder.graph)]},
        after=subject.values(),
    )


def axes_of(tensor: tf.Tensor) -> Axes:
    """The mesh axis, or None, of each dim of an eager DTensor."""
    specs = dtensor.fetch_layout(tensor).sharding_specs
    return tuple(None if axis == dtensor.UNSHARDED else axis for axis in specs)


def differing_copies(pieces: Any, axes: Axes, mesh: dtensor.Mesh) -> str | None:
    """Which devices hold different copies of the same part of a tensor, in words, or None.

    Sums may be rounded differently on each device.
    """
    first: dict[tuple, tuple[str, np.ndarray]] = {}
    for piece, location in zip(pieces, mesh.local_device_locations(), strict=True):
        part = tuple(location[axis] for axis in axes if axis is not None)
        value, device = np.asarray(piece), piece.device.rpartition("device:")[2]
        expected_device, expected = first.setdefault(part, (device, value))
        if value.tobytes() == expected.tobytes():
            continue
        worst = worst_of(value, expected, 1e-5 if value.dtype.itemsize >= 4 else 2e-2)
        if worst is not None:
            return (f"device {expected_device} has {worst.one_device} and device {device} has {worst.sharded} at index "
                    f"{worst.index} of the part that both hold")  # fmt: skip
    return None


def recover(subject: Subject) -> None:
    """Makes the devices usable after an operation has failed. What they hold is kept."""
    storage = next(iter(subject.storages()))
    # DTensor cancels what follows a failed operation. It leaves that state when an operation fails at once, because an
    # error is there already, and the error is cleared then. A variable is read for it: a constant that is cancelled on
    # its way to the devices would stay in TensorFlow's cache of constants.
    for _ in range(8):
        for _ in range(2):
            try:
                placement.mesh_to_host(storage.buffer.value())
                _private.wait_for_devices()
                return
            except tf.errors.OpError:
                pass
        _private.clear_device_errors()
    raise RuntimeError("The devices still fail after an operation failed; this process cannot be used on.")
