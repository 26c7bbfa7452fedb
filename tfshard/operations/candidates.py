"""Samplers of candidate classes (`tf.nn.sampled_softmax_loss`, `tf.nn.nce_loss`): every device draws the same ones.

A sampler keeps its generator, and the counts of classes that it has learned, in its kernel, and each device has a
kernel. All kernels get the same seeds and the labels of the full batch, so they draw the classes of one device.
"""

import dataclasses

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import expansions, transfer
from tfshard.operations import samples
from tfshard.operations.registry import rewrite_rule

SAMPLERS = (
    "AllCandidateSampler",
    "FixedUnigramCandidateSampler",
    "LearnedUnigramCandidateSampler",
    "LogUniformCandidateSampler",
    "ThreadUnsafeUnigramCandidateSampler",
    "UniformCandidateSampler",
)


@rewrite_rule(
    *SAMPLERS, graph=True, eager=False, gradient="none", sizes="any",
    fault="refuses them: their state is in the kernel (`tf.nn.sampled_softmax_loss`, `tf.nn.nce_loss`)",
    cases=("sampled softmax",),
)  # fmt: skip
def draw_candidates(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor]:
    """Draw on every device with the same seeds and the labels of the full batch: the classes of one device."""
    expansions.allow_local(call.type)
    seeds = {name: call.get_attr(name) for name in ("seed", "seed2")}
    if not any(seeds.values()):
        # Without seeds, the kernels would choose different ones.
        seeds = _chosen_seeds()
    changed = dataclasses.replace(call, get_attr=lambda name: seeds.get(name, call.get_attr(name)))
    classes, of_labels, of_classes = _private.same_operation(changed, [transfer.replicate(call.inputs[0], mesh)])
    return [transfer.replicate(classes, mesh), samples.by_row(of_labels, mesh), transfer.replicate(of_classes, mesh)]


def _chosen_seeds() -> dict[str, int]:
    """Return seeds from the state of Keras's generator of the process, which is the same on all clients."""
    with tf.init_scope():
        state = transfer.to_host(_private.backend_variable(_private.global_seed_generator(create=True).state))
    seed, seed2 = (int(each) for each in np.asarray(state).reshape(-1)[:2])
    return {"seed": seed, "seed2": seed2 + 1}
