"""Compares a sharded training step with a step on one device, and finds the operation that causes a difference."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, transfer
from tfshard.operations import programs
from tfshard.storage.variables import ShardedVariable
from tfshard.verifying import operation_check
from tfshard.verifying.operation_check import Held, Operation, Worst, worst_of
from tfshard.verifying.operation_check import largest as _largest
from tfshard.verifying.step_recording import Key, Observed, Recorder, StepFailure, run_on_one_device, run_sharded
from tfshard.verifying.subject import Subject, axes_of, differing_copies
from tfshard.verifying.verdict import Compared, Difference, Verification

# The tolerance of a value, relative to the largest number of its tensor. Sums of float32 in another order differ by
# 1e-7 to 1e-6. The coarsest compute dtype of the layers decides.
TOLERANCES: Mapping[str, float] = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
# The additional tolerance of an update, in units of the variable's last place: both steps add to the same number.
_UNITS = 4


class Comparison:
    """The comparison in one call of `verify`."""

    def __init__(self, subject: Subject, batch: Any, tolerance: float | None):
        self._subject, self._batch = subject, batch
        self._mesh = subject.strategy.mesh
        self._tolerance = tolerance or max(TOLERANCES.get(dtype, 0.0) for dtype in _dtypes(subject.model))
        self._differences: list[Difference] = []
        self._not_compared: dict[str, None] = {}
        self._rows: list[Compared] = []
        # The differences in numbers, by the key of the value or the name of the variable.
        self._wrong: dict[Key | str, Difference] = {}

    def run(self) -> Verification:
        subject = self._subject
        self._check_storage("before the step")
        if self._differences:
            self._not_compared["the step: devices already hold different values before it"] = None
            return self._result()
        on_mesh = batching.batch_to_mesh(self._batch, self._mesh, subject.strategy.config.already_sharded)
        self._check_batch(on_mesh)
        self._check_stage()
        try:
            sharded = run_sharded(subject, on_mesh)
            self._check_copies(sharded)
            self._check_storage("after the step")
        except StepFailure as failure:
            subject.restore()
            self._explain(failure)
            return self._result()
        subject.restore()
        try:
            with subject.on_one_device():
                alone = run_on_one_device(subject, self._host_batch(), sharded)
        except StepFailure as failure:
            self._not_compared[f"the step: it fails on one device. {_said(failure)}"] = None
            return self._result()
        self._not_compared |= sharded.recorder.left_out | alone.recorder.left_out
        self._compare(sharded, alone)
        try:
            self._locate_first(on_mesh, sharded)
        except StepFailure as failure:
            self._not_compared[f"single operations: the step fails when they are returned. {_said(failure)}"] = None
        return self._result()

    def _result(self) -> Verification:
        strategy = self._subject.strategy
        kinds = ("batch", "failure", "random", "replicas", "layout", "layer", "loss", "gradient", "update", "metric")
        return Verification(
            model=self._subject.model.name,
            mesh=strategy.mesh_shape.given,
            zero_stage=strategy.zero_stage.value,
            tolerance=self._tolerance,
            compared=tuple(self._rows),
            differences=tuple(sorted(self._differences, key=lambda d: kinds.index(d.kind))),
            not_compared=tuple(self._not_compared),
        )

    def _host_batch(self) -> Any:
        return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.constant(leaf), self._batch)

    # --- differences that are not numbers of the step

    def _check_storage(self, when: str) -> None:
        for storage, name in self._subject.storages().items():
            shards = dtensor.unpack(storage.buffer.value())
            text = differing_copies(shards, axes_of(storage.buffer.value()), self._mesh)
            if text is not None and all(d.place != name for d in self._differences):
                message = f"devices hold different copies of variable '{name}' {when}: {text}"
                self._differences.append(Difference(kind="replicas", place=name, message=message))

    def _check_batch(self, on_mesh: Any) -> None:
        leaves = zip(tf.nest.flatten(self._batch), tf.nest.flatten(on_mesh), strict=True)
        for number, (host, sharded) in enumerate(leaves):
            if host is None:
                continue
            place = f"part {number} of the batch"
            worst = worst_of(transfer.to_host(sharded), host, rtol=0.0)
            if worst is not None:
                self._add("batch", place, f"{place} differs on the mesh", worst)

    def _check_stage(self) -> None:
        """Check that the batch axis shards the tensors that the ZeRO stage shards."""
        strategy = self._subject.strategy
        zero_stage = strategy.config.zero_stage
        for variable in self._trained().values():
            slots = variable.slots.values()
            kinds = [
                ("parameter", variable, zero_stage.shard_params),
                *(("slot", slot, zero_stage.shard_slots) for slot in slots),
            ]
            for kind, part, shards in kinds:
                axes = axes_of(part.buffer.value())
                if shards and self._can_shard(variable) and strategy.mesh_shape.data not in axes:
                    message = (
                        f"{kind} '{part.path}' of '{variable.path}' is replicated over the batch axis, but ZeRO "
                        f"stage {strategy.zero_stage} shards it: its layout is {axes}"
                    )
                    self._differences.append(Difference(kind="layout", place=part.path, message=message))

    def _trained(self) -> dict[str, ShardedVariable]:
        found = {v.path: _private.backend_variable(v) for v in self._subject.model.trainable_variables}
        return {path: current for path, current in found.items() if isinstance(current, ShardedVariable)}

    def _can_shard(self, variable: ShardedVariable) -> bool:
        return self._subject.strategy.mesh_shape.data_size > 1 and math.prod(variable.layout.spec.shape) > 1

    def _check_scattered(self, sharded: Observed) -> None:
        """Check that stages 2 and 3 give the optimizer no full gradient."""
        trained, strategy = self._trained(), self._subject.strategy
        for key, axes in sharded.layouts.items():
            variable = trained.get(key.path) if key.kind == "gradient" else None
            if variable is None or variable.layout.sharded is None or variable.layout.flat is not None:
                continue
            if variable.layout.kind is not None:
                continue  # The gradient has only the parts that the step read.
            if strategy.config.zero_stage.shard_grads and strategy.mesh_shape.data not in axes:
                message = (
                    f"{key} is replicated over the batch axis when the optimizer gets it, but ZeRO stage "
                    f"{strategy.zero_stage} shards it: its layout is {axes}"
                )
                self._differences.append(Difference(kind="layout", place=key.path, message=message))

    def _check_copies(self, sharded: Observed) -> None:
        """Check that devices with copies of a shard hold the same numbers."""
        graph, recorder = sharded.recorder.graph, sharded.recorder
        same = {t.name for t in recorder.values.values() if t is not None and t.name not in sharded.differing}
        for name, text in sharded.differing.items():
            tensor = graph.get_tensor_by_name(name)
            among = operation_check.ancestors([tensor], same)
            random = next((op for op in among if op.type in _private.ALL_RANDOM_OPS), None)
            if random is not None and any(d.kind == "random" for d in self._differences):
                continue  # The difference follows from the first random difference.
            operation = tensor.op if random is None else random
            place = recorder.layer_of(operation) or operation.name
            what = "compute different values" if random is None else "draw different random numbers"
            line = operation_check.line_of(operation)
            message = f"devices that hold copies {what} in {place}, operation '{operation.name}' ({operation.type})"
            message += f", from {line}" if line else ""
            kind = "replicas" if random is None else "random"
            self._differences.append(Difference(kind=kind, place=place, message=f"{message}: {text}"))

    def _explain(self, failure: StepFailure) -> None:
        """Report where the sharded step failed, and if the step fails on one device, too."""
        recorder = failure.recorder
        operation = _failed_operation(str(failure), recorder.graph)
        if operation is None:
            place = where = "an operation that TensorFlow does not name"
        else:
            line = operation_check.line_of(operation)
            place = recorder.layer_of(operation) or operation.name
            where = f"{place}, operation '{operation.name}' ({operation.type})" + (f", from {line}" if line else "")
        try:
            with self._subject.on_one_device():
                run_on_one_device(self._subject, self._host_batch(), None)
            alone = "On one device it does not fail."
        except StepFailure as other:
            alone = f"On one device it fails too: {_said(other)}"
        message = f"the step fails in {where}: {type(failure.error).__name__}: {_said(failure)}. {alone}"
        self._differences.append(Difference(kind="failure", place=place, message=message))
        self._not_compared["the values of the step: it failed"] = None

    # --- numbers

    def _add(self, kind: str, place: str, what: str, worst: Worst) -> Difference:
        if isinstance(worst.sharded, tuple):
            text = f"{what}: sharded shape {worst.sharded}, one device {worst.one_device}"
        else:
            text = f"{what}: sharded {worst.sharded}, one device {worst.one_device} at index {worst.index}"
            if math.isfinite(worst.error):
                text += f" (error {worst.error:.1e})"
        difference = Difference(
            kind=kind, place=place, message=text, sharded=worst.sharded, one_device=worst.one_device,
            index=worst.index, error=worst.error,
        )  # fmt: skip
        self._differences.append(difference)
        return difference

    def _compare(self, sharded: Observed, alone: Observed) -> None:
        self._check_scattered(sharded)
        for key in [k for k in alone.values if k not in sharded.values]:
            if key.path in sharded.recorder.compiled:
                continue  # The output of the compiled block is compared.
            self._not_compared[f"{key}: the sharded step does not compute it"] = None
        inside = sharded.recorder.compiled - {key.path for key in sharded.values if key.kind == "layer"}
        if inside:
            self._not_compared[
                f"layers and random numbers inside compiled blocks, such as '{min(inside)}': only outputs of "
                "blocks and gradients are compared"
            ] = None
        floors = {
            "random": 1e-3,
            "layer": 1e-3,
            "loss": 1e-3,
            "metric": 1e-3,
            "gradient": 1e-2 * _largest_gradient(alone),
        }
        for kind in ("random", "layer", "loss", "gradient", "update", "metric"):
            if kind == "update":
                self._compare_updates(sharded, alone)
                continue
            found: list[_Found] = []
            for key, ours in sharded.values.items():
                if key.kind != kind:
                    continue
                if key not in alone.values:
                    self._not_compared[f"{key}: the step on one device does not compute it"] = None
                    continue
                found += self._one(key, ours, alone.values[key], floors[kind])
            self._row(kind, found)

    def _one(self, key: Key, ours: np.ndarray | None, theirs: np.ndarray | None, floor: float) -> Iterator["_Found"]:
        if ours is None or theirs is None:
            if ours is not theirs:
                lost = Worst(sharded="no gradient" if ours is None else "a gradient",
                             one_device="no gradient" if theirs is None else "a gradient",
                             index=(), error=math.inf)  # fmt: skip
                yield _Found(key=key, worst=lost, what=str(key))
            return
        worst = operation_check.error_of(ours, theirs, floor=floor)
        yield _Found(key=key, worst=worst, what=f"{key}{self._ratio(ours, theirs)}")

    def _ratio(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        """Return a text if one tensor is a multiple of the other, such as by the number of samples, else ""."""
        if ours.shape != theirs.shape or ours.dtype.kind != "f" or not np.isfinite(ours).all() or not theirs.any():
            return ""
        a, b = ours.astype("float64").ravel(), theirs.astype("float64").ravel()
        ratio = float(a @ b / (b @ b))
        proportional = np.abs(a - ratio * b).max() <= 1e-3 * np.abs(a).max()
        if not proportional or abs(ratio) < 1e-3 or abs(ratio - 1.0) < 10 * self._tolerance:
            return ""
        sizes = self._subject.strategy.mesh_shape
        rows = [leaf.shape[0] for leaf in tf.nest.flatten(self._batch) if leaf is not None and leaf.ndim]
        names = {rows[0]: "number of samples in the batch"} if rows else {}
        names |= {math.prod(sizes.values()): "number of devices"}
        names |= {size: f"size of axis '{axis}'" for axis, size in sizes.items() if size > 1}
        for number, name in names.items():
            if number > 1 and math.isclose(ratio, number, rel_tol=1e-3):
                return f" is {number} times as large, the {name} (a sum where one device has a mean?)"
            if number > 1 and math.isclose(ratio, 1 / number, rel_tol=1e-3):
                return f" is 1/{number} of it, one over the {name} (divided once too often?)"
        return f" is {ratio:.4g} times as large"

    def _compare_updates(self, sharded: Observed, alone: Observed) -> None:
        """Compare the changes of the variables, relative to the size of the change."""
        found = []
        for name, before in self._subject.before.items():
            ours, theirs = sharded.after.get(name), alone.after.get(name)
            if ours is None or theirs is None:
                self._not_compared[f"variable '{name}': the step on one device has none"] = None
                continue
            if ours.dtype.kind in "biu":
                worst = operation_check.error_of(ours, theirs)
            else:
                change = _largest(theirs.astype("float64") - before.astype("float64"))
                # The tolerance applies to the change, or to the last places of the variable if those are coarser.
                scale = max(change, _UNITS * _last_place(ours.dtype) * _largest(theirs) / self._tolerance)
                worst = operation_check.error_of(ours, theirs, scale=scale)
            found.append(_Found(key=name, worst=worst, what=f"variable '{name}' after the step"))
        self._row("update", found)

    def _row(self, kind: str, found: list["_Found"]) -> None:
        if not found:
            return
        exact = {True: 0.0, False: self._tolerance}
        wrong = [each for each in found if each.worst.error > exact[isinstance(each.worst.sharded, (bool, int))]]
        for each in wrong:
            self._wrong[each.key] = self._add(kind, each.place, each.what, each.worst)
        largest = max(wrong or found, key=lambda each: each.worst.error)
        row = Compared(
            kind=kind, count=len(found), differing=len(wrong), error=largest.worst.error, place=largest.place
        )
        self._rows.append(row)

    # --- which operation

    def _locate_first(self, on_mesh: Any, sharded: Observed) -> None:
        """Add the faulty operation to the first difference in numbers."""
        if not self._wrong or any(d.kind in ("batch", "random") for d in self._differences):
            return
        key = self._first_target(sharded)
        first = self._wrong[key]
        operation = self._find_operation(key, on_mesh, sharded)
        self._differences.remove(first)
        self._differences.insert(0, dataclasses.replace(first, operation=operation))

    def _first_target(self, sharded: Observed) -> Key | str:
        """Return the first difference; among gradients, the gradient that is computed first, of the last layer."""
        first = next(iter(self._wrong))
        if not isinstance(first, Key) or first.kind != "gradient":
            return first
        order = {op.name: i for i, op in enumerate(sharded.recorder.graph.get_operations())}
        made = {key: t for key, t in sharded.recorder.values.items() if key in self._wrong and t is not None}
        gradients = [key for key in self._wrong if isinstance(key, Key) and key.kind == "gradient"]
        return min(gradients, key=lambda key: order[made[key].op.name] if key in made else -1)

    def _find_operation(self, first: Key | str, on_mesh: Any, sharded: Observed) -> Operation | None:
        subject = self._subject
        region: list[tf.Operation] = []
        handles: dict[str, Held] = {}

        def select(recorder: Recorder) -> list[tf.Tensor]:
            noted = {key: tensor for key, tensor in recorder.values.items() if tensor is not None}
            known = {tensor.name for key, tensor in noted.items() if key not in self._wrong}
            if isinstance(first, str):
                targets = self._assigned(first, recorder.graph)
            else:
                targets = [noted[first]] if first in noted else []
            region[:] = operation_check.ancestors(targets, known)
            if len(region) > operation_check.MAX_OPERATIONS:
                self._not_compared[f"single operations: {len(region)} operations may have caused {first}"] = None
                region.clear()
            handles.update(self._handles(recorder.graph))
            tensors = {t.name: t for op in region for t in (*op.inputs, *op.outputs)}
            return [t for t in tensors.values() if operation_check.is_fetched(t) and t.graph is recorder.graph]

        again = run_sharded(subject, on_mesh, select)
        subject.restore()
        found = operation_check.first_wrong(region, again.selected, handles, self._tolerance)
        if found is not None or not region:
            return found
        names = {tensor.name for op in region for tensor in op.outputs}

        def same_names(recorder: Recorder) -> list[tf.Tensor]:
            operations = {op.name: op for op in recorder.graph.get_operations()}
            others = [(op, operations[op.name]) for op in region if op.name in operations]
            found = [t for op, other in others if operation_check.alike(op, other) for t in other.outputs]
            return [t for t in found if t.name in names and operation_check.is_fetched(t)]

        with subject.on_one_device():
            alone = run_on_one_device(subject, self._host_batch(), again, same_names)
        blocks = self._wrong_programs(region, self._wrong[first], again.recorder)
        return operation_check.first_other(region, again.selected, alone.selected, self._tolerance, blocks)

    def _wrong_programs(
        self, region: list[tf.Operation], first: Difference, recorder: Recorder
    ) -> dict[str, Operation]:
        """Return the programs of compiled layers with wrong outputs or gradients, by the name of the operation."""
        found = {}
        for operation in region:
            if operation.type != programs.CALL:
                continue
            span, is_backward = recorder.span_of(operation), operation.name.startswith("gradient_tape/")
            if span is None:
                what = "of a function or an update"
            else:
                what = f"of the {'backward' if is_backward else 'forward'} pass of compiled {span.layer}"
                kind = "gradient" if is_backward else "layer"
                noted = {
                    key for key in recorder.values if key.kind == kind and f"{key.path}/".startswith(f"{span.path}/")
                }
                if noted and not noted & self._wrong.keys():
                    continue
            found[operation.name] = Operation(
                name=operation.name,
                type=operation.type,
                line="",
                reason=f"the XLA program {what} (without jit_compile=True, verify looks into it)",
                sharded=first.sharded,
                one_device=first.one_device,
                index=first.index,
            )
        return found

    def _assigned(self, name: str, graph: tf.Graph) -> list[tf.Tensor]:
        variable = self._subject.variables().get(name)
        current = None if variable is None else _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable):
            return []
        return operation_check.assigned(graph, current.buffer.handle)[-1:]

    def _handles(self, graph: tf.Graph) -> dict[str, Held]:
        """Return the value of each variable's buffer before the step, by the name of its handle in the graph."""
        outside = {id(storage.buffer.handle): (storage, name) for storage, name in self._subject.storages().items()}
        found = {}
        for external, internal in graph.captures:
            if id(external) in outside:
                storage, name = outside[id(external)]
                with tf.init_scope():
                    value = transfer.to_host(storage.buffer.value())
                found[internal.name] = Held(name=name, value=value)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A compared value.

    Attributes:
        key: The key of the value, or the name of a variable.
        worst: The largest difference.
        what: A description.
    """

    key: Key | str
    worst: Worst
    what: str

    @property
    def place(self) -> str:
        if isinstance(self.key, str):
            return self.key
        if self.key.kind == "layer":
            return f"layer '{self.key.path}' ({self.key.type})"
        return self.key.path or ("step" if self.key.kind == "random" else "loss")


def _largest_gradient(observed: Observed) -> float:
    gradients = [value for key, value in observed.values.items() if key.kind == "gradient" and value is not None]
    return max((_largest(value) for value in gradients), default=0.0)


def _last_place(dtype: np.dtype) -> float:
    """Return the relative distance of two neighboring numbers."""
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7  # numpy has no kind for bfloat16.


def _dtypes(model: keras.Model) -> set[str]:
    """Return the dtypes in which the layers of a model compute."""
    found = {str(layer.compute_dtype) for layer in _private.flatten_layers(model)} & TOLERANCES.keys()
    return found or {"float32"}


def _failed_operation(message: str, graph: tf.Graph) -> tf.Operation | None:
    """Return the operation that a device error names."""
    operations = {operation.name: operation for operation in graph.get_operations()}
    for name in re.findall(r"\{\{node ([^}]+)\}\}", message):
        parts = name.split("/")
        for begin in range(len(parts)):
            found = operations.get("/".join(parts[begin:]))
            if found is not None:
                return found
    return None


def _said(failure: StepFailure) -> str:
    """Return the error text of the operation, without TensorFlow's node names."""
    lines = [re.sub(r"\{\{function_node [^}]*\}\}\s*", "", line).strip() for line in str(failure).splitlines()]
    lines = [line for line in lines if line]
    said = [line for line, after in zip(lines, lines[1:], strict=False) if after.startswith("[[{{node")]
    return re.sub(r"^\(\d+\) [A-Z_]+: ", "", (said or lines or [""])[0]).rstrip(".")
