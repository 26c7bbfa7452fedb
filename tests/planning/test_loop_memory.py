"""The counted memory of lists that a loop fills."""

import keras
import pytest
import tensorflow as tf

from tfshard import _private
from tfshard.planning import loop_memory, step_flops

ROWS, TURNS, UNITS = 8, 5, 4
ONE_LIST = TURNS * ROWS * UNITS * 4


def loops_of(make):
    """Return the forward loop of a layer and its gradient loop."""
    layer = make()
    layer.build((ROWS, TURNS, UNITS))
    graph = _private.func_graph("loops")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (ROWS, TURNS, UNITS))
        weights = [tf.compat.v1.placeholder(tf.float32, each.shape) for each in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            loss = tf.reduce_sum(layer.stateless_call(weights, layer.non_trainable_variables, x)[0])
        tape.gradient(loss, [x, *weights])
    forward, backward = [each for each in graph.get_operations() if each.type in step_flops.LOOPS]
    return forward, backward


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        # Three gates, the candidate, the new state, its tanh, and the output.
        (lambda: keras.layers.LSTM(UNITS), 7),
        # The output.
        (lambda: keras.layers.SimpleRNN(UNITS), 1),
    ],
)
def test_each_tensor_that_turns_keep_is_counted_once(make, kept):
    forward, _ = loops_of(make)
    results = loop_memory.results_of(forward)
    assert len(results) == len(forward.outputs)
    filled = [each.bytes for each in results if (each.bytes or 0) >= ONE_LIST]  # Others are of scalars.
    assert filled == [ONE_LIST] * kept
    lists = [each for each, output in zip(results, forward.outputs, strict=True) if output.dtype == tf.variant]
    # The next iteration gets the output of the previous one. A list from before the loop holds the rows of the batch.
    assert any(each.same is not None for each in lists) and any(each.given is not None for each in lists)


def test_the_loop_of_a_gradient_empties_lists():
    forward, backward = loops_of(lambda: keras.layers.LSTM(UNITS))
    results = loop_memory.results_of(backward)
    kept = {each.ref() for each in forward.outputs if each.dtype == tf.variant}
    emptied = [number for number, each in enumerate(backward.inputs) if each.ref() in kept]
    assert len(emptied) > 5, "premise"
    assert all(not results[number].bytes for number in emptied)


def test_what_is_smaller_than_asked_for_does_not_count():
    forward, _ = loops_of(lambda: keras.layers.LSTM(UNITS))
    assert not any(each.bytes for each in loop_memory.results_of(forward, least=ROWS * UNITS * 4 + 1))
