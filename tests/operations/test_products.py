"""Products of integers of 8 bits are exact, however their operands are sharded, and gather no kernel."""

import itertools

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from sweeps import table
from tfshard.devices import transfer

RS = np.random.RandomState(0)
ROWS = RS.randint(-128, 128, (8, 4, 2048)).astype("int8")
KERNEL = RS.randint(-128, 128, (2048, 8)).astype("int8")
# A sum that float32 would round.
ROWS[0, 0], KERNEL[:, 0] = 127, 127
ROWS[0, 0, 0] = 126

MESHES = {"batch": {"batch": 4}, "batch x model": {"batch": 2, "model": 2}, "model": {"model": 4}}
# The layouts of both operands and of the result.
WAYS = {
    "whole kernel": (None, (None, None), None),
    "column": (None, (None, "model"), "model"),
    "row": ("model", ("model", None), None),
}


@table(
    "products of integers", ("mesh", "way", "transposed"),
    [(mesh, way, transposed) for mesh, way, transposed in itertools.product(MESHES, WAYS, (False, True))
     if "model" in mesh or way == "whole kernel"],
    sample=1, always=[("batch", "whole kernel", False), ("batch x model", "column", True),
                      ("batch x model", "row", False), ("model", "column", False)],
)  # fmt: skip
def test_a_product_of_integers_is_that_of_one_device(mesh: str, way: str, transposed: bool):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    batch = "batch" if "batch" in mesh else None
    of_rows, of_kernel, of_result = WAYS[way]
    if transposed:
        of_kernel = of_kernel[::-1]
    rows = transfer.host_to_mesh(ROWS, (batch, None, of_rows), strategy.mesh)
    kernel = transfer.host_to_mesh(KERNEL.T if transposed else KERNEL, of_kernel, strategy.mesh)

    def product(rows, kernel):
        return tf.matmul(rows, kernel, transpose_b=transposed, output_type=tf.int32)

    with strategy.extended.results_stay_sharded():
        found = strategy.run(tf.function(product), args=(rows, kernel))
    expected = ROWS.astype("int64") @ KERNEL.astype("int64")
    assert int(np.float32(expected.max())) != expected.max(), "premise"
    assert found.dtype == tf.int32
    np.testing.assert_array_equal(transfer.to_host(found), expected)
    assert transfer.axes_of(dtensor.fetch_layout(found)) == (batch, None, of_result)
