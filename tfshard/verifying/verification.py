"""verify: runs one training step sharded and one on one device, from the same values."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import batching, clients, process_lock, transfer
from tfshard.errors import StrategyError
from tfshard.graph import batches
from tfshard.training import attached_model, custom_steps
from tfshard.training.strategy import ShardedStrategy
from tfshard.verifying.comparison import Comparison
from tfshard.verifying.subject import Subject
from tfshard.verifying.verdict import Verification


@process_lock.locked
def verify(model: keras.Model, batch: Any, *, tolerance: float | None = None) -> Verification:
    """Run one training step sharded and one on one device, from the same values, and compare them.

    Both steps run the model's `train_step`, traced like in `fit`. Each step draws random numbers, such as dropout
    masks, and `verify` compares them. After comparing the gradients, `verify` gives the optimizer on one device the
    gradients of the sharded step. Otherwise an optimizer such as Adam would make a full step out of the rounding error
    of a zero gradient. Afterwards the model, its optimizer and its metrics have their earlier values; variables that
    the first step builds stay built.

    Args:
        model: A model compiled with a `tfshard.ShardedStrategy`.
        batch: An element of a dataset: `(x, y)`, `(x, y, sample_weight)`, or another argument of the model's
            `train_step`; the full batch, of any size.
        tolerance: The tolerance of values, relative to the largest number of their tensor. By default 1e-10 for
            float64, 2e-5 for float32, 1e-2 for float16, 5e-2 for bfloat16.

    Returns:
        A `Verification`.

    Raises:
        StrategyError: The model is not compiled with a ShardedStrategy, or `tables=` updates lazily. This process is a
            client of a launched run. The batch is a dataset or lacks targets for the compiled loss.
        UnsupportedOperationError: The step has an operation that DTensor cannot expand.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    >>> model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    >>> result = tfshard.verify(model, (np.ones((8, 8), "float32"), np.ones((8, 4), "float32")))
    >>> result.ok, [row.kind for row in result.compared]
    (True, ['random', 'layer', 'loss', 'gradient', 'update', 'metric'])
    """
    strategy = _private.distribute_strategy(model)
    if not isinstance(strategy, ShardedStrategy) or not model.compiled:
        how = "which is not compiled" if not getattr(model, "compiled", False) else f"compiled under {strategy!r}"
        how = "which is compiled without a strategy" if how == "compiled under None" else how
        raise StrategyError(
            "verify takes a model that is compiled with a ShardedStrategy: "
            "tfshard.as_distributed(model).compile(optimizer, loss, strategy=...). "
            f"Received: model '{getattr(model, 'name', model)}', {how}"
        )
    for kind in strategy.config.kinds:
        kind.check_verifiable()
    if clients.here().is_launched:
        raise StrategyError(
            "verify runs in one process. Start one process with as many devices as the launched run has in total, "
            "tfshard.initialize(num_devices=..., device_type='CPU'): the results are the same."
        )
    if strategy.mesh_shape.contexts > 1:
        raise StrategyError(
            "verify does not work on a mesh with a context axis, where layers see chunks of the sequences. Verify the "
            f"model on a mesh without the axis. Received: mesh={strategy.mesh_shape}"
        )
    batches.check("verify", model, batch)
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(batch)):
        batching.batch_to_mesh(batch, strategy.mesh)  # Raises an error that says what to do.
    host = tf.nest.map_structure(_host_leaf, batch)
    _private.symbolic_build(model, host)
    if custom_steps.has_custom_steps(model):
        custom_steps.build(model, strategy, "train_step")
    attached_model.attached(model, strategy).refresh()
    subject = Subject(model, strategy)
    subject.remember()
    # Layer outputs are recorded for the full batch.
    microbatches, strategy.microbatches = strategy.microbatches, 1
    try:
        return Comparison(subject, host, tolerance).run()
    finally:
        strategy.microbatches = microbatches
        subject.restore()


def _host_leaf(value: Any) -> Any:
    """Return a part of a batch as an array in the dtype of Keras's data adapters."""
    if value is None:
        return None
    array = transfer.to_host(tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array
