"""Check `failing-steps`: a step that fails raises its cause, and the next step works."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfshard
from tfshard.devices import startup
from tfshard.doctor.check_log import CheckLog, CheckRequest

_SAMPLES, _FEATURES, _TARGETS, _IDS = 4, 6, 2, 10
# A gradient times this number overflows in float32, if the targets are as large as `_HUGE`.
_LARGE, _HUGE = 1e30, 1e20
# The beginning of the line that each client prints for a step that it does not run.
SKIPPED = "Not on GPUs, which raise no error: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailingStep:
    """A step that has to fail.

    Attributes:
        title: Its cause.
        error: The name of the error's type.
        words: Words of the error's message, in one line.
        fail: Runs the step, with a model and a good batch.
        build: Builds the model.
        on_gpu: False if GPUs compute the step without an error.
    """

    title: str
    error: str
    words: str
    fail: Callable[[keras.Model, np.ndarray, np.ndarray], object]
    build: Callable[[], keras.Model]
    on_gpu: bool = True


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Run failing steps, and a normal step after each. In a run of several clients, the failing step ends the run.

    A step that raises nothing or something else, and a normal step that fails afterwards, are faults.
    """
    chosen = {request.case: STEPS[request.case]} if request.case else STEPS
    tried = worked = 0
    for each in chosen.values():
        if started.device_type == "GPU" and not each.on_gpu:
            log.note(f"{SKIPPED}{each.title}.")
            # The launcher of each host reads the output. Only host 0 has a log.
            print(f"{SKIPPED}{each.title}.", flush=True)
            continue
        tried += 1
        model, x, y = _compiled(each, started.num_devices)
        error = _error_of(functools.partial(each.fail, model, x, y))
        if started.num_clients > 1:
            if error is not None:
                raise error
            log.fault(f"A step raised no error: {each.title}.")
            continue
        worked += _log_step(log, each, error, _next_step(model, x, y))
    log.summarize(f"{worked} of {tried} raised their cause, and the next step worked")


def _error_of(step: Callable[[], object]) -> Exception | None:
    """Run a step. Returns the error that the step raises."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - Any error is a result.
        return error
    return None


def _next_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> str:
    """Run a normal step. Returns the fault of the step, or an empty text."""
    losses: list[float] = []
    error = _error_of(lambda: losses.append(float(np.ravel(model.train_on_batch(x, y))[0])))
    if error is not None:
        return f"raised {_text(error)}"
    return "" if np.isfinite(losses[0]) else f"has the loss {losses[0]}"


def _log_step(log: CheckLog, each: FailingStep, error: Exception | None, fault_after: str) -> bool:
    """Log a failing step, and the next step's fault. Returns True if neither has a fault."""
    is_right = error is not None and type(error).__name__ == each.error and each.words in str(error)
    log.row(
        "Failing steps", step=each.title, error="none" if error is None else type(error).__name__,
        **{"next step": "fails" if fault_after else "trains"},
    )  # fmt: skip
    if error is None:
        log.fault(f"A step raised no error: {each.title}.")
    elif not is_right:
        log.fault(f"A step raised another error, {_text(error)} ({each.title})")
    if fault_after:
        log.fault(f"The step after the failed step {fault_after} ({each.title})")
    return is_right and not fault_after


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _compiled(each: FailingStep, devices: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Return the step's model, trained by one step, and the batch of that step."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(each.build())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), zero_stage=3)
    model.compile("adam", "mse", metrics=[_FiniteTargets()], strategy=strategy)
    generator, samples = np.random.default_rng(0), _SAMPLES * devices
    x = generator.normal(size=(samples, _FEATURES)).astype("float32")
    if model.inputs[0].dtype == "int32":
        x = generator.integers(0, _IDS, (samples, _FEATURES)).astype("int32")
    y = generator.normal(size=(samples, _TARGETS)).astype("float32")
    if not _is_switched(model):
        model.train_on_batch(x, y)
    return model, x, y


# --- models ------------------------------------------------------------------------------------------


class _Finite(keras.layers.Layer):  # type: ignore[misc]
    """A layer that checks its inputs and gradients for finite values."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.debugging.check_numerics(upstream * _LARGE, "a gradient is not finite") / _LARGE

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def checked(x: tf.Tensor) -> Any:
            return tf.debugging.check_numerics(x, "an input is not finite"), gradient

        return checked(inputs)


class _FiniteTargets(keras.metrics.Mean):  # type: ignore[misc]
    """A metric that checks its targets for finite values."""

    def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None) -> None:
        del y_pred
        super().update_state(tf.debugging.check_numerics(y_true, "a target is not finite"), sample_weight)


class _Switched(keras.layers.Layer):  # type: ignore[misc]
    """A layer that fails while it is traced, until `broken` is False.

    Attributes:
        broken: True at first.
    """

    broken = True


class _Raising(_Switched):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.broken:
            raise RuntimeError("a layer raised this error")
        return inputs


class _Printing(_Switched):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.broken:
            tf.print("a step on a mesh does not print")
        return inputs


def _checked() -> keras.Model:
    return keras.Sequential([keras.Input((_FEATURES,)), keras.layers.Dense(8), _Finite(), keras.layers.Dense(_TARGETS)])


def _embedding() -> keras.Model:
    layers = [keras.layers.Embedding(_IDS, 4), keras.layers.Flatten(), keras.layers.Dense(_TARGETS)]
    return keras.Sequential([keras.Input((_FEATURES,), dtype="int32"), *layers])


def _switched(layer: type[_Switched]) -> Callable[[], keras.Model]:
    # The layer is called once to build the model, which must work.
    def build() -> keras.Model:
        made = layer()
        made.broken = False
        model = keras.Sequential([keras.Input((_FEATURES,)), made, keras.layers.Dense(_TARGETS)])
        made.broken = True
        return model

    return build


def _is_switched(model: keras.Model) -> bool:
    return any(isinstance(layer, _Switched) for layer in model.layers)


# --- steps -------------------------------------------------------------------------------------------


def _with(values: np.ndarray, value: float) -> np.ndarray:
    """Return a copy with another last element, on the last device."""
    changed: np.ndarray = values.copy()
    changed[-1, -1] = value
    return changed


def _while_broken(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    try:
        model.train_on_batch(x, y)
    finally:
        for layer in model.layers:
            if isinstance(layer, _Switched):
                layer.broken = False


def _failing_pipeline(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    data = tf.data.Dataset.from_tensor_slices((np.stack([x, _with(x, np.nan)]), np.stack([y, y])))
    model.fit(
        data.map(lambda x, y: (tf.debugging.check_numerics(x, "the data are not finite"), y)), shuffle=False, verbose=0
    )


STEPS: Mapping[str, FailingStep] = {
    "nan-input": FailingStep(
        title="an input that is not a number",
        error="InvalidArgumentError",
        words="an input is not finite",
        fail=lambda model, x, y: model.train_on_batch(_with(x, np.nan), y),
        build=_checked,
    ),
    "nan-target": FailingStep(
        title="a target that is not a number",
        error="InvalidArgumentError",
        words="a target is not finite",
        fail=lambda model, x, y: model.train_on_batch(x, _with(y, np.nan)),
        build=_embedding,
    ),
    "gradient": FailingStep(
        title="a gradient that is not finite",
        error="InvalidArgumentError",
        words="a gradient is not finite",
        fail=lambda model, x, y: model.train_on_batch(x, _with(y, _HUGE)),
        build=_checked,
    ),
    "id": FailingStep(
        title="an id that the embedding does not have",
        error="InvalidArgumentError",
        words="is not in [0, ",
        fail=lambda model, x, y: model.train_on_batch(_with(x, _IDS + 67), y),
        build=_embedding,
        on_gpu=False,
    ),
    "width": FailingStep(
        title="inputs with too many features",
        error="ValueError",
        words="is incompatible with the layer",
        fail=lambda model, x, y: model.train_on_batch(np.concatenate([x, x], 1), y),
        build=_checked,
    ),
    "targets": FailingStep(
        title="targets of another width than the outputs",
        error="ValueError",
        words="Dimensions must be equal",
        fail=lambda model, x, y: model.train_on_batch(x, np.concatenate([y, y, y], 1)),
        build=_checked,
    ),
    "strings": FailingStep(
        title="inputs that are strings",
        error="UnimplementedError",
        words="Cast string to float is not supported",
        fail=lambda model, x, y: model.train_on_batch(x.astype(str), y),
        build=_checked,
    ),
    "layer": FailingStep(
        title="a layer that raises while it is traced",
        error="RuntimeError",
        words="a layer raised this error",
        fail=_while_broken,
        build=_switched(_Raising),
    ),
    "operation": FailingStep(
        title="an operation that no mesh computes",
        error="UnsupportedOperationError",
        words="cannot have tf.print",
        fail=_while_broken,
        build=_switched(_Printing),
    ),
    "data": FailingStep(
        title="data that fail in the input pipeline",
        error="InvalidArgumentError",
        words="the data are not finite",
        fail=_failing_pipeline,
        build=_checked,
    ),
}
