"""Steps compiled for GPUs that do not exist: order, kernels, dtypes and copies (tools/gpu)."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import small_models
import tfshard
from sweeps import SWEEP
from tfshard import _private
from tools.gpu import kernels, lowered

ROOT = pathlib.Path(__file__).parents[2]
ORDINARY = ("gpt2, stage 3", "compiled blocks, batch x model", "replicas, compressed by int8", "slots in int8")


def test_gpus_run_all_of_a_step_in_one_order():
    """An ordinary run compiles a few configurations, a sweep all."""
    only = [] if SWEEP else [f"--only={name}" for name in ORDINARY]
    command = [sys.executable, "-m", "tools.gpu", "lower", *only]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-3000:]}"
    (count,) = re.findall(r"^(\d+) configurations, 0 faults$", done.stdout, re.MULTILINE)
    assert int(count) >= (40 if SWEEP else len(ORDINARY)), "premise"


def read(function, *specs: tf.TensorSpec) -> lowered.Step:
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return lowered.read([traced.function_def.signature.name], lowered.functions())


def test_nodes_without_a_gpu_kernel_are_found():
    numbers = tf.TensorSpec((2, 2), tf.int32)
    assert read(tf.matmul, numbers, numbers).without_kernel == {("MatMul", ("int32",)): 1}
    assert not read(tf.matmul, tf.TensorSpec((2, 2)), tf.TensorSpec((2, 2))).without_kernel


def test_copies_between_host_and_device_are_found():
    step = read(lambda x: tf.reshape(x, tf.constant([4], tf.int64)), tf.TensorSpec((2, 2)))
    assert step.to_host == {("Const", "Reshape", "shape", "int64"): 1}
    assert not read(lambda x: tf.reshape(x, tf.constant([4], tf.int32)), tf.TensorSpec((2, 2))).to_host
    # TensorFlow adds int32 on the host, and looks up on the device.
    step = read(lambda x, i: tf.gather(x, i + i), tf.TensorSpec((4,)), tf.TensorSpec((2,), tf.int32))
    assert step.to_device == {("AddV2", "GatherV2", "indices", "int32"): 1}


def reduced(tensor: tf.Tensor, key: int) -> tf.Tensor:
    common = {"group_size": 2, "group_key": 1, "instance_key": key, "ordering_token": []}
    return tf.raw_ops.CollectiveReduceV2(input=tensor, merge_op="Add", final_op="Id", **common)


def test_collectives_without_an_order_are_found():
    # A graph, not a function: TensorFlow orders the collectives of a function.
    with tf.Graph().as_default() as unordered:
        for key in range(3):
            reduced(tf.zeros(2), key)
    with tf.Graph().as_default() as ordered:
        reduced(tf.identity(reduced(tf.zeros(2), 0)), 1)
    assert lowered.unordered(list(unordered.as_graph_def().node), {}) == 3
    assert lowered.unordered(list(ordered.as_graph_def().node), {}) == 0


def test_dtypes_that_nccl_lacks_are_found():
    assert "bfloat16" not in kernels.NCCL_DTYPES
    step = read(lambda x: reduced(x, 1), tf.TensorSpec((2,), tf.float16))
    assert [each[:2] for each in step.collectives] == [("all-reduce", "float16")], "premise"
    assert not step.not_of_nccl
    step.collectives.append(("all-gather", "bfloat16", 2))
    assert step.not_of_nccl == {("all-gather", "bfloat16")}


def test_only_constants_that_give_shapes_become_int32():
    def function(x, y):
        shape, perm = tf.constant([4], tf.int64), tf.constant([1, 0], tf.int64)
        added, returned = tf.constant([2, 2], tf.int64), tf.constant([1, 4], tf.int64)
        results = tf.reshape(x, shape), tf.transpose(x, perm), tf.broadcast_to(y, tf.constant([3, 2], tf.int64))
        return *results, tf.reshape(x, added), added + 1, tf.reshape(x, returned), returned

    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec((2, 2)), tf.TensorSpec((2,)))
    definition = lowered.functions()[traced.function_def.signature.name]
    assert _private.functions._make_shapes_int32(definition)
    types = {node.op: set() for node in definition.node_def}
    for node in definition.node_def:
        types[node.op] |= {
            tf.as_dtype(node.attr[name].type) for name in ("Tshape", "Tperm", "Tidx") if name in node.attr
        }
    assert types["Transpose"] == types["BroadcastTo"] == {tf.int32}
    assert types["Reshape"] == {tf.int32, tf.int64}, "constants with another use stay"
    constants = [tf.as_dtype(node.attr["dtype"].type) for node in definition.node_def if node.op == "Const"]
    assert constants.count(tf.int32) == 3


def test_steps_match_one_device_with_shapes_in_int32(monkeypatch):
    """GPUs read int32 shapes on the host, where DTensor's int64 shapes would be copied to."""
    monkeypatch.setattr(_private.functions, "_shapes_are_int32", True)
    x, y = np.random.RandomState(0).normal(size=(2, 8, 6)).astype("float32")

    plain = small_models.reshaped()
    plain.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before = lowered.functions()
    model = tfshard.as_distributed(small_models.reshaped())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    model.compile(keras.optimizers.SGD(0.1), "mse", strategy=strategy)
    for _ in range(3):
        expected, found = plain.train_on_batch(x, y), model.train_on_batch(x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    known = lowered.functions()
    step = max(lowered.device_functions(known, before), key=lambda name: len(known[name].node_def))
    shapes = [node for node in known[step].node_def if node.op == "Reshape"]
    assert shapes, "premise"
    assert {node.attr["Tshape"].type for node in shapes} == {tf.int32.as_datatype_enum}
