"""ShardedStrategy: a tf.distribute strategy over a DTensor mesh."""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import (
    batching,
    clients,
    gathers,
    host_meshes,
    mesh_tensors,
    process_lock,
    reductions,
    replicas,
    startup,
    transfer,
)
from tfshard.devices.mesh import create_mesh, rank_meshes
from tfshard.errors import MeshError, StrategyError, warn
from tfshard.graph import auto_layout, model_specs
from tfshard.layouts import gradient_reduction, planner, variable_kind
from tfshard.layouts.axes import BATCH_AXIS, axis_sizes, plain
from tfshard.layouts.config import (
    AttentionChoice,
    ChunkedCrossEntropy,
    ContextAttention,
    Microbatches,
    Offload,
    Precision,
    ReshardPolicy,
    ShardingConfig,
    ZeroStage,
)
from tfshard.layouts.dtype_rules import DtypeByPath
from tfshard.layouts.layout_map import LayoutMap
from tfshard.layouts.parameter_analyzer import DEFAULT, ParameterAnalyzer
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_kind import VariableKind
from tfshard.measure.consistency import check_consistency
from tfshard.measure.report import Report, SyncStats, check_is_measurable
from tfshard.operations import blocks as blocks_of_layers
from tfshard.storage import steps
from tfshard.training import attached_model, births, datasets, decisions, failures, gradient_copies, readiness
from tfshard.training.attached_variables import attach_global_seed
from tfshard.training.hooks import ShardedExtended
from tfshard.training.strategy_base import StrategyBase
from tfshard.training.watching import Watched

if TYPE_CHECKING:
    from tfshard.layouts.planner import LinksLike, ShardingPlan


class ShardedStrategy(StrategyBase, tf.distribute.Strategy):  # type: ignore[misc]  # TensorFlow has no types.
    """Store every variable sharded, and compute as on one device.

    Args:
        mesh: A mesh from `tfshard.create_mesh`. By default the mesh of the layout map, if it has one, else all devices
            on the batch axis.
        layout_map: The dims of variables that model axes shard: a `tfshard.LayoutMap`; a `keras.distribution.LayoutMap`
            or `ModelParallel`, such as KerasHub's backbones return from `get_layout_map(device_mesh)`; a mapping from
            pattern to axes; or `"auto"`, which calls `tfshard.auto_layout_map` for each model. By default none.
        zero_stage: The state that is stored sharded over the batch axis (Rajbhandari et al. 2020, "ZeRO: Memory
            Optimizations Toward Training Trillion Parameter Models"). 0: nothing. 1: optimizer slots. 2: also
            gradients, which are reduce-scattered as soon as they exist. 3: also parameters.
        analyzer: A `tfshard.ParameterAnalyzer`, such as one of `tfshard.presets`. It chooses which small variables
            share a buffer, to be gathered, reduced and updated together. None: no variables share a buffer.
        sequence_parallel: True shards activations of shape (batch, sequence, width) between tensor-parallel blocks
            along the sequence over the model axis: residuals, normalizations, dropout (Korthikanti et al. 2022,
            "Reducing Activation Recomputation in Large Transformer Models"). Lengths that the axis does not divide
            stay replicated.
        already_sharded: In a launched run, whether each client feeds only its part of every batch, as `input_shard`
            says. By default every client gets the same full batch, and takes its rows.
        reshard_after_forward: At stage 3, whether gathered variables are freed after their layer's forward pass, and
            gathered again for the backward pass (Zhao et al. 2023, "PyTorch FSDP", section 3.3.1). As many bytes stay
            gathered as the largest variable or group has. True, False, or regular expressions: the setting holds for
            each variable with a full path that one of them matches.
        prefetch: How many variables or groups ahead of its use a gather starts. For compiled steps; an eager step
            gathers each variable when it reads it.
        reduce_dtype: The dtype in which TPUs reduce bfloat16 gradients: `"float32"`, or `"bfloat16"` for half the
            bytes (not run). CPUs and GPUs always reduce them in float32: NCCL in TensorFlow has no bfloat16. Gradients
            of other dtypes are reduced in their dtype.
        slot_dtype: The dtype in which optimizer slots of float32 variables are stored between steps, rounded after each
            update. By default the slots keep their dtype. `"bfloat16"` takes half the bytes. `"int8"` takes about a
            quarter: blocks of 256 elements of one device share a scale (Dettmers et al. 2022), and slots of variables
            of fewer than 4096 elements stay float32. Sums of gradients and averages of weights keep their dtype. You
            can also give a dtype for each pattern of variables' full paths; the first match decides:
            `{".*embeddings": "float32", ".*": "int8"}`. Measured: benchmarks/LOG.md, "Memory".
        gather_dtype: The dtype in which compiled steps of stage 3 gather parameters, for slow links: `"int8"` or
            `"float8_e4m3fn"`, about a quarter of float32's bytes. Blocks of 256 elements of a local shard share a scale
            (Wang et al. 2023, "ZeRO++"). Forward and backward pass use the rounded values. The stored shards stay
            exact, so rounding errors do not add up. Vectors and variables of fewer than 4096 elements are gathered
            exactly. You can also give a dtype, or `"float32"` for exact gathers, for each pattern of variables' full
            paths; the first match decides. By default all gathers are exact (docs/compression.md).
        microbatches: The number of microbatches of a training step. A step takes them one after the other, holds the
            activations of one, and updates once, with the numbers of the full batch. The number grows if it does not
            divide the rows of a device. Eager steps take the full batch at once.
        reduce_once: True makes each device add up the full gradients of all microbatches. They are then reduced
            once: fewer collectives for more memory. Otherwise the gradients of each microbatch are reduced, and added
            up in the layout of the update, which is sharded at stages 1 to 3. Only for meshes with just a batch axis.
        offload: `"slots"`: store optimizer slots that are sharded over the batch axis in the memory of the GPUs' host,
            and copy them to the GPUs for their update. Sums of gradients and averages of weights stay on the GPUs. On
            CPU devices slots are in host memory anyway, and a warning says that the option does nothing. Tested on
            virtual devices of one GPU (docs/planning.md says what to check on several).
        compression: How devices (or, in a mesh with replicas, the replicas) exchange gradients of at least 64 KiB:
            `"bfloat16"`, in half the bytes; `"int8"`, in about a quarter; or a `tfshard.PowerSGD`, for kernels of Dense
            and EinsumDense. Each device keeps the part of a gradient that a step does not send in float32, and sends it
            with a later gradient (docs/compression.md). Only for meshes without a model axis; eager steps reduce
            exactly.
        tables: The embedding tables that are sharded by rows at every stage. A step reads and updates only the rows it
            looks up, and never gathers a table. A `tfshard.EmbeddingTables`, or patterns of the tables' paths for
            updates as in Keras (docs/tables.md).
        experts: True to shard the experts of mixtures of experts over the batch axis at every stage. Tokens go to the
            devices of their experts (docs/experts.md). Works for `tfshard.layers.MixtureOfExperts` and for KerasHub's
            Mixtral, Qwen MoE, Qwen3 MoE, Qwen3.5 MoE and GPT-OSS models. Regular expressions of the paths of the
            experts' variables choose some of the mixtures.
        attention: How attention of Keras and KerasHub is computed in compiled steps. `"flash"`: in blocks of queries
            and keys with an online softmax, in memory that is linear in the sequence (Dao 2023, "FlashAttention-2").
            `"math"`: with a score for each pair of a query and a key, as in Keras. `"auto"`: in blocks from 1,024
            queries by 1,024 keys. What is not computed in blocks is in docs/attention.md.
        context_attention: How devices of a context axis compute attention (docs/context_parallel.md). `"ulysses"`: they
            exchange heads for positions, and the axis must divide the heads. `"gather"`: they gather keys and values,
            with any number of heads.
        chunked_cross_entropy: The tokens of a chunk in which each device computes the cross entropy of the model's last
            projection and its gradient, from hidden states and kernel. No device then holds all its logits. `"auto"`
            takes chunks only where a device's logits are large (docs/stages.md); `strategy.report` says what it chose.
            By default the logits are whole.

    Raises:
        MeshError: `mesh` is not a DTensor mesh.
        LayoutError: `layout_map` is of another type or names an axis that the mesh does not have.
        StrategyError: An unknown stage, slot dtype, gather dtype, compression or attention; `gather_dtype` below stage
            3, or with a pipeline axis; `offload` on TPUs, or if no slot is sharded; `compression` on a mesh with a
            model axis; a setting that does not work with a context axis.

    The batch is global: `batch_size` in `fit` is the number of samples of one step over all devices, the loss is
    the mean over that batch, and `num_replicas_in_sync` is 1.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    >>> model = tfshard.as_distributed(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]))
    >>> model.compile("sgd", "mse", strategy=strategy)
    >>> history = model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=8, verbose=0)
    >>> model.layers[0].kernel.value.layout.storage
    ('batch', None)
    """

    @process_lock.locked
    def __init__(
        self,
        mesh: dtensor.Mesh | None = None,
        layout_map: Any = None,
        zero_stage: int = 3,
        analyzer: ParameterAnalyzer | None = DEFAULT,
        sequence_parallel: bool = False,
        already_sharded: bool = False,
        reshard_after_forward: bool | str | Sequence[str] = True,
        prefetch: int = 1,
        reduce_dtype: str = "float32",
        slot_dtype: DtypeByPath = None,
        microbatches: int = 1,
        reduce_once: bool = False,
        offload: str | None = None,
        compression: Any = None,
        tables: VariableKind | str | Sequence[str] | None = None,
        attention: str = "auto",
        chunked_cross_entropy: int | str | None = None,
        gather_dtype: DtypeByPath = None,
        experts: bool | str | Sequence[str] = False,
        context_attention: str = "ulysses",
    ):
        readiness.check_process()
        if mesh is not None and not isinstance(mesh, dtensor.Mesh):
            raise MeshError(
                f"mesh must come from tfshard.create_mesh(). Received: mesh={mesh!r} (of type {type(mesh)})"
            )
        mesh = mesh or getattr(layout_map, "mesh", None)
        mesh = mesh or create_mesh(**(LayoutMap.mesh_axes_of(layout_map) or {BATCH_AXIS: -1}))
        # Each pipeline rank has a mesh. Losses and metrics are on the last mesh.
        axes = axis_sizes(rank_meshes(mesh)[-1])
        config = ShardingConfig(
            layout_map=None if auto_layout.is_auto(layout_map) else LayoutMap.from_any(layout_map, axes),
            zero_stage=ZeroStage.from_number(zero_stage),
            analyzer=analyzer,
            reshard=ReshardPolicy.from_options(reshard_after_forward, prefetch),
            precision=Precision.from_options(reduce_dtype, slot_dtype, gather_dtype),
            microbatches=Microbatches(count=microbatches, reduce_once=reduce_once),
            offload=Offload.from_option(offload),
            sequence_parallel=sequence_parallel,
            already_sharded=already_sharded,
            reduction=gradient_reduction.from_option(compression),
            attention=AttentionChoice.from_option(attention),
            kinds=variable_kind.from_options(tables=tables, experts=experts),
            context_attention=ContextAttention.from_option(context_attention),
            chunked_cross_entropy=ChunkedCrossEntropy.from_option(chunked_cross_entropy),
        )
        self._start(mesh, config)

    @classmethod
    def _of_config(cls, mesh: dtensor.Mesh, config: ShardingConfig) -> "ShardedStrategy":
        strategy = cls.__new__(cls)
        strategy._start(mesh, config)
        return strategy

    def _start(self, mesh: dtensor.Mesh, config: ShardingConfig) -> None:
        """Check the settings on a mesh, agree on them with the other clients, and start what a step needs."""
        self.pipeline_axes = axis_sizes(mesh)
        if self.pipeline_axes.pipeline is not None and config.chunked_cross_entropy is not None:
            raise StrategyError(
                "chunked_cross_entropy does not work with a pipeline axis: the last stage computes whole logits. Leave "
                f"one of them out. Received: chunked_cross_entropy={config.chunked_cross_entropy.chunk!r}, "
                f"mesh={self.pipeline_axes}"
            )
        if self.pipeline_axes.pipeline is not None and config.precision.gather_dtypes.rounds:
            raise StrategyError(
                "gather_dtype does not work with a pipeline axis: stages send each other the values of weights that "
                "they share, and the rounding errors of both would add up. Leave one of them out. Received: "
                f"gather_dtype={dict(config.precision.gather_dtypes.rules)}, mesh={self.pipeline_axes}"
            )
        *others, mesh = rank_meshes(mesh)
        axes = axis_sizes(mesh)
        config.check_mesh(axes)
        if not _offloads(mesh, config):
            config = dataclasses.replace(config, offload=Offload())
        self.ranks: tuple[ShardedStrategy, ...] = (*(self._of_config(each, config) for each in others), self)
        if startup.current() is None:
            startup.initialize()
        StrategyBase.__init__(self, mesh, config)
        mesh_settings = {"mesh": self.mesh_shape.given, "roles": plain(self.mesh_shape.roles)}
        clients.here().agree("the strategy", config.as_dict() | mesh_settings, error=StrategyError)
        gathers.choose(mesh)
        reductions.choose(config.precision.reduce_dtype)
        transfer.meet(mesh)
        replicas.meet(mesh)
        if config.reduction is not None:
            config.reduction.meet(mesh)
        process_lock.start()
        # The callbacks that watch the steps of a `fit`.
        self.watched = Watched()
        # The shapes that each function has been run on.
        self._traced: _private.WeakIdentityDict[Callable[..., object], set[str]] = _private.WeakIdentityDict()
        tf.distribute.Strategy.__init__(self, ShardedExtended(self))

    @property
    def microbatches(self) -> int:
        """The microbatches of a training step. You can set the number at any time; later steps use it."""
        return self.config.microbatches.count

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self.config = dataclasses.replace(
            self.config, microbatches=dataclasses.replace(self.config.microbatches, count=count)
        )
        self.functions.clear()

    def __repr__(self) -> str:
        layout_map = repr(auto_layout.AUTO) if self.auto else self.layout_map
        return f"ShardedStrategy(mesh={self.pipeline_axes}, zero_stage={self.zero_stage}, layout_map={layout_map})"

    def scope(self) -> "_Scope":
        """Return a context that creates variables sharded, and Keras models under this strategy."""
        return _Scope(super().scope(), self)

    def placement_of(self, model: keras.Model) -> ModelPlacement:
        """Return the layouts of the variables of a built model, groups included. Changes nothing."""
        return attached_model.attached(model, self).placement()

    def layout_map_for(self, model: keras.Model) -> LayoutMap:
        """Return the layout map of a model. With `layout_map="auto"` it is empty until the model is built."""
        return attached_model.attached(model, self).layout_map()

    def check_accepts(self, model: keras.Model) -> None:
        if self.pipeline_axes.pipeline is None or model in self.stage_models:
            return
        if model in self.pipelined_models:
            raise StrategyError(
                f"A pipeline runs model '{model.name}' in stages. It supports fit, evaluate, predict, their "
                "*_on_batch, checkpoints, files, plan and report. For other uses, build the model on a mesh without "
                "a pipeline axis."
            )
        raise StrategyError(
            f"The mesh has a pipeline axis, but model '{model.name}' is not cut into stages. Call model = "
            "tfshard.pipeline(model, stages=..., microbatches=...) before it is compiled, outside of the strategy's "
            f"scope, or leave the axis out. Received: mesh={self.pipeline_axes}"
        )

    # --- running --------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Run `fn` once on the full (global) batch, with variables and arithmetic sharded over the mesh.

        Args:
            fn: A step function. It uses gradients, optimizers, losses and metrics as on one device.
            args: Positional arguments. Tensors that are not on the mesh are moved there, and batches are sharded.
            kwargs: Keyword arguments, likewise.
            options: Not used.

        Returns:
            The result of `fn`, replicated. Eager code can use it as tensors on the host.
        """
        del options
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"Positional args must be a list or tuple. Received: args={args!r} (of type {type(args)})")
        if self.pipeline_axes.pipeline is not None:
            raise StrategyError(
                "A strategy whose mesh has a pipeline axis runs only steps of models that tfshard.pipeline has cut, "
                "through fit, evaluate and predict. For a custom loop, leave the axis out. Received: "
                f"mesh={self.pipeline_axes}"
            )
        readiness.check_process()
        if not _private.is_eager():
            process_lock.hold_until_function_returns()
        with process_lock.held():
            return self._run_locked(fn, args, kwargs)

    def _run_locked(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        attached_model.refresh_model_of(fn, self)
        if _private.is_eager():
            attach_global_seed(self)
            args, kwargs = batching.batch_to_mesh((args, kwargs or {}), self.mesh, self.config.already_sharded)
            with self.operation(fn, "step", (args, kwargs)), failures.translated_errors(f"Step function {fn!r}"):
                if isinstance(fn, tf.types.experimental.PolymorphicFunction):
                    results = self._inside(fn)(*args, **kwargs)
                else:
                    with self.scope():
                        results = self.extended.call_for_each_replica(fn, args=args, kwargs=kwargs)
            return self.extended.to_user(results)
        # The caller that runs this function may not go through `operation`.
        _private.give_unique_names_after(tf.compat.v1.get_default_graph(), lambda: clients.here().wait_for_devices())
        self._choose_switches()
        readiness.check_traced_arguments(fn)
        with self.scope(), failures.translated_errors(f"Step function {fn!r}"):
            return self.extended.call_for_each_replica(fn, args=args, kwargs=kwargs)

    @contextlib.contextmanager
    def operation(self, function: Callable[..., object], kind: str, batch: Any) -> Iterator[None]:
        """Surround a step in eager code. Tells the launcher about the step, and waits for the step's operations to end.

        Args:
            function: The function that runs.
            kind: The kind of step, such as `"training step"`, for messages.
            batch: The function's batch, on the mesh.
        """
        here = clients.here()
        self._choose_switches()
        traced = self._traced.setdefault(function, set())
        leaves = tf.nest.flatten(batch)
        shapes = str([getattr(leaf, "shape", None) for leaf in leaves])
        first = shapes not in traced
        traced.add(shapes)
        with (
            self.watched.step(kind, batch, shapes, first),
            here.step(kind, leaves, first),
            failures.explained(f"A {kind}"),
            _private.quickly_parsed(),
            # DTensor puts a loop with constant initial values on the first mesh of the process.
            _private.default_mesh(self.mesh),
        ):
            try:
                yield
                here.wait_for_devices()
            finally:
                _private.give_unique_names()
                if first:
                    _private.keep_gradients_with_graphs()

    def _choose_switches(self) -> None:
        """Set the environment switches of this strategy for later compilations by DTensor."""
        gathers.choose(self.mesh)
        reductions.choose(self.config.precision.reduce_dtype)

    def _inside(self, fn: tf.types.experimental.PolymorphicFunction) -> Callable[..., Any]:
        """Return a tf.function that opens the step inside its trace, where the writes of the step are."""
        found = self.functions.get(fn)
        if found is not None:
            return found
        function = fn.python_function  # Not `fn`, the key: the value would keep it alive.

        def step(*args: Any, **kwargs: Any) -> Any:
            with self.scope():
                return self.extended.call_for_each_replica(function, args=args, kwargs=kwargs)

        made: Callable[..., Any] = tf.function(step, jit_compile=False)
        self.functions[fn] = made
        return made

    def reduce(self, reduce_op: str | tf.distribute.ReduceOp, value: Any, axis: int | None) -> Any:
        """Reduce a value that `run` returned. The value is replicated, so with `axis=None` it is returned unchanged.

        Args:
            reduce_op: `"SUM"` or `"MEAN"`, or a `tf.distribute.ReduceOp`.
            value: A result of `run`, which may be nested.
            axis: None, or the dim of the (global) value to reduce over, such as 0 for per-sample values.
        """
        name = reduce_op.upper() if isinstance(reduce_op, str) else reduce_op.value
        if name not in ("SUM", "MEAN"):
            raise ValueError(f"reduce_op must be 'SUM' or 'MEAN'. Received: reduce_op={reduce_op!r}")
        if axis is None:
            return mesh_tensors.wrapped(value) if steps.is_outside() else value
        reduce = tf.reduce_sum if name == "SUM" else tf.reduce_mean
        value = mesh_tensors.on_host(value) if steps.is_outside() else value
        return transfer.map_tensors(lambda v: reduce(v, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Return `value`, which is global already; in eager code as tensors on the host."""
        del axis
        return mesh_tensors.on_host(value) if steps.is_outside() else value

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: tf.distribute.InputOptions | None = None
    ) -> datasets.ShardedDataset:
        """Return an iterable over the batches of `dataset`, sharded over the batch axis.

        A batch that the axis does not divide is replicated. Eager code can use a batch as tensors on the host; a step
        takes it from the mesh.

        Args:
            dataset: A `tf.data.Dataset`, or any iterable over batches.
            options: Say how many batches of a `tf.data.Dataset` are copied to the devices ahead of the step:
                `experimental_per_replica_buffer_size`, or none if `experimental_fetch_to_device` is False. By default
                one on GPUs and none on other devices.
        """
        dataset = datasets.without_tuning(dataset)
        # Pipeline stages split the batch into microbatches, and move them to their meshes.
        mesh = None if len(self.ranks) > 1 else self.mesh
        prefetch = datasets.prefetch_of(options, self.mesh)
        return datasets.ShardedDataset(dataset, mesh, self.config.already_sharded, prefetch)

    @property
    def input_shard(self) -> batching.InputShard:
        """The part of each batch that this client feeds with `already_sharded=True`."""
        return batching.InputShard.of(self.mesh)

    # --- models ---------------------------------------------------------------------------------------

    def _check_not_pipelined(self, model: keras.Model, instead: str) -> None:
        if model in self.pipelined_models:
            raise StrategyError(
                f"Model '{model.name}' is on several meshes, one for each rank of the pipeline: use "
                f"tfshard.pipelining.{instead}(model)."
            )

    @process_lock.locked
    def report(self, model: keras.Model) -> Report:
        """Return the bytes that each device stores: the totals, and every variable with its layout and bytes.

        Raises:
            StrategyError: The model is not built, has no variable on the mesh, belongs to another strategy, or is
                pipelined.
        """
        self._check_not_pipelined(model, "reports")
        attached_model.check_not_elsewhere(model, self)
        check_is_measurable(model, "report")
        return Report.from_model(model, self)

    @process_lock.locked
    def recompute(
        self, model: keras.Model, blocks: str | Sequence[str] = "auto", *, keep_products: bool = False
    ) -> list[str]:
        """Recompute the activations of blocks in the backward pass, so that the forward pass can free them.

        A step then holds the inputs of all blocks and the activations of one block. The losses are bit-identical, and
        each write of a block (batch statistics, states) happens once. Layers that were created under a
        `keras.RematScope` are recomputed without this call. For compiled steps; an eager step keeps all activations. A
        clone of the model has no blocks.

        A stage of a pipelined model recomputes its forward pass in any case. With blocks, it then holds only the
        activations of one block.

        Args:
            model: A built model.
            blocks: `"auto"` finds repeated layers that contain layers, such as transformer layers, or, in a flat model,
                layers that share a name prefix, such as `conv2_block1_1_conv`. Otherwise regular expressions. A layer
                is recomputed if one of them matches its full path; layers with equal matches of the expression's groups
                form one block.
            keep_products: True to keep the outputs of matrix products and convolutions, which are expensive to
                recompute.

        Returns:
            The names of the blocks.

        Raises:
            StrategyError: The model is not built; no block was found; or a pattern matches no layer, or is invalid.

        Example:

        >>> import keras, tfshard
        >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
        >>> layers = [keras.layers.Dense(8, activation="gelu", name=f"block{i}_dense") for i in range(3)]
        >>> model = tfshard.Sequential([keras.Input((8,)), *layers])
        >>> strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
        >>> model.compile("sgd", "mse", strategy=strategy)
        >>> strategy.recompute(model)
        ['block0', 'block1', 'block2']
        """
        found = blocks_of_layers.install(model, blocks, keep_products)
        self.functions.clear()
        model.train_function = None
        decisions.tell_recomputed(model, found)
        return found

    @process_lock.locked
    def plan(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | str | None = None,
        inputs: Any = None,
        *,
        links: "LinksLike | None" = None,
        compute_seconds: float | None = None,
    ) -> "ShardingPlan":
        """Predict the stored bytes and the communication of each step for a built model. Runs and changes nothing.

        Args:
            model: A built `keras.Model`, sharded or not.
            optimizer: An optimizer or its name, for the slots. By default the optimizer of `model.compile`.
            inputs: The inputs of the model in a step, for the bytes of activations over a model axis.
            links: As for `tfshard.plan`.
            compute_seconds: As for `tfshard.plan`.
        """
        self._check_not_pipelined(model, "plan")
        placement = self.placement_of(model)
        specs = model_specs.specs_of(model)
        if placement.specs != specs or not placement.has_complete_groups():
            # Variables were frozen since, or share groups with variables of other models: plan as if compiled now.
            placement = self.place(specs, placement.layout_map)
        planned = planner.plan_placement(
            placement,
            model,
            optimizer=optimizer,
            inputs=inputs,
            links=links,
            compute_seconds=compute_seconds,
        )
        if not self.config.sequence_parallel:
            return planned
        note = "with sequence_parallel=True an all-reduce of activations is a reduce-scatter and an all-gather"
        return dataclasses.replace(planned, unknown="; ".join(text for text in (planned.unknown, note) if text))

    def sync_stats(self, model: keras.Model) -> SyncStats:
        """Return the number and bytes of gradients, and which gradients are reduced together.

        Raises:
            StrategyError: The model is not built, or has no variable on the mesh.
        """
        check_is_measurable(model, "sync_stats")
        return SyncStats.from_model(model)

    @process_lock.locked
    def check_consistency(self, model: keras.Model, batch: Any = None) -> None:
        """Check that devices with the same local shard of a variable hold the same bits.

        With a batch, also compute the gradients of one training step, and check that devices with the same local shard
        of a gradient computed the same values. Values may differ by rounding: by 1e-5 of the largest number of their
        gradient, in half precision by 2e-2. The step updates nothing: weights, slots, statistics, seeds and metrics
        keep their values. Gradients of embedding tables (`tables=`) are left out. In a launched run, all clients must
        call this method.

        Args:
            model: A built model of this strategy.
            batch: None, or an element of a dataset: `(x, y)`, `(x, y, sample_weight)`, or another argument of the
                model's `train_step`; the full batch. The model must be compiled.

        Raises:
            ConsistencyError: Devices differ. Names the first variable that differs, and the devices.
            StrategyError: The model is not built, or has no variable on the mesh. With a batch: the model is not
                compiled or is in a pipeline, or the batch lacks targets.

        Example:

        >>> import keras, numpy as np, tfshard
        >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
        >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
        >>> model.compile("sgd", "mse", strategy=strategy)
        >>> strategy.check_consistency(model, batch=(np.ones((8, 8), "float32"), np.ones((8, 4), "float32")))
        """
        check_is_measurable(model, "check_consistency")
        check_consistency(model)
        if batch is not None:
            gradient_copies.check_gradients(model, batch, self)


def _offloads(mesh: dtensor.Mesh, config: ShardingConfig) -> bool:
    """Return True if slots are stored on the host mesh of a mesh. Uses no device.

    Raises:
        StrategyError: The slots cannot be stored there.
    """
    if not config.offload.slots:
        return False
    if host_meshes.of(mesh) is None:
        kind = mesh.device_type().upper()
        if kind != "CPU":
            raise StrategyError(
                "offload='slots' needs GPUs. Use zero_stage=3, slot_dtype='bfloat16', or more devices. Devices of "
                f"the mesh: {kind}. Received: offload='slots'"
            )
        warn("offload='slots' has no effect here: CPU devices already store slots in the host's memory.")
        return False
    axes = axis_sizes(mesh)
    if not config.zero_stage.shard_slots or axes.data_size == 1:
        raise StrategyError(
            "offload='slots' moves only slots that are sharded over the batch axis to the host: replicated slots "
            "cannot move from each device to its host. Use zero_stage=1 or more on a mesh whose batch axis has "
            f"several devices. Received: zero_stage={config.zero_stage}, mesh={axes.given}"
        )
    return True


class _Scope:
    """The result of `strategy.scope()`. When the scope ends, it attaches the models that were created in it."""

    def __init__(self, scope: contextlib.AbstractContextManager[object], strategy: ShardedStrategy):
        self._scope = scope
        self._strategy = strategy

    def __enter__(self) -> ShardedStrategy:
        self._scope.__enter__()
        return self._strategy

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._scope.__exit__(exception_type, exception_value, traceback)
        if exception_type is None:
            with process_lock.held():
                births.attach_born(self._strategy)
