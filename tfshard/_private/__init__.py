"""The private names of TensorFlow and Keras that tfshard uses.

No other subpackage touches a private name, so you review an upgrade of TensorFlow or Keras here. `names` lists the
versions that have each name, each function says which names it uses, and `versions` lists the versions that were tested
together. If some versions lack a name, the function that uses the name also has the alternative.

Callers take names from here (`_private.flatten_layers`). The modules group them by subject:

    versions, names                  the names and versions that tfshard relies on
    bundles                          TensorFlow: protocol buffers in files of checkpoints
    context, graphs, op_rewriting    TensorFlow: process state, traced graphs, op rewrites
    functions, messages              TensorFlow: function names, custom gradients, error messages
    native_log                       TensorFlow: the log of its C++ code
    iterators, trace                 tf.data iterators; profiler files
    variables, models, optimizers    Keras: variables, layers and metrics, slots
    patches, threads                 both: functions replaced in the process, or in one thread only
    losses                           Keras: the divisors of losses
    epochs, weight_files             Keras: the epochs of a fit; weight files
    distributions                    Keras: the backend of `keras.distribution`
    saving                           both: which process writes checkpoints and models
    hub                              KerasHub: the export to transformers, and experts
    weak                             neither: weak collections that compare users' objects by identity
"""

from tfshard._private.versions import VersionWarning, check_versions, package_version

# Check before TensorFlow and Keras are imported, so that a wrong version fails with tfshard's message.
check_versions()

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfshard needs Keras's TensorFlow backend. Set the environment variable KERAS_BACKEND=tensorflow "
        f"before Keras is imported. Received: keras.backend.backend()={keras.backend.backend()!r}"
    )

# Re-exported unchanged.
from keras.src import backend as keras_backend
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.distribution.distribution_lib import Distribution
from keras.src.export.export_utils import get_input_signature as input_signature
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from tensorflow.python.types.core import Tensor as TensorType

from tfshard._private.bundles import DecodeError, bundle_entry
from tfshard._private.context import (
    before_first_use,
    checks_all_numbers,
    context_is_initialized,
    default_mesh,
    devices_are_listed,
    dtensor_has_device,
    dtensor_is_initialized,
    gradients_without_optionals,
    has_onednn,
    is_eager,
    make_dtensor_synchronous,
    next_number,
    wait_for_devices,
    without_log,
)
from tfshard._private.devices import give_separate_device, set_device_in
from tfshard._private.distributions import (
    around_new_variables,
    before_first_use_of_models,
    explicit_layout,
    remove_distribution_backend,
    set_distribution_backend,
    set_explicit_layout,
    without_distribution,
)
from tfshard._private.epochs import EpochIterator, is_of_arrays, set_initial_epoch
from tfshard._private.functional import (
    flat_inputs,
    functional_of,
    packed_outputs,
    run_through,
    standardized_inputs,
    without_input_spec,
)
from tfshard._private.functions import (
    around_function_calls,
    check_inputs,
    converted_by_autograph,
    ctc_with_unique_names,
    function_count,
    function_locks_released,
    give_unique_names,
    give_unique_names_after,
    keep_gradients_with_graphs,
    note_function_locks,
    run_functions_with_steps_in,
    shapes_in_int32,
)
from tfshard._private.graphs import (
    TRACKING_ATTRIBUTE,
    branch_results,
    called_function,
    calls_functions,
    captured,
    captured_placeholders,
    captured_resources,
    captures_brought,
    constants_brought,
    copied,
    could_record,
    describe_resource,
    element_shape,
    func_graph,
    function_graph,
    function_of_flow,
    graph_is_branch,
    graph_is_loop,
    has_mark,
    is_called_by,
    is_recorded,
    is_stateful,
    keeps_lengths,
    known_branches,
    lists_with_known_elements,
    marked,
    operation_types,
    outer_graph,
    record_outside_access,
    record_variable_access,
    resource_name,
    resource_without_value,
    run_bodies_apart,
    run_when_used,
    set_captures,
    stop_recording,
    traced_arguments,
    unknown_zero,
    update_input,
    with_gradient,
    with_gradient_to,
)
from tfshard._private.hub import hub_weights_maps, is_expert_bank, replaced_weights_map
from tfshard._private.instance_keys import instance_keys
from tfshard._private.iterators import iterator_state, restore_iterator, stateful_operations
from tfshard._private.losses import (
    Reduced,
    additional_losses,
    compute_loss,
    keras_logits,
    mask_of,
    own_losses,
    reduced_losses,
    set_mask,
    track_loss,
)
from tfshard._private.messages import quickly_parsed
from tfshard._private.models import (
    add_to_class_compiles,
    add_to_compile,
    auto_name,
    can_shard_convolution,
    clone_being_made,
    compile_arguments,
    compiled_metrics,
    distribute_strategy,
    flatten_layers,
    is_convolution,
    layer_uses,
    layer_variables,
    listed_metrics,
    lookup_table,
    loss_count,
    make_step_function,
    metric_function,
    model_parallel_layout_map,
    models_under,
    output_losses,
    record_models,
    register_same_name,
    remat_mode,
    replaced_lookup_table,
    set_compile_argument,
    set_distribute_strategy,
    set_metric_function,
    structure,
    symbolic_build,
    symbolic_calls_undone,
    traced_models,
    unpickle_model,
    when_model_is_made,
)
from tfshard._private.native_log import quiet_native_log, without_native_errors
from tfshard._private.op_rewriting import (
    ALL_RANDOM_OPS,
    Call,
    is_small_constant,
    recorded_outputs,
    rewritten_operations,
    same_operation,
)
from tfshard._private.optimizers import (
    applied_by,
    decays,
    given_name,
    known_global_norm,
    only_for,
    optimizer_chain,
    optimizer_references,
    slot_owner,
    uses_weight_decay,
    variables_of_optimizer,
)
from tfshard._private.saving import write_checkpoints_in, write_models_in
from tfshard._private.threads import before_executors_end, in_this_thread
from tfshard._private.trace import TraceEvent, read_trace
from tfshard._private.variables import (
    abstract_scope,
    backend_variable,
    global_seed_generator,
    initializer_of,
    is_in_optimizer,
    is_resource_variable,
    is_seed_state,
    placeholder_variable,
    plain_variable,
    random_seed_is_set,
    scope_callers,
    set_backend_variable,
    variable_dtype,
)
from tfshard._private.weak import WeakIdentityDict, WeakIdentitySet
from tfshard._private.weight_files import (
    WEIGHTS_MEMBER,
    WeightSpec,
    find_weights,
    open_weights_file,
    read_as_written,
    read_sharded_weights,
    read_weights,
    read_weights_file,
    visit_weights,
    weight_dtype,
    write_keras_file,
    write_sharded_weights,
    write_weights_file,
)
from tfshard._private.xla import annotated_call, call_stablehlo, run_always, stablehlo, traced_apart

# Keras 3.16 (nightly) moves operations and recurrent loops to modules of the backend.
keras_backend_nn = keras_backend.nn if hasattr(keras_backend, "nn") else keras_backend.ops.nn
keras_backend_rnn = (
    keras_backend if hasattr(keras_backend, "lstm") and hasattr(keras_backend, "gru") else keras_backend.rnn
)

__all__ = [
    "ALL_RANDOM_OPS",
    "TRACKING_ATTRIBUTE",
    "WEIGHTS_MEMBER",
    "Call",
    "DecodeError",
    "Distribution",
    "EpochIterator",
    "Functional",
    "Reduced",
    "TensorType",
    "TraceEvent",
    "VersionWarning",
    "WeakIdentityDict",
    "WeakIdentitySet",
    "WeightSpec",
    "add_to_compile",
    "add_to_class_compiles",
    "abstract_scope",
    "additional_losses",
    "applied_by",
    "around_function_calls",
    "converted_by_autograph",
    "auto_name",
    "backend_variable",
    "before_executors_end",
    "before_first_use",
    "bundle_entry",
    "annotated_call",
    "call_stablehlo",
    "called_function",
    "calls_functions",
    "branch_results",
    "can_shard_convolution",
    "captured",
    "captured_placeholders",
    "captured_resources",
    "captures_brought",
    "check_inputs",
    "checks_all_numbers",
    "clone_being_made",
    "compile_arguments",
    "compiled_metrics",
    "listed_metrics",
    "compute_loss",
    "constants_brought",
    "context_is_initialized",
    "copied",
    "ctc_with_unique_names",
    "current_path",
    "decays",
    "default_mesh",
    "describe_resource",
    "distribute_strategy",
    "dtensor_has_device",
    "dtensor_is_initialized",
    "element_shape",
    "rewritten_operations",
    "find_weights",
    "flat_inputs",
    "flatten_layers",
    "func_graph",
    "function_graph",
    "function_count",
    "function_locks_released",
    "function_of_flow",
    "functional_init_arguments",
    "functional_of",
    "without_input_spec",
    "give_separate_device",
    "give_unique_names",
    "give_unique_names_after",
    "given_name",
    "global_seed_generator",
    "gradients_without_optionals",
    "has_mark",
    "has_onednn",
    "graph_is_branch",
    "graph_is_loop",
    "in_stateless_scope",
    "in_this_thread",
    "in_symbolic_scope",
    "hub_weights_maps",
    "initializer_of",
    "input_signature",
    "instance_keys",
    "is_called_by",
    "is_convolution",
    "is_eager",
    "is_in_optimizer",
    "is_expert_bank",
    "is_of_arrays",
    "is_resource_variable",
    "is_seed_state",
    "is_small_constant",
    "is_stateful",
    "keep_gradients_with_graphs",
    "iterator_state",
    "keras_backend",
    "keras_backend_nn",
    "keras_backend_rnn",
    "keeps_lengths",
    "lists_with_known_elements",
    "known_branches",
    "known_global_norm",
    "layer_uses",
    "lookup_table",
    "loss_count",
    "make_dtensor_synchronous",
    "make_step_function",
    "marked",
    "keras_logits",
    "mask_of",
    "metric_function",
    "models_under",
    "record_models",
    "model_parallel_layout_map",
    "next_number",
    "note_function_locks",
    "only_for",
    "open_weights_file",
    "operation_types",
    "optimizer_chain",
    "variables_of_optimizer",
    "optimizer_references",
    "outer_graph",
    "own_losses",
    "output_losses",
    "layer_variables",
    "package_version",
    "packed_outputs",
    "placeholder_variable",
    "plain_variable",
    "quickly_parsed",
    "quiet_native_log",
    "random_seed_is_set",
    "read_as_written",
    "read_trace",
    "read_sharded_weights",
    "read_weights",
    "read_weights_file",
    "record_outside_access",
    "record_variable_access",
    "recorded_outputs",
    "reduced_losses",
    "register_same_name",
    "remat_mode",
    "replaced_lookup_table",
    "replaced_weights_map",
    "resource_name",
    "resource_without_value",
    "restore_iterator",
    "run_through",
    "run_bodies_apart",
    "run_functions_with_steps_in",
    "run_always",
    "run_when_used",
    "same_operation",
    "scope_callers",
    "set_backend_variable",
    "set_captures",
    "set_device_in",
    "set_distribute_strategy",
    "set_initial_epoch",
    "set_compile_argument",
    "set_mask",
    "set_metric_function",
    "shapes_in_int32",
    "slot_owner",
    "standardized_inputs",
    "stateful_operations",
    "stablehlo",
    "is_recorded",
    "stop_recording",
    "with_gradient",
    "could_record",
    "structure",
    "symbolic_build",
    "symbolic_calls_undone",
    "traced_arguments",
    "traced_models",
    "track_loss",
    "unknown_zero",
    "unpickle_model",
    "update_input",
    "uses_weight_decay",
    "variable_dtype",
    "visit_weights",
    "wait_for_devices",
    "weight_dtype",
    "with_gradient_to",
    "without_log",
    "without_native_errors",
    "traced_apart",
    "devices_are_listed",
    "write_checkpoints_in",
    "write_keras_file",
    "write_sharded_weights",
    "write_models_in",
    "write_weights_file",
    "around_new_variables",
    "before_first_use_of_models",
    "explicit_layout",
    "remove_distribution_backend",
    "set_distribution_backend",
    "set_explicit_layout",
    "when_model_is_made",
    "without_distribution",
]
