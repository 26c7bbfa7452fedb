"""`strategy="auto"`: choose a strategy for a model when its first batch is known.

`compile` only notes that a model waits for its choice. Before the first batch of `fit`, `train_on_batch`, `evaluate` or
`test_on_batch`, `choose` asks `advise` for a mesh, a stage, a layout map, recomputation and microbatches, and prints
them with the code that stands for them. Training on a larger batch, and another `compile`, choose again.
"""

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private, collectives, tables
from tfshard.devices import clients, device_memory, startup
from tfshard.devices.device_memory import DeviceMemory
from tfshard.devices.mesh import create_mesh
from tfshard.errors import DeviceMemoryError, LayoutError, StrategyError
from tfshard.graph import auto_layout, inventory
from tfshard.layouts import planner
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS
from tfshard.operations import blocks, layer_patch
from tfshard.training import custom_steps, decisions
from tfshard.training.strategy import ShardedStrategy

if TYPE_CHECKING:
    from tfshard.layouts.planner import Advice, Candidate, Machine

AUTO = "auto"
# The near misses that an error names.
_MISSES = 3


@dataclasses.dataclass(kw_only=True)
class AutoStrategy:
    """A model that was compiled with `strategy="auto"`.

    Attributes:
        jit_compile: The argument of `compile`.
        chosen: The choice, or None before the first batch.
        elements: The elements of the inputs that the choice was made for.
        is_for_training: False if the choice was made for a batch of an evaluation.
        evaluates: True while an evaluation runs.
        on_choice: Called with the new strategy of a model, while a `fit` runs.
    """

    jit_compile: Any
    chosen: "Candidate | None" = None
    elements: int = 0
    is_for_training: bool = False
    evaluates: bool = False
    on_choice: Callable[[ShardedStrategy], object] | None = None


_states: _private.WeakIdentityDict[keras.Model, AutoStrategy] = _private.WeakIdentityDict()


def state_of(model: keras.Model) -> AutoStrategy | None:
    """Return the state of a model that was compiled with `strategy="auto"`, or None."""
    return _states.get(model)


def expect(model: keras.Model, jit_compile: Any = AUTO) -> None:
    """Note that a model waits for a choice. A strategy that was chosen before stays until then."""
    before = _states.get(model)
    chosen = None if before is None else before.chosen
    _states[model] = AutoStrategy(jit_compile=jit_compile, chosen=chosen)


def forget(model: keras.Model) -> None:
    """Note that a model has a strategy of the user's choice."""
    before = _states.pop(model)
    if before is not None and before.chosen is not None and before.chosen.recompute:
        _forget_blocks(model)


@contextlib.contextmanager
def evaluating(model: keras.Model) -> Iterator[None]:
    """Mark the batches in this context as batches of an evaluation."""
    state = _states.get(model)
    if state is None:
        yield
        return
    before, state.evaluates = state.evaluates, True
    try:
        yield
    finally:
        state.evaluates = before


@contextlib.contextmanager
def choices_told(model: keras.Model, on_choice: Callable[[ShardedStrategy], object]) -> Iterator[None]:
    """Call a function with each strategy that is chosen for a model in this context."""
    state = _states.get(model)
    if state is None:
        yield
        return
    state.on_choice = on_choice
    try:
        yield
    finally:
        state.on_choice = None


def needs_choice(model: keras.Model, inputs: Any) -> bool:
    """Return whether a strategy has to be chosen for a batch.

    Args:
        model: A model.
        inputs: The inputs of a batch, or their specs. None if unknown.
    """
    state = _states.get(model)
    if state is None:
        return False
    if state.elements == 0 or not isinstance(_private.distribute_strategy(model), ShardedStrategy):
        return True
    if state.evaluates:
        return False
    return not state.is_for_training or inputs is None or elements_of(inputs) > state.elements


def elements_of(inputs: Any) -> int:
    """Return the number of elements of the inputs of a batch."""
    return sum(math.prod(tuple(leaf.shape)) for leaf in keras.tree.flatten(inputs) if hasattr(leaf, "shape"))


def choose(model: keras.Model, inputs: Any) -> ShardedStrategy | None:
    """Choose a strategy for a model that was compiled with `strategy="auto"`.

    Args:
        model: The model. It is built first, if it is not built yet, with its variables on the host.
        inputs: The inputs of a batch, or specs with full shapes.

    Returns:
        The strategy. None if the model has a strategy with the chosen settings already.

    Raises:
        DeviceMemoryError: No mesh, stage or option fits in the memory of the devices.
        StrategyError: The model's step cannot be planned.
    """
    state = _states[model]
    marked = state.chosen is not None and state.chosen.recompute
    if marked:
        _forget_blocks(model)
    try:
        strategy, keeps_blocks = _chosen(model, state, inputs)
    except BaseException:
        keeps_blocks = marked
        raise
    finally:
        if keeps_blocks:
            blocks.install(model, blocks.AUTO, False)
    return strategy


def _chosen(model: keras.Model, state: AutoStrategy, inputs: Any) -> tuple[ShardedStrategy | None, bool]:
    """Choose, as `choose` does, for a model without the blocks of the last choice.

    Returns:
        The strategy, or None; and whether the blocks of the last choice stay.
    """
    specs = keras.tree.map_structure(_spec, inputs)
    _check_plannable(model, specs)
    started = startup.current() or startup.initialize()
    memory, machine = _agreed_facts()
    rows = int(keras.tree.flatten(specs)[0].shape[0])
    advised = _advice(model, specs, started, memory, rows, machine)
    chosen = next((each for each in advised.candidates if each.fits), None)
    is_near = chosen is None
    if chosen is None:
        possible = [each for each in advised.candidates if each.problem is None]
        if not possible:
            raise StrategyError(_impossible(model, advised, memory, rows, started))
        if not state.evaluates:
            raise DeviceMemoryError(_too_large(model, possible, memory, rows, started))
        # An evaluation takes less than a training step. The strategy for training is chosen again.
        chosen = min(possible, key=lambda each: each.needed_bytes)
    strategy: Any = _private.distribute_strategy(model)
    is_same = isinstance(strategy, ShardedStrategy) and state.chosen is not None
    is_same = is_same and _settings(chosen) == _settings(state.chosen)  # type: ignore[arg-type]
    state.chosen, state.elements, state.is_for_training = chosen, elements_of(specs), not state.evaluates
    _tell(chosen, advised, memory, rows, started, is_near=is_near, is_same=is_same)
    return (None, chosen.recompute) if is_same else (strategy_of(chosen), False)


def strategy_of(candidate: "Candidate") -> ShardedStrategy:
    """Return the strategy of a candidate. Recomputation is not a setting of a strategy."""
    mesh = create_mesh(**_axes(candidate))
    layout_map = auto_layout.AUTO if MODEL_AXIS in _axes(candidate) else None
    stage, count = int(candidate.zero_stage), candidate.microbatches
    return ShardedStrategy(mesh, layout_map=layout_map, zero_stage=stage, microbatches=count)


def code_of(candidate: "Candidate") -> str:
    """Return the expression that makes the strategy of a candidate."""
    return dataclasses.replace(candidate, mesh_shape=_axes(candidate)).strategy_code(f'"{auto_layout.AUTO}"')


def _axes(candidate: "Candidate") -> dict[str, int]:
    """Return the axes of a candidate's mesh that have several devices; on one device the batch axis."""
    axes = {name: size for name, size in candidate.mesh_shape.items() if size > 1}
    return axes or {BATCH_AXIS: 1}


def _settings(candidate: "Candidate") -> tuple[object, ...]:
    return _axes(candidate), candidate.zero_stage, candidate.microbatches, candidate.recompute


def _spec(leaf: Any) -> keras.KerasTensor:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        leaf = np.asarray(leaf)
        dtype = leaf.dtype
    return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(dtype))


def _check_plannable(model: keras.Model, specs: Any) -> None:
    """Build a model on the host, and raise an error if its step cannot be planned."""
    how = 'Give strategy=tfshard.ShardedStrategy(...) instead of "auto" (see: tfshard docs choose_a_mesh).'
    if inventory.has_no_call(model):
        raise StrategyError(
            f"strategy='auto' plans a step from the model's call, and model '{model.name}' has none. {how} "
            f"Received: model={model!r}"
        )
    shapes = [leaf.shape for leaf in keras.tree.flatten(specs)]
    if not shapes or any(not shape or None in shape for shape in shapes):
        raise StrategyError(
            f"strategy='auto' plans a step from a batch of tensors with known shapes. {how} Received: {shapes}"
        )
    if all(layer.built for layer in _private.flatten_layers(model)):
        return
    with tf.device("CPU:0"), tf.init_scope():
        _private.keras_backend.compute_output_spec(model, specs, training=False)


def _agreed_facts() -> "tuple[DeviceMemory, Machine | None]":
    """Return the memory of a device and the described machine, equal on all clients: the least of each client."""
    memory, machine = device_memory.per_device(), planner.known_machine()
    if not clients.here().is_launched or clients.here().count == 1:
        return memory, machine
    cores = 0 if machine is None or machine.cores is None else machine.cores
    least = collectives.all_reduce(np.array([memory.bytes, cores], "int64"), "min")
    if machine is not None and machine.cores is not None:
        machine = dataclasses.replace(machine, cores=int(least[1]))
    return DeviceMemory(int(least[0]), f"{memory.origin}, on the client with the least"), machine


def _advice(
    model: keras.Model, specs: Any, started: startup.Runtime, memory: DeviceMemory, rows: int, machine: Any
) -> "Advice":
    def advised(layout_map: Any) -> "Advice":
        return planner.advise(
            model,
            started.num_devices,
            memory.bytes,
            rows,
            optimizer=model.optimizer,
            layout_map=layout_map,
            inputs=specs,
            machine=machine,
            pipelines=False,  # A model must be cut before it is compiled.
        )

    try:
        advice = _with_model_axis(advised) if started.num_devices > 1 else advised(None)
    except LayoutError as error:
        raise StrategyError(
            f"strategy='auto' cannot plan a step of model '{model.name}': {error} Give "
            'strategy=tfshard.ShardedStrategy(...) instead of "auto".'
        ) from error
    possible = tuple(each for each in advice.candidates if _can_run(model, each))
    return dataclasses.replace(advice, candidates=possible)


def _with_model_axis(advised: "Callable[[Any], Advice]") -> "Advice":
    """Return the advice with model axes, or without if no layouts can be found: the model's inputs are not known."""
    with contextlib.suppress(LayoutError):
        return advised(auto_layout.AUTO)
    return advised(None)


def _can_run(model: keras.Model, candidate: "Candidate") -> bool:
    """Return whether a model can use the recomputation and the microbatches of a candidate.

    An eager step holds all activations of the full batch. A custom `train_step` may compute more than means of a batch.
    """
    if model.run_eagerly:
        return not candidate.recompute and candidate.microbatches == 1
    return candidate.microbatches == 1 or not custom_steps.has_custom_steps(model)


def _forget_blocks(model: keras.Model) -> None:
    layer_patch.undo(model, [layer_patch.BLOCK])


def _tell(
    chosen: "Candidate",
    advised: "Advice",
    memory: DeviceMemory,
    rows: int,
    started: startup.Runtime,
    *,
    is_near: bool,
    is_same: bool,
) -> None:
    """Print the choice, its reason, and the code that stands for it, in one line."""
    fitting = [each for each in advised.candidates if each.fits]
    if is_near:
        why = "training on such a batch would not fit, and it comes closest"
    elif chosen.step_seconds is not None:
        why = f"the fastest steps by estimate of the {len(fitting)} configurations that fit, or as good as these"
    else:
        why = f"the first of the {len(fitting)} configurations that fit"
    extra = f", {chosen.microbatches} microbatches" if chosen.microbatches > 1 else ""
    extra += ", blocks recomputed" if chosen.recompute else ""
    again = "; then model.distribute_strategy.recompute(model)" if chosen.recompute else ""
    verb, stage = "keeps" if is_same else "chose", int(chosen.zero_stage)
    count, kind = started.num_devices, started.device_type
    devices = f"each of {count} {kind} devices" if count > 1 else f"the only {kind} device"
    line = (
        f'strategy="auto" {verb} {tables.mesh(_axes(chosen))}, ZeRO stage {stage}{extra}, for '
        f"batches of {rows} sample{'' if rows == 1 else 's'}: {why}. It needs {tables.size(chosen.needed_bytes)} of "
        f"{tables.size(memory.bytes)} on {devices} "
        f"({memory.origin}). To write it down: strategy={code_of(chosen)}{again}"
    )
    if clients.here().rank == 0:
        decisions.log(logging.INFO, lambda: line)
        print(f"tfshard: {line}", file=sys.stderr, flush=True)


def _received(memory: DeviceMemory, rows: int, started: startup.Runtime) -> str:
    return (
        f"Received: batches of {rows} samples, {started.num_devices} {started.device_type} devices of "
        f"{tables.size(memory.bytes)} ({memory.origin})"
    )


def _impossible(
    model: keras.Model, advised: "Advice", memory: DeviceMemory, rows: int, started: startup.Runtime
) -> str:
    """Return the message of the error that no mesh can take a batch: the reasons, and what helps."""
    devices = started.num_devices
    reasons = {tables.mesh(_axes(each)): each.problem for each in advised.candidates}
    listed = "; ".join(f"{axes}: {problem}" for axes, problem in reasons.items())
    return (
        f"strategy='auto' found no mesh for model '{model.name}'. {listed}. Use a batch_size that is a "
        f"multiple of {devices}, such as {-(-rows // devices) * devices}, or other devices "
        f"(tfshard.initialize(num_devices=...)). {_received(memory, rows, started)}"
    )


def _too_large(
    model: keras.Model, possible: "Sequence[Candidate]", memory: DeviceMemory, rows: int, started: startup.Runtime
) -> str:
    """Return the message of the error that nothing fits: the nearest misses, and what helps."""
    nearest: dict[tuple[tuple[str, int], ...], Candidate] = {}
    for each in sorted(possible, key=lambda each: each.needed_bytes):
        nearest.setdefault(tuple(_axes(each).items()), each)
    misses = ", ".join(
        f"{code_of(each)}{' with recomputation' if each.recompute else ''} needs {tables.size(each.needed_bytes)}"
        for each in [*nearest.values()][:_MISSES]
    )
    return (
        f"strategy='auto' found nothing that fits model '{model.name}' in the memory of a device. The nearest misses: "
        f"{misses}. Use a smaller batch or shorter sequences, more devices, mixed precision, a narrow slot_dtype, or "
        "give the memory that the devices really have (tfshard.initialize(memory_per_device=...)). "
        f"{_received(memory, rows, started)}"
    )
