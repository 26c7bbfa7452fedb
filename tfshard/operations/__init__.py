"""The operations and layers that DTensor cannot expand, and their replacements.

Rewrite rules replace operations that DTensor expands wrongly or not at all, while a step is traced or run. Layers that
need other functions get a `LayerPatch`. Read `registry` first, then `rewrites`.

    registry        the rewrite rules: which operation, when, in which order, and which gradient wins
    conditions      conditions that several rules share
    rewrites        applies the rules to the operations of a step
    refusals        operations that a compiled step cannot have
    slices          slices and slice updates, in forms that DTensor expands correctly
    scatters        scatters, gathers by index tuples and `tf.where`, computed in full on every device
    unsized         tensors with a shape that depends on values
    samples         the dims of the tensors of a step that hold its samples
    dims            operations that need a full dim on each device: splits, tiles, paddings, convolutions
    joins           concats, stacks, slices, splits, gathers and reshapes of the rows of a batch
    candidates      samplers of candidate classes, the same on every device
    selects         `tf.where` by one number, one-hot vectors
    branches        the branch of a `tf.cond` that is known while a step is traced
    einsums         einsums with an ellipsis, by letters
    counts          `tf.math.bincount` with a number of bins that is known
    rows            how each device computes with its local rows
    draws           random numbers: each device draws its local rows of the draw of one device
    row_operations  rewrite rules of operations that each device computes with its local rows
    row_functions   `tf.map_fn`, `tf.vectorized_map`, `tf.nn.ctc_loss`
    cross_entropies cross entropy of logits with integer labels, in a third of the time of TensorFlow's kernel on CPU
    loops           loops of recurrent layers, and the lists that loops fill
    partial_sums    local gradients, before the reduction over the devices
    products        products of integers of 8 bits, as in quantized layers
    lookups         lookups of integers in a vocabulary
    origins         the layer, loss or metric that made an operation, and the user's line
    layer_patch     every change to a layer or metric of a user's model, with undo
    vocabulary      lookups and metrics over a sharded vocabulary
    convolution     convolutions with sharded kernels, dilated ones, and grouped ones of volumes
    assignments     arrays that are assigned to large variables
    averages        moving averages of local shards of weights
    adapters        LoRA by its two matrices
    blocks          blocks of layers that are computed again in the backward pass
    output_layouts  layouts of the outputs of layers
    sequence        sequence parallelism: layers gather and scatter the sequence
    contexts        chunks of sequences: positions, and the exchange of heads for positions
    context_parallel  position embeddings of chunks, and the check that only attention combines positions
    compiled_updates  updates of optimizers, as one XLA program on each device
    unsupported     layers and optimizers that cannot be sharded, and what to do instead
"""
