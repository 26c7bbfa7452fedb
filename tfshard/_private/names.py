"""Every private name of TensorFlow and Keras that tfshard uses, with the versions that have the name.

Read this at an upgrade: `missing()` lists the names that have moved. If only some versions have a name, its entry says
what tfshard uses in the others, and the function that uses the name does so.
"""

import dataclasses
import importlib
import inspect
import re
from typing import Any

from tfshard._private import versions


@dataclasses.dataclass(frozen=True)
class Name:
    """A private name.

    Attributes:
        path: The module, then the class or function, then the attribute, or the local variable of a function.
        since: The first series that has the name, among the series that tfshard supports.
        until: The first series that no longer has the name. None if the newest series has it.
        instead: The replacement in series that lack the name. None if all have it.
        also: The path in versions that have the name elsewhere. tfshard reaches the name through its object, or by both
            paths.
    """

    path: str
    since: str
    until: str | None = None
    instead: str | None = None
    also: str | None = None

    @property
    def library(self) -> str:
        """`"tensorflow"` or `"keras"`."""
        return self.path.partition(".")[0]

    def stands_in(self, version: str) -> bool:
        """Return whether a version of the library should have the name."""
        ended = self.until is not None and not versions.is_before(version, self.until)
        return not versions.is_before(version, self.since) and not ended

    def is_found(self) -> bool:
        """Return whether the name exists, as far as this is visible without an instance of its class."""
        return any(_is_found(path) for path in (self.path, self.also) if path is not None)


def _is_found(path: str) -> bool:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return _has(owner, parts[count:])
    return False


def _has(owner: Any, parts: list[str]) -> bool:
    if not parts:
        return True
    if hasattr(owner, parts[0]):
        return _has(getattr(owner, parts[0]), parts[1:])
    if inspect.isfunction(owner):
        code = inspect.unwrap(owner).__code__
        return parts[0] in code.co_varnames + code.co_cellvars
    if not inspect.isclass(owner) or len(parts) > 1:
        return False
    # An attribute of the class's instances: look for a method that sets it.
    sets = re.compile(rf"\bself\.{parts[0]}\b[^=\n]*=[^=]")
    return any(sets.search(inspect.getsource(cls)) for cls in owner.__mro__ if cls is not object)


def _all(library: str, since: str, modules: dict[str, str]) -> tuple[Name, ...]:
    """Return the names that exist since one version.

    Args:
        library: The library.
        since: The version.
        modules: The used names of each module. `"MODULE | MODULE"` says where other versions have the names.
    """
    found = []
    for places, names in modules.items():
        place, _, other = places.partition(" | ")
        for name in names.split():
            found.append(Name(f"{library}.{place}.{name}", since, also=f"{library}.{other}.{name}" if other else None))
    return tuple(found)


# What Keras's nightly versions of 3.16 have moved or renamed (docs/upgrading.md).
_CORE = "src.backend.tensorflow.core | src.backend.tensorflow.ops.core"
_TF_TRAINER = "src.backend.tensorflow.trainer.TensorFlowTrainer | src.backend.tensorflow.trainer.Trainer"
_TRAINER = "src.trainers.trainer.Trainer | src.trainers.trainer.BaseTrainer"


# Grouped by the module of this package that uses the names.
NAMES = (
    # _private itself
    *_all("keras", "3.10", {
        "src": "backend",
        "src.backend | src.backend.ops": "nn",
        "src.backend | src.backend.rnn": "gru lstm",
        "src.backend.common.name_scope": "current_path",
        "src.backend.common.stateless_scope": "in_stateless_scope",
        "src.backend.common.symbolic_scope": "in_symbolic_scope",
        "src.distribution.distribution_lib": "Distribution",
        "src.export.export_utils": "get_input_signature",
        "src.models.functional": "Functional",
        "src.models.model": "functional_init_arguments",
    }),
    *_all("tensorflow", "2.19", {"python.types.core": "Tensor"}),
    # context
    *_all("tensorflow", "2.19", {
        "dtensor.python.accelerator_util": "is_initialized",
        "dtensor.python.api": "_dtensor_device _dtensor_singleton reset_dtensor_device",
        "dtensor.python.dtensor_device": (
            "DTensorDevice DTensorDevice._default_layout DTensorDevice._experimental_default_mesh"
        ),
        "python.eager.context": (
            "async_wait context Context._initialized Context._physical_devices Context.ensure_initialized "
            "Context.get_function_def Context.list_function_names temporarily_disable_optionals_in_gradients"
        ),
        "python.debug.lib.check_numerics_callback": "_state",
        "python.framework.ops": "uid",
        "python.util._pywrap_util_port": "IsMklEnabled",
    }),
    # functional
    *_all("keras", "3.10", {
        "src.models.functional": "Functional Functional._manual_input_spec Functional._standardize_inputs",
        "src.models.sequential": "Sequential Sequential._functional",
        "src.ops.function": "Function._inputs_struct Function._outputs_struct Function._run_through_graph",
    }),
    # functions
    *_all("tensorflow", "2.19", {
        "python.eager.context": "Context.add_function_def Context.call_function Context.get_function_def "
        "Context.has_function Context.list_function_names Context.remove_function context",
        "python.eager.polymorphic_function.atomic_function": "from_func_graph",
        "python.eager.polymorphic_function.polymorphic_function": "Function",
        "python.eager.polymorphic_function.tracing_compilation": "TracingOptions.lock trace_function",
        "python.framework.func_graph": "FuncGraph FuncGraph.outer_graph",
        "python.framework.function": "Defun",
        "python.framework.ops": "gradient_registry uid",
        "python.framework.registry": "Registry._registry",
        "python.ops.ctc_ops": "function",
    }),
    # devices
    *_all("tensorflow", "2.19", {
        "python.framework.ops": "_EagerTensorBase._numpy",
    }),
    # saving
    *_all("tensorflow", "2.19", {
        "python.checkpoint.checkpoint": (
            "Checkpoint._saver Checkpoint._write TrackableSaver TrackableSaver._graph_view TrackableSaver.save"
        ),
        "python.checkpoint.checkpoint_management": "_delete_file_if_exists update_checkpoint_state_internal",
    }),
    *_all("keras", "3.10", {
        "src.legacy.saving.legacy_h5_format": "save_model_to_hdf5",
        "src.saving.saving_lib": "save_model",
    }),
    # bundles
    *_all("tensorflow", "2.19", {
        "core.protobuf.tensor_bundle_pb2": "BundleEntryProto",
    }),
    # messages
    *_all("tensorflow", "2.19", {
        "python.framework.error_interpolation": "_ParseTag parse_message",
    }),
    # graphs
    *_all("tensorflow", "2.19", {
        "dtensor.python.api": "is_dtensor",
        "python.eager.polymorphic_function.concrete_function": "ConcreteFunction.set_external_captures",
        "python.eager.polymorphic_function.polymorphic_function": "Function.__call__.args Function.__call__.kwds",
        "python.eager.record": "could_possibly_record record_operation should_record_backprop stop_recording",
        "python.eager.tape": "variable_accessed",
        "python.framework.auto_control_deps": "ASYNC_STATEFUL_OPS",
        "python.framework.func_graph": "FuncGraph.capture FuncGraph.captures FuncGraph.inputs FuncGraph.outer_graph",
        "python.framework.ops": (
            "_EagerTensorBase._capture_as_const Graph._add_function_recursive Graph._attr_scope "
            "Graph._create_op_internal Graph._get_function Operation._clear_attr Operation._set_attr "
            "Operation._update_input"
        ),
        "python.ops.cond_v2": "cond_v2 indexed_case",
        "python.ops.while_v2": "_build_while_op",
        "python.ops.control_flow_util_v2": "maybe_set_lowering_attr",
        "python.ops.control_flow_v2_func_graphs": "ControlFlowFuncGraph WhileBodyFuncGraph WhileCondFuncGraph",
        "python.ops.handle_data_util": "create_handle_data get_resource_handle_data set_handle_data",
        "python.ops.resource_variable_ops": (
            "BaseResourceVariable._handle _variable_handle_from_shape_and_dtype variable_accessed"
        ),
    }),
    # op_rewriting
    *_all("tensorflow", "2.19", {
        "dtensor.python.api": "fetch_layout is_dtensor",
        "python.eager.core": "_FallbackException _NotOkStatusException",
        "python.eager.execute": "execute",
        "python.framework.op_callbacks": "add_op_callback remove_op_callback",
        "python.framework.op_def_registry": "get",
        "python.pywrap_tfe": "TFE_Py_FastPathExecute",
    }),
    # iterators
    *_all("tensorflow", "2.19", {
        "python.data.ops.dataset_ops": "DatasetV2._functions DatasetV2._inputs",
        "python.data.ops.iterator_ops": "OwnedIterator._dataset OwnedIterator._iterator_resource",
    }),
    # trace
    *_all("tensorflow", "2.19", {"tsl.profiler.protobuf.xplane_pb2": "XSpace"}),
    # variables
    *_all("tensorflow", "2.19", {
        "python.ops.resource_variable_ops": "BaseResourceVariable BaseResourceVariable._unique_id",
    }),
    *_all("keras", "3.10", {
        "src.backend.common.global_state": "get_global_attribute set_global_attribute",
        "src.backend.common.name_scope": "name_scope.caller",
        "src.backend.common.variables": "Variable._dtype Variable._initializer Variable._path "
        "Variable._value",
        _CORE: "Variable._initialize_with_initializer",
        "src.random.seed_generator": "SeedGenerator.state global_seed_generator",
        "src.utils.rng_utils": "get_random_seed",
    }),
    Name(
        "keras.src.random.seed_generator.GLOBAL_SEED_GENERATOR",
        since="3.13",
        instead="its value, 'global_seed_generator', which Keras wrote out before",
    ),
    # models
    *_all("keras", "3.10", {
        _TF_TRAINER: "_distribute_strategy _make_function _maybe_symbolic_build",
        "src.distribution.distribution_lib": "ModelParallel._layout_map",
        "src.layers.convolutional.base_conv": "BaseConv",
        "src.layers.convolutional.base_conv_transpose": "BaseConvTranspose",
        "src.layers.convolutional.base_depthwise_conv": "BaseDepthwiseConv",
        "src.layers.convolutional.base_separable_conv": "BaseSeparableConv",
        # Operation._remat_mode since 3.15, of which Layer is one.
        "src.layers.layer": "Layer._layers Layer._metrics Layer._non_trainable_variables Layer._remat_mode "
        "Layer._seed_generators Layer._trainable_variables",
        "src.layers.preprocessing.index_lookup": "IndexLookup._default_value",
        "src.metrics.reduction_metrics": "MeanMetricWrapper._fn",
        "src.models.cloning": "_clone_functional_model.new_model _clone_sequential_model.cloned_model",
        "src.ops.operation": "Operation._inbound_nodes Operation._outbound_nodes",
        "src.saving.keras_saveable": "KerasSaveable._unpickle_model",
        "src.saving.object_registration": "GLOBAL_CUSTOM_NAMES",
        "src.trainers.compile_utils": "CompileMetrics._user_metrics CompileMetrics._user_weighted_metrics",
        _TRAINER: "_compile_config _compile_loss _compile_metrics _loss_tracker",
        "src.utils.naming": "to_snake_case",
    }),
    # distributions
    *_all("keras", "3.10", {
        "src.backend.common.global_state": "get_global_attribute set_global_attribute",
        "src.backend.common.variables": "Variable._shape Variable._validate_shape",
        "src.backend.tensorflow": "distribution_lib",
        _CORE: "Variable._initialize",
        "src.distribution": "distribution_lib",
        "src.distribution.distribution_lib": "GLOBAL_ATTRIBUTE_NAME",
    }),
    Name(
        "keras.src.backend.common.variables.Variable._layout",
        since="3.15",
        instead="the same attribute, which only tfshard sets; Keras's optimizers ask for it by getattr",
    ),
    # losses
    *_all("keras", "3.10", {
        "src.backend.common.masking": "get_keras_mask set_keras_mask",
        "src.layers.layer": "Layer._losses Layer._losses_override",
        "src.losses.loss": "apply_mask reduce_weighted_values unscale_loss_for_distribution",
        _TRAINER: "_compute_loss _loss_tracker",
    }),
    # optimizers
    *_all("keras", "3.10", {
        "src.backend.tensorflow.optimizer": "TFOptimizer._distribution_strategy",
        "src.optimizers.base_optimizer": "BaseOptimizer BaseOptimizer._accumulated_gradients "
        "BaseOptimizer._model_variables_moving_average BaseOptimizer._trainable_variables "
        "BaseOptimizer._use_weight_decay BaseOptimizer._variables global_norm",
        "src.optimizers.loss_scale_optimizer": "LossScaleOptimizer.inner_optimizer",
    }),
    Name(
        "keras.src.optimizers.multi_optimizer.MultiOptimizer.optimizers",
        since="3.15",
        instead="nothing: no optimizer contains several optimizers",
    ),
    # epochs
    *_all("keras", "3.10", {
        "src.backend.tensorflow.trainer": "TFEpochIterator._distribute_strategy TFEpochIterator._distributed_dataset",
        "src.trainers.data_adapters": "ArrayDataAdapter PyDatasetAdapter TFDatasetAdapter",
        "src.trainers.data_adapters.array_data_adapter": "ArrayDataAdapter._shuffle ArrayDataAdapter.get_tf_dataset",
        "src.trainers.data_adapters.py_dataset_adapter": "PyDatasetAdapter._standardize_batch "
        "PyDatasetAdapter.py_dataset PyDatasetAdapter.shuffle",
        "src.trainers.epoch_iterator": "EpochIterator._enumerate_iterator EpochIterator._num_batches "
        "EpochIterator._steps_seen EpochIterator.data_adapter",
        _TRAINER: "_initial_epoch",
    }),
    # weight_files
    *_all("keras", "3.10", {
        "src.saving.saving_lib": "DiskIOStore H5IOStore ShardedH5IOStore _ASSETS_DIRNAME _CONFIG_FILENAME "
        "_METADATA_FILENAME _VARS_FNAME_H5 _load_state _raise_loading_failure _save_state _serialize_model_as_json",
    }),
)  # fmt: skip


def missing() -> list[str]:
    """Return the names that the installed versions have against the table, or lack against it."""
    found = {library: versions.package_version(library) for library in ("keras", "tensorflow")}
    return [name.path for name in NAMES if name.stands_in(found[name.library]) != name.is_found()]
