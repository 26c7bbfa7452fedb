"""Every private TensorFlow and Keras name that tfshard touches, and nothing else.

An upgrade of TensorFlow or Keras is reviewed against this file: each function says which private
name it stands for. The tested versions are pinned below and checked when tfshard is imported.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata

TESTED = {"tensorflow": "2.21", "keras": "3.15"}


def check_versions() -> None:
    """Raises `ImportError` unless TensorFlow and Keras are the versions tfshard was tested with."""
    for package, series in TESTED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(
                f"tfshard needs {package}=={series}.*, and it is not installed. "
                f"Install it with: pip install '{package}=={series}.*'"
            ) from None
        if version.split(".")[:2] != series.split("."):
            raise ImportError(
                f"tfshard relies on private names of {package} and was tested with {series}.* only. "
                f"Install it with: pip install '{package}=={series}.*'. Received: {package}=={version}"
            )


check_versions()

import keras  # noqa: E402  # After check_versions: a wrong version must fail with our message.

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfshard needs Keras's TensorFlow backend. Set the environment variable KERAS_BACKEND=tensorflow "
        f"before Keras is imported. Received: keras.backend.backend()={keras.backend.backend()!r}"
    )

import tensorflow as tf  # noqa: E402
from keras.src.backend.common import global_state as _global_state  # noqa: E402
from keras.src.backend.common.name_scope import current_path  # noqa: E402
from keras.src.models.functional import Functional  # noqa: E402
from keras.src.models.model import functional_init_arguments  # noqa: E402
from keras.src.saving import object_registration as _object_registration  # noqa: E402
from tensorflow.dtensor.python import accelerator_util as _accelerator_util  # noqa: E402
from tensorflow.python.eager import context as _context  # noqa: E402
from tensorflow.python.eager import record as _record  # noqa: E402
from tensorflow.python.eager import tape as _tape  # noqa: E402
from tensorflow.python.framework import op_callbacks as _op_callbacks  # noqa: E402
from tensorflow.tsl.profiler.protobuf import xplane_pb2 as _xplane_pb2  # noqa: E402

__all__ = ["Functional", "current_path", "functional_init_arguments"]


# --- TensorFlow ---------------------------------------------------------------------------------


def context_is_initialized() -> bool:
    """Whether TensorFlow has already fixed its devices (`context.context()._initialized`)."""
    return bool(_context.context()._initialized)


def dtensor_is_initialized() -> bool:
    """Whether DTensor's accelerator system was started (`accelerator_util.is_initialized`)."""
    return bool(_accelerator_util.is_initialized())


def record_variable_access(variable) -> None:
    """Tells every active gradient tape that `variable` was read (`tape.variable_accessed`)."""
    _tape.variable_accessed(variable)


def stop_recording():
    """A context in which no gradient tape records (`record.stop_recording`)."""
    return _record.stop_recording()


def graph_is_loop(graph) -> bool:
    """Whether a `FuncGraph` is the condition or the body of a `tf.while_loop`."""
    return type(graph).__name__ in ("WhileCondFuncGraph", "WhileBodyFuncGraph")


def outer_graph(graph):
    """The graph in which a `FuncGraph` is being built, or None (`FuncGraph.outer_graph`)."""
    return getattr(graph, "outer_graph", None)


# The operations that DTensor's RandomOpSPMDExpander expands.
RANDOM_OPS = frozenset(
    ("StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomUniformFullInt",
     "StatelessRandomUniformFullIntV2", "StatelessRandomUniformIntV2", "StatelessRandomNormal",
     "StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2")
)  # fmt: skip


@contextlib.contextmanager
def replaced_outputs(replace: dict):
    """A context in which, when an operation of one of the types in `replace` is added to a graph, what uses its output
    gets `replace[type](output)` instead (`op_callbacks.add_op_callback`, made for TensorFlow's debugger)."""

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        del inputs, attrs, op_name
        if graph is None or outputs is None:
            return None
        if op_type not in replace:
            return list(outputs)  # What an earlier callback made of them. TensorFlow has lists here.
        return [replace[op_type](output) for output in outputs]

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


# --- Keras: where a variable is being created ----------------------------------------------------


def scope_callers() -> list:
    """The objects whose name scopes are open, outermost first (`name_scope.caller`)."""
    stack = _global_state.get_global_attribute("name_scope_stack") or []
    return [entry.caller for entry in stack if entry.caller is not None]


# --- Keras: variables without values -------------------------------------------------------------


@contextlib.contextmanager
def abstract_scope(refuse):
    """A context in which Keras variables get a shape and a dtype, and never a value.

    A `keras.StatelessScope` leaves variables to be initialised when it ends, and keeps them in a global list
    ("uninitialized_variables") until then. They are taken off that list, so that no later scope allocates them.
    `refuse(path, shape, dtype=)` takes the place of their initializers (`Variable._initializer`): reading one would
    otherwise draw new numbers each time.
    """
    waiting = list(_global_state.get_global_attribute("uninitialized_variables") or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        known = {id(variable) for variable in waiting}
        for variable in _global_state.get_global_attribute("uninitialized_variables") or []:
            if id(variable) not in known:
                variable._initializer = functools.partial(refuse, variable.path)
        _global_state.set_global_attribute("uninitialized_variables", waiting)


def stand_in(path: str, shape: tuple, dtype: str):
    """A Keras variable of this path (`Variable._path`) that an optimizer can be built for; no value is made.

    In a graph: TensorFlow allocates nothing there.
    """
    variable = keras.Variable("zeros", shape=shape, dtype=dtype, name=path.rpartition("/")[2])
    variable._path = path
    return variable


# --- Keras: variables, models and optimizers -----------------------------------------------------


def backend_variable(variable):
    """The tf.Variable inside a Keras variable, None while it is not built (`Variable._value`)."""
    return variable._value


def set_backend_variable(variable, value) -> None:
    """Puts another tf.Variable into a Keras variable (`Variable._value`)."""
    variable._value = value


def set_distribute_strategy(owner, strategy) -> None:
    """Makes a Keras model or optimizer use `strategy` (`_distribute_strategy`, `_distribution_strategy`)."""
    if isinstance(owner, keras.optimizers.Optimizer):
        owner._distribution_strategy = strategy
    else:
        owner._distribute_strategy = strategy


def distribute_strategy(model):
    """The strategy that a Keras model was built or compiled under, or None."""
    return getattr(model, "_distribute_strategy", None)


def make_step_function(model, name: str):
    """What Keras calls for one execution of `model.train_step` or `test_step` (`Trainer._make_function`)."""
    return model._make_function(getattr(model, name))


def flatten_layers(model) -> list:
    """A model and every layer below it, each once, in the order in which they were made (`Layer._layers`).

    Keras's own `Layer._flatten_layers` turns the order of a layer's sublayers around.
    """
    found, waiting = {}, [model]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in found:
            found[id(layer)] = layer
            waiting += reversed(layer._layers)
    return list(found.values())


def layer_inputs(layer) -> list:
    """The symbolic tensors that a layer of a functional model was called on (`Operation._inbound_nodes`)."""
    return [tensor for node in layer_uses(layer) for tensor in node.input_tensors]


def layer_uses(layer) -> list:
    """The calls of a layer on symbolic tensors; none in a subclassed model (`Operation._inbound_nodes`)."""
    return list(getattr(layer, "_inbound_nodes", []))


def has_trained_before(tensor) -> bool:
    """Whether a symbolic tensor depends on trained weights (`KerasTensor._keras_history`)."""
    seen, waiting = set(), [tensor]
    while waiting:
        history = waiting.pop()._keras_history
        if id(history.operation) in seen:
            continue
        seen.add(id(history.operation))
        if getattr(history.operation, "trainable_variables", None):
            return True
        waiting += layer_inputs(history.operation)
    return False


def own_variables(layer) -> list:
    """The variables that belong to this layer itself, without those of its sublayers.

    Weights, seed generator states and metric variables, in the order Keras created them.
    """
    variables = list(layer._trainable_variables) + list(layer._non_trainable_variables)
    variables += [generator.state for generator in layer._seed_generators]
    for metric in layer._metrics:
        variables += metric.variables
    return variables


def model_parallel_layout_map(distribution):
    """The layout map of a `keras.distribution.ModelParallel` (`_layout_map`); anything else as it is."""
    is_distribution = isinstance(distribution, keras.distribution.ModelParallel)
    return distribution._layout_map if is_distribution else distribution


def compiled_metrics(model) -> list:
    """Metrics of a compiled model, those given as objects included (`_loss_tracker`, `_compile_metrics`)."""
    metrics = [model._loss_tracker] if getattr(model, "_loss_tracker", None) is not None else []
    compile_metrics = getattr(model, "_compile_metrics", None)
    if compile_metrics is not None:
        given = [compile_metrics._user_metrics, compile_metrics._user_weighted_metrics]
        metrics += [m for m in keras.tree.flatten(given) if isinstance(m, keras.Metric)]
    return metrics


def optimizer_chain(optimizer) -> list:
    """The optimizer and those it wraps (`LossScaleOptimizer.inner_optimizer`)."""
    chain = []
    while optimizer is not None:
        chain.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return chain


def optimizer_own_variables(optimizer) -> list:
    """The variables an optimizer created itself (`BaseOptimizer._variables`)."""
    return list(optimizer._variables)


def slot_owner(slot_name: str, names) -> str | None:
    """Which of `names` (variables' paths with "_" for "/") a slot belongs to, by its name, or None.

    Keras names a slot after its variable's path: "dense/kernel" has "dense_kernel_momentum".
    """
    prefixes = (slot_name[:i] for i, letter in enumerate(slot_name) if letter == "_")
    return max((prefix for prefix in prefixes if prefix in names), key=len, default=None)


def uses_weight_decay(optimizer, fn, variable):
    """Whether the update `fn` decays `variable`; None when `fn` is not Keras's weight decay (`_apply_weight_decay`)."""
    return optimizer._use_weight_decay(variable) if getattr(fn, "__name__", "") == "weight_decay_fn" else None


def optimizer_references(optimizer) -> list:
    """The trainable variables that an optimizer was built with (`BaseOptimizer._trainable_variables`)."""
    return list(getattr(optimizer, "_trainable_variables", []))


def register_same_name(cls, original) -> None:
    """Makes Keras serialize `cls` under the name that `original` is registered with."""
    registered = _object_registration.GLOBAL_CUSTOM_NAMES.get(original)
    if registered is not None:
        _object_registration.GLOBAL_CUSTOM_NAMES[cls] = registered


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """An event of a profiler trace; times in seconds."""

    name: str
    lane: int
    begin: float
    end: float
    stats: dict


def read_trace(file) -> list:
    """The events of a profiler's `.xplane.pb`, in time (`tensorflow.tsl.profiler.protobuf.xplane_pb2`)."""
    space = _xplane_pb2.XSpace.FromString(file.read_bytes())
    events = []
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        stat_names = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                stats = {}
                for stat in event.stats:
                    kind = stat.WhichOneof("value")
                    value = stat_names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind)
                    stats[stat_names[stat.metadata_id]] = value
                begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                end = begin + 1e-12 * event.duration_ps
                events.append(
                    TraceEvent(name=names[event.metadata_id], lane=line.id, begin=begin, end=end, stats=stats)
                )
    return sorted(events, key=lambda event: event.begin)


def is_eager() -> bool:
    """Whether operations run now rather than being traced."""
    return tf.executing_eagerly()


def live_models(strategy) -> list:
    """The Keras models that were built under `strategy`.

    Keras tells a strategy nothing of its models, so they are found among the objects that refer to it.
    """
    found = []
    for referrer in gc.get_referrers(strategy):
        if isinstance(referrer, keras.Model):
            found.append(referrer)
        elif isinstance(referrer, dict) and referrer.get("_distribute_strategy") is strategy:
            found += [owner for owner in gc.get_referrers(referrer) if isinstance(owner, keras.Model)]
    return found
