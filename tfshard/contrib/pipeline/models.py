"""`pipeline`: makes a model train on a pipeline."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, tables
from tfshard.contrib.pipeline import schedules
from tfshard.contrib.pipeline.cut import CutModel, cut
from tfshard.contrib.pipeline.pipeline import Pipeline
from tfshard.devices import clients, messages, process_lock, transfer
from tfshard.errors import StrategyError
from tfshard.graph import inventory
from tfshard.layouts import option_checks
from tfshard.operations import blocks
from tfshard.training import decisions, failures
from tfshard.training.attached_variables import attach_global_seed, attach_variables
from tfshard.training.models import Distributed, as_distributed
from tfshard.training.strategy import ShardedStrategy

# The attribute of a model with its `_State`.
_STATE = "_tfshard_pipeline"


class _Cut(NamedTuple):
    """The stages of a model, and the arguments of `pipeline`."""

    made: CutModel
    stages: int | Sequence[str]
    microbatches: int
    schedule: str


class _State:
    """The stages of a model, and its pipeline once the model is compiled.

    The pipeline refers to the model. The model therefore holds this object, and both are freed together.

    Attributes:
        cut: The stages, and the arguments of `pipeline`.
        pipeline: The pipeline; None before the model is compiled.
        seen: The structure of the model in the last step, and the blocks that it recomputes.
    """

    def __init__(self, cut: _Cut):
        self.cut = cut
        self.pipeline: Pipeline | None = None
        self.seen: object = None


def _seen(model: keras.Model) -> object:
    """Return a key that changes when a model gets layers, variables or recomputed blocks."""
    return _private.structure(model), blocks.marks(model)


def _state_of(model: keras.Model) -> _State | None:
    found: _State | None = vars(model).get(_STATE)
    return found


class _Pipelined(Distributed):
    """Mixed into the class of a model: steps run in stages on the pipeline ranks of its strategy."""

    def _state(self) -> _State:
        state = _state_of(self)
        if state is None:
            raise StrategyError(
                f"Model '{self.name}' is a copy of a model that tfshard.pipeline has cut, and is not cut itself. Call "
                "tfshard.pipeline(model, stages=..., microbatches=...) on the copy before it is compiled."
            )
        return state

    def compile(self, *args: Any, strategy: ShardedStrategy | str | None = None, **kwargs: Any) -> None:
        strategy = strategy or _private.distribute_strategy(self)
        if not isinstance(strategy, ShardedStrategy):
            if strategy is not None:
                raise StrategyError(
                    "strategy must be a tfshard.ShardedStrategy with a pipeline axis; 'auto' chooses no pipeline. "
                    f"Received: strategy={strategy!r}"
                )
            super().compile(*args, **kwargs)
            return
        state = self._state()
        pipeline, how = state.pipeline, state.cut
        if pipeline is not None and pipeline.strategy is not strategy:
            raise StrategyError(
                f"Model '{self.name}' was compiled under another strategy. Build a new model, or compile it with that "
                f"strategy. Its strategy: {pipeline.strategy!r}. Received: strategy={strategy!r}"
            )
        _check(self, how.made, strategy, how.schedule, kwargs)
        if pipeline is None:
            pipeline = state.pipeline = Pipeline(self, how.made, strategy, how.schedule, how.microbatches)
        strategy.pipelined_models.add(self)
        pipeline.place()
        _private.set_distribute_strategy(self, strategy)
        with strategy.scope():
            super(Distributed, self).compile(*args, **kwargs)
        if self.jit_compile:
            _raise_jit_compile(self)
        if self.run_eagerly:
            raise StrategyError("A pipeline runs compiled steps: leave out run_eagerly=True.")
        inventory.note_compiled(self.optimizer)
        _check_optimizer(self.optimizer)
        for inner in _private.optimizer_chain(self.optimizer):
            _private.set_distribute_strategy(inner, strategy)
        pipeline.forget()
        decisions.log(logging.INFO, lambda: _told(self.name, how, strategy))

    def _prepares(self, clone: keras.Model) -> bool:
        if not clone.built:
            return False
        how = self._state().cut
        pipeline(clone, how.stages, microbatches=how.microbatches, schedule=how.schedule)
        return True

    def _ready(self) -> Pipeline:
        """Return the pipeline, after moving the model's new variables to the mesh of a pipeline rank."""
        state = self._state()
        pipeline = state.pipeline
        assert pipeline is not None, "Keras runs compiled models only."
        strategy = pipeline.strategy
        attach_global_seed(strategy)
        if state.seen != _seen(self):
            blocks.mark_opened(self)
            pipeline.place()
            pipeline.forget()
        pipeline.place_optimizer()
        for metric in _private.compiled_metrics(self):
            attach_variables(metric.variables, strategy)
        state.seen = _seen(self)
        return pipeline

    def get_metrics_result(self) -> Any:
        return keras.tree.map_structure(_known_everywhere, super().get_metrics_result())

    def make_train_function(self, force: bool = False) -> None:
        self.train_function = self._function("training step", lambda pipeline: pipeline.train)

    def make_test_function(self, force: bool = False) -> None:
        self.test_function = self._function("evaluation step", lambda pipeline: pipeline.test)

    def make_predict_function(self, force: bool = False) -> None:
        self.predict_function = self._function("prediction step", lambda pipeline: pipeline.predict)

    def _function(self, kind: str, step_of: Callable[[Pipeline], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        pipeline = self._ready()
        pipeline.bring_up_to_date()

        def function(iterator: Iterable[Any]) -> Any:
            batches = list(itertools.islice(iterator, self.steps_per_execution))
            if not batches:
                raise StopIteration
            with process_lock.held():
                return run(batches)

        def run(batches: list[Any]) -> Any:
            pipeline = self._ready()
            results = []
            with failures.translated_errors(f"A {kind} of model '{self.name}'"):
                for batch in batches:
                    for leaf in keras.tree.flatten(batch):
                        if tf.is_tensor(leaf):
                            clients.here().note_value(leaf, np.asarray(leaf))
                    with pipeline.strategy.operation(function, kind, batch):
                        pipeline.bring_up_to_date()
                        result = step_of(pipeline)(_without_optionals(batch))
                        results.append(keras.tree.map_structure(_known_everywhere, result))
            if kind != "prediction step":
                return results[-1]
            return results[0] if len(results) == 1 else tf.nest.map_structure(lambda *of: tf.concat(of, 0), *results)

        return function


def _told(name: str, how: _Cut, strategy: ShardedStrategy) -> str:
    """Return what was decided for a pipeline, for the log."""
    stages = "; ".join(
        f"stage {stage.number} has {len(stage.layers)} layers, {stage.layers[0]} to {stage.layers[-1]}"
        for stage in how.made.stages
    )
    mesh = tables.mesh(strategy.pipeline_axes)
    return (
        f"model '{name}': mesh {mesh} of {strategy.mesh.device_type()} devices, ZeRO stage {strategy.zero_stage}, "
        f"schedule {how.schedule}, {how.microbatches} microbatches; {stages}"
    )


def _known_everywhere(value: Any) -> Any:
    """Return a step result that every client of a launched run can read."""
    if transfer.is_dtensor(value) and not messages.is_everywhere(dtensor.fetch_layout(value).mesh):
        return tf.constant(transfer.to_host(value))
    return value


def _without_optionals(batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def _check(
    model: keras.Model, made: CutModel, strategy: ShardedStrategy, schedule: str, settings: dict[str, Any]
) -> None:
    if strategy.pipeline_axes.pipeline is None:
        raise StrategyError(
            f"Model '{model.name}' was cut by tfshard.pipeline, but the mesh of the strategy has no pipeline axis. "
            "Make a mesh with tfshard.create_mesh(pipeline=2, batch=2). Received: a mesh with axes "
            f"{strategy.pipeline_axes}"
        )
    schedules.check(schedule, ranks=len(strategy.ranks), stages=len(made.stages))
    if strategy.config.already_sharded and clients.here().count > 1:
        raise StrategyError(
            "Each rank of the pipeline axis takes the data that it needs from a batch, so every client must feed "
            "the full batch. Leave out already_sharded=True, or the pipeline axis."
        )
    if strategy.microbatches > 1:
        raise StrategyError(
            "The number of microbatches of a pipeline is set in tfshard.pipeline(model, microbatches=...). Leave it "
            f"out of the strategy. Received: a strategy with microbatches={strategy.microbatches}"
        )
    if strategy.config.kinds:
        kind = strategy.config.kinds[0]
        raise StrategyError(
            f"A pipeline adds up the full gradients of its microbatches, but {kind.noun} have no full gradients. Leave "
            f"out {kind.option_name}= or the pipeline axis. Received: {kind.option_name}={kind}"
        )
    if settings.get("jit_compile") is True:
        _raise_jit_compile(model)
    if (refusal := refusal_of_steps(model)) is not None:
        raise StrategyError(refusal)
    check_shared(made, len(strategy.ranks))


def refusal_of_steps(model: keras.Model) -> str | None:
    """Return why a pipeline cannot run the steps of a model; None if it can."""
    for name in ("train_step", "test_step", "predict_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return (
                f"A pipeline runs the {name} of keras.Model, but {type(model).__name__} overrides it. Override "
                "compute_loss or compute_metrics instead, or use a mesh without a pipeline axis."
            )
    return None


def check_shared(made: CutModel, count: int) -> None:
    """Raise `StrategyError` if `count` pipeline ranks would share a variable that they cannot share."""
    at: dict[int, int] = {}
    for stage in made.stages:
        for variable, _ in inventory.owned_variables(stage.model):
            home = at.setdefault(id(variable), stage.number % count)
            if home != stage.number % count and (not variable.trainable or variable.regularizer is not None):
                raise StrategyError(
                    f"Variable '{variable.path}' is in stages on several ranks of the pipeline, and "
                    f"{'has a regularizer' if variable.trainable else 'is not trained'}. Ranks can share only "
                    "trained weights without a regularizer. Cut the model so that all calls of the layer are on one "
                    "rank."
                )


def _check_optimizer(optimizer: keras.optimizers.Optimizer | None) -> None:
    if optimizer is not None and len(_private.optimizer_chain(optimizer)) > 1:
        raise StrategyError(
            "A pipeline needs one optimizer that does not wrap another optimizer: mixed_bfloat16 needs no loss "
            f"scaling. Received: optimizer={optimizer!r}"
        )


@functools.cache
def _pipelined_class(cls: type) -> type:
    created = type(cls.__name__, (_Pipelined, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    _private.register_same_name(created, cls)
    return created


def pipeline(
    model: keras.Model, stages: int | Sequence[str], *, microbatches: int, schedule: str = "1f1b"
) -> keras.Model:
    """Cut a model into stages for a mesh with a pipeline axis.

    Each stage runs on separate devices. A step divides the batch into microbatches, which pass through the stages one
    after the other, so that all stages work at once. Devices send each other the activations at the cuts. Within a
    stage, the other axes of the mesh work as without a pipeline.

    Args:
        model: A built functional or Sequential `keras.Model`, such as a KerasHub backbone.
        stages: The number of stages, which are cut to take about the same time. Or regular expressions, each for the
            name or path of the first layer of the next stage. The number of stages must be the size of the pipeline
            axis, or, with `"interleaved"`, a multiple of it.
        microbatches: The number of microbatches of a step; more if this number does not divide the batch.
        schedule: `"gpipe"` (Huang et al. 2019): all forward passes, then all backward passes; every stage except the
            last keeps its inputs of all microbatches. `"1f1b"` (Narayanan et al. 2019, PipeDream with flushes): forward
            and backward alternate; stage `n` of `p` keeps its inputs of at most `p - n` microbatches. `"interleaved"`
            (Narayanan et al. 2021, Megatron-LM): several stages on each pipeline rank, for a shorter wait.

    Returns:
        The same object; its `compile` takes a strategy on a mesh with an axis `pipeline`.

    Raises:
        StrategyError: The model is not built, or has a custom `call`; it cannot be cut like this; or an unknown
            schedule.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> layers = [keras.layers.Dense(8, activation="relu", name=f"dense_{i}") for i in range(4)]
    >>> model = keras.Sequential([keras.Input((8,)), *layers])
    >>> model = tfshard.pipeline(model, stages=["dense_2"], microbatches=4)
    >>> mesh = tfshard.create_mesh(pipeline=2, batch=2)
    >>> model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(mesh))
    >>> history = model.fit(np.ones((16, 8)), np.ones((16, 8)), batch_size=16, verbose=0)
    """
    if not isinstance(model, keras.Model):
        raise StrategyError(f"pipeline takes a keras.Model. Received: {model!r} (of type {type(model)})")
    if schedule not in schedules.NAMES:
        raise StrategyError(f"Unknown schedule. Schedules: {schedules.NAMES}. Received: schedule={schedule!r}")
    option_checks.positive_integer("microbatches", microbatches)
    if _private.distribute_strategy(model) is not None:
        raise StrategyError(
            f"Model '{model.name}' is already compiled under a strategy. Cut a model before you compile "
            "it, or build a new model."
        )
    made = cut(model, stages)
    as_distributed(model)
    if not isinstance(model, _Pipelined):
        cls: Any = type(model)
        model.__class__ = _pipelined_class(cls)
    # Set behind Keras's back: Keras tracks attributes that are set on layers.
    vars(model)[_STATE] = _State(_Cut(made, stages, microbatches, schedule))
    return model


def pipeline_of(model: keras.Model) -> Pipeline | None:
    """Return the pipeline of a model that was cut and compiled; else None."""
    state = _state_of(model)
    return None if state is None else state.pipeline


def _raise_jit_compile(model: keras.Model) -> None:
    raise StrategyError(
        f"Pipelined model '{model.name}' cannot be compiled with jit_compile=True: XLA does not compile the stages of "
        "a pipeline. Leave jit_compile out. Received: jit_compile=True"
    )
