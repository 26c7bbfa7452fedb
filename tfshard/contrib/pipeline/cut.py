"""Cuts a model into pipeline stages of similar cost, and finds the tensors that pass between stages."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError


class Source(NamedTuple):
    """The origin of a tensor: a stage, or the model's inputs (`stage=-1`), and the number of the tensor there."""

    stage: int
    number: int


class StageModel(keras.Model):  # type: ignore[misc]  # Keras has no types.
    """The layers of a stage, as a functional model that leaves masks to its layers."""

    def __init__(self, inputs: list[Any], outputs: list[Any], **kwargs: Any):
        super().__init__(inputs, outputs, **kwargs)
        # Otherwise Keras warns about masks on the inputs.
        self.supports_masking = True

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Return None: each output has the mask that its layer set."""
        del inputs, previous_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A pipeline stage of a model.

    Attributes:
        number: The number of the stage, from 0, in the order of the model.
        model: The layers of the stage, as a functional model.
        takes: The source of each input of `model`.
        has_rows: For each output of `model`, True if its first dim is the batch dim.
        layers: The names of the layers or operations in the stage.
    """

    number: int
    model: keras.Model
    takes: tuple[Source, ...]
    has_rows: tuple[bool, ...]
    layers: tuple[str, ...]

    @property
    def gives(self) -> int:
        """The number of outputs."""
        return len(self.model.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutModel:
    """A model in stages.

    Attributes:
        stages: The stages, in order.
        outputs: The source of each output of the model.
        graph: The Functional model with these inputs and outputs.
    """

    stages: tuple[Stage, ...]
    outputs: tuple[Source, ...]
    graph: keras.Model

    def readers(self, source: Source) -> list[int]:
        """Return the stages that take a tensor. The last stage takes the outputs of the model."""
        found = [stage.number for stage in self.stages if source in stage.takes]
        last = self.stages[-1].number
        if source in self.outputs and source.stage != last and last not in found:
            found.append(last)
        return found

    def shapes(self, inputs: Any) -> dict[Source, tf.TensorSpec]:
        """Return the shape and dtype of each tensor between stages, for a batch.

        Args:
            inputs: The inputs of the model: arrays, or anything with a shape and a dtype, nested like the model's
                inputs.
        """
        found: dict[Source, tf.TensorSpec] = {}
        for number, (given, symbol) in enumerate(
            zip(_private.flat_inputs(self.graph, inputs), self.graph.inputs, strict=True)
        ):
            found[Source(-1, number)] = tf.TensorSpec(tuple(given.shape), symbol.dtype)
        for stage in self.stages:
            takes = [found[source] for source in stage.takes]
            symbols = [keras.KerasTensor(tuple(each.shape), each.dtype.name) for each in takes]
            for number, each in enumerate(keras.tree.flatten(stage.model.compute_output_spec(symbols))):
                found[Source(stage.number, number)] = tf.TensorSpec(each.shape, each.dtype)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerCall:
    """A call of a layer or operation on symbolic tensors."""

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: tuple[Any, ...]

    @property
    def takes(self) -> list[Any]:
        """The tensors among the arguments."""
        return [each for each in keras.tree.flatten((self.args, self.kwargs)) if isinstance(each, keras.KerasTensor)]

    def again(self, tensors: dict[int, Any]) -> None:
        """Repeat the call on other tensors (by ids of the original tensors), and add the results to `tensors`."""
        args, kwargs = keras.tree.map_structure(lambda each: tensors.get(id(each), each), (self.args, self.kwargs))
        made = keras.tree.flatten(self.operation(*args, **kwargs))
        tensors.update((id(old), new) for old, new in zip(self.gives, made, strict=True))

    @property
    def cost(self) -> float:
        """A measure of the time: kernel multiplications for one sample, plus elements of results."""
        elements = float(sum(_elements(each) for each in self.gives))
        if not self.takes or not any(_is_floating(each) for each in self.takes):
            return elements  # A lookup.
        weights: list[Any] = getattr(self.operation, "weights", [])
        most = max((each.shape for each in self.gives), key=len, default=())
        positions = math.prod(int(size or 1) for size in most[1:-1])
        return elements + positions * float(sum(math.prod(each.shape) for each in weights if len(each.shape) > 1))


def _elements(tensor: Any) -> int:
    return math.prod(size or 1 for size in tensor.shape[1:])


def _is_floating(tensor: Any) -> bool:
    found: bool = keras.backend.is_float_dtype(tensor.dtype)
    return found


def cut(model: keras.Model, stages: int | Sequence[str]) -> CutModel:
    """Cut a model into pipeline stages.

    Args:
        model: A built functional or Sequential model. `cut` opens nested models that are called with only their inputs.
        stages: The number of stages, of about the same cost. Or regular expressions: each matches the full path or name
            of the first layer of the next stage.

    Raises:
        StrategyError: A model that is not built, or of another kind; fewer layers than stages; an expression that
            matches no layer, or a layer at or before the match of the previous expression.
    """
    if not model.built:
        raise StrategyError(
            f"Model '{model.name}' is not built, so it cannot be cut into stages. Give it a keras.Input, or call "
            f"model.build(input_shape). Received: model={model!r}"
        )
    graph = _private.functional_of(model)
    if graph is None:
        raise StrategyError(
            "Only functional and Sequential models can be cut into stages: tfshard does not know the graph of "
            f"layers of a custom `call`. Received: model '{model.name}' (of type {type(model)})"
        )
    inputs = [keras.Input(batch_shape=each.shape, dtype=each.dtype) for each in graph.inputs]
    calls, outputs = _calls_of(graph, inputs)
    begins = _balanced(calls, stages) if isinstance(stages, int) else _named(calls, stages, model)
    return _stages(graph, inputs, calls, outputs, begins)


def _calls_of(graph: keras.Model, inputs: list[Any]) -> tuple[list[_LayerCall], list[Any]]:
    """Return the calls of a model's layers in order, also in nested models, and the outputs of the model."""
    calls: list[_LayerCall] = []

    def call(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        nested = _private.functional_of(operation) if isinstance(operation, keras.Model) else None
        if nested is not None and len(args) == 1 and all(each is None for each in keras.tree.flatten(kwargs)):
            opened = _private.run_through(nested, _private.flat_inputs(nested, args[0]), call)
            return _private.packed_outputs(nested, opened)
        outputs = operation(*args, **kwargs)
        calls.append(
            _LayerCall(operation=operation, args=args, kwargs=kwargs, gives=tuple(keras.tree.flatten(outputs)))
        )
        return outputs

    return calls, _private.run_through(graph, inputs, call)


def _named(calls: Sequence[_LayerCall], names: Sequence[str], model: keras.Model) -> list[int]:
    """Return the number of the first call of each stage."""
    begins = [0]
    for name in names:
        try:
            pattern = re.compile(name)
        except (re.error, TypeError) as error:
            raise StrategyError(
                f"stages must be a number or regular expressions for the names of layers. Received: {name!r} ({error})"
            ) from error
        found = next(
            (
                number
                for number, call in enumerate(calls)
                if any(pattern.fullmatch(text) for text in {call.operation.name, _path(call.operation)})
            ),
            None,
        )
        if found is None or found <= begins[-1]:
            problem = "matches no layer" if found is None else "matches a layer before, or at, the last cut"
            raise StrategyError(
                f"stages: {name!r} {problem} of model '{model.name}'. "
                f"Layers in order: {list(dict.fromkeys(_path(call.operation) for call in calls))}"
            )
        begins.append(found)
    return begins


def _path(operation: keras.Operation) -> str:
    return str(getattr(operation, "path", None) or operation.name)


def _balanced(calls: Sequence[_LayerCall], stages: int) -> list[int]:
    """Return the numbers of the first calls of the stages, for stages of balanced cost.

    The highest cost of a stage is within 10% of the least possible. Among these cuts, the function picks the cut with
    the fewest elements between stages. Every stage except the last computes its forward pass twice
    (`stage_functions.py`), which costs four units instead of three.
    """
    if isinstance(stages, bool) or stages < 1:
        raise StrategyError(f"stages must be a positive number, or names of layers. Received: stages={stages!r}")
    if stages > len(calls):
        raise StrategyError(
            f"A model of {len(calls)} layers cannot be cut into {stages} stages. Received: stages={stages!r}"
        )
    total = [0.0]
    for call in calls:
        total.append(total[-1] + call.cost)
    crossing = _crossing(calls)

    def cost(begin: int, end: int) -> float:
        return (total[end] - total[begin]) * (3 if end == len(calls) else 4)

    count = len(calls)
    # best[k][i]: the lowest maximal cost of the first i calls in k stages.
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for k in range(1, stages + 1):
        for end in range(k, count + 1):
            best[k][end] = min(max(best[k - 1][begin], cost(begin, end)) for begin in range(k - 1, end))
    bound = best[stages][count] * 1.1
    # sent[k][i]: the fewest crossing elements, and the first call of the last of k stages.
    sent: list[list[tuple[float, int]]] = [[(math.inf, -1)] * (count + 1) for _ in range(stages + 1)]
    sent[0][0] = (0.0, -1)
    for k in range(1, stages + 1):
        for end in range(k, count + 1):
            found = [
                (sent[k - 1][begin][0] + crossing[begin], begin)
                for begin in range(k - 1, end)
                if cost(begin, end) <= bound
            ]
            sent[k][end] = min(found, default=(math.inf, -1))
    begins, end = [], count
    for k in range(stages, 0, -1):
        end = sent[k][end][1]
        begins.append(end)
    return begins[::-1]


def _crossing(calls: Sequence[_LayerCall]) -> list[int]:
    """Return, for each call, how many elements of one sample pass from earlier calls to this call or later calls."""
    made = {id(tensor): number for number, call in enumerate(calls) for tensor in call.gives}
    last: dict[int, int] = {}
    for number, call in enumerate(calls):
        for tensor in call.takes:
            last[id(tensor)] = number
    tensors = {id(tensor): tensor for call in calls for tensor in call.gives}
    found = [0] * len(calls)
    for key, until in last.items():
        if key in made:
            for number in range(made[key] + 1, until + 1):
                found[number] += _elements(tensors[key])
    return found


def _stages(
    graph: keras.Model, inputs: list[Any], calls: list[_LayerCall], outputs: list[Any], begins: list[int]
) -> CutModel:
    sources: dict[int, Source] = {id(tensor): Source(-1, number) for number, tensor in enumerate(inputs)}
    stages: list[Stage] = []
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], len(calls)], strict=True)):
        stage_calls = calls[begin:end]
        made = {id(tensor): tensor for call in stage_calls for tensor in call.gives}
        later = {id(tensor) for call in calls[end:] for tensor in call.takes} | {id(tensor) for tensor in outputs}
        taken = {id(tensor): tensor for call in stage_calls for tensor in call.takes if id(tensor) not in made}
        given = [tensor for key, tensor in made.items() if key in later]
        if not taken or not given:
            raise StrategyError(
                "A pipeline stage must take and return tensors. Cut the model elsewhere: name the layers with which "
                f"stages begin. Received: a stage of the layers {[_path(call.operation) for call in stage_calls]}"
            )
        # Call the layers again. A keras.Model of tensors in the middle of a graph would treat the layer that made a
        # tensor as an input, even where the layer is called again (Keras 3's clone_graph_nodes).
        tensors = {key: keras.Input(batch_shape=each.shape, dtype=each.dtype) for key, each in taken.items()}
        began = list(tensors.values())
        for call in stage_calls:
            call.again(tensors)
        ended = [tensors[id(each)] for each in given]
        stage = StageModel(began, ended, name=f"{graph.name}_part_{number}")
        stages.append(
            Stage(
                number=number,
                model=stage,
                takes=tuple(sources[key] for key in taken),
                has_rows=tuple(bool(tensor.shape) and tensor.shape[0] is None for tensor in given),
                layers=tuple(dict.fromkeys(_path(call.operation) for call in stage_calls)),
            )
        )
        for place, tensor in enumerate(given):
            sources[id(tensor)] = Source(number, place)
    return CutModel(stages=tuple(stages), outputs=tuple(sources[id(tensor)] for tensor in outputs), graph=graph)
