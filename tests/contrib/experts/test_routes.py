"""Routes give each expert its tokens, in the order in which experts with a capacity take them."""

import numpy as np
import pytest
import tensorflow as tf

from tfshard.contrib.experts.routes import Routes

TOKENS, CHOICES, EXPERTS = 10, 2, 4
RANDOM = np.random.RandomState(0)


def chosen() -> np.ndarray:
    """Return the experts of each token. Token 3 has none."""
    ids = np.stack([RANDOM.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    ids[3] = EXPERTS
    return ids


def taken(ids: np.ndarray, capacity: int | None) -> list[list[tuple[int, int]]]:
    """Return the tokens and choices that each expert takes: first choices of all tokens before second choices."""
    found = [[] for _ in range(EXPERTS)]
    for choice in range(CHOICES):
        for token, expert in enumerate(ids[:, choice]):
            if expert < EXPERTS and (capacity is None or len(found[expert]) < capacity):
                found[expert].append((token, choice))
    return found


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced with unknown sizes"])
@pytest.mark.parametrize("capacity", [None, 3, 0])
def test_experts_take_first_choices_first(capacity, is_traced):
    ids = chosen()
    expected = taken(ids, capacity)
    assert capacity != 3 or sum(map(len, expected)) < sum(map(len, taken(ids, None))), "premise: items are dropped"
    tokens = RANDOM.normal(size=(TOKENS, 3)).astype("float32")
    weights = RANDOM.uniform(size=(TOKENS, CHOICES)).astype("float32")

    def routed(ids, tokens, weights):
        routes = Routes(ids, experts=EXPERTS, capacity=capacity, mesh=None)
        sent = routes.send(tokens)
        return sent, routes.send(tokens, weights), routes.collect(sent)

    if is_traced:
        shapes = (("int64", CHOICES), ("float32", 3), ("float32", CHOICES))
        routed = tf.function(routed, input_signature=[tf.TensorSpec((None, size), dtype) for dtype, size in shapes])
    rows, weighted, items = routed(tf.constant(ids, tf.int64), tf.constant(tokens), tf.constant(weights))
    collected = np.zeros((TOKENS, CHOICES, 3), "float32")
    for expert, wanted in enumerate(expected):
        of_tokens = [token for token, _ in wanted]
        np.testing.assert_array_equal(rows[expert], tokens[of_tokens].reshape(-1, 3))
        scaled = [tokens[token] * weights[token, choice] for token, choice in wanted]
        np.testing.assert_allclose(weighted[expert], np.reshape(scaled, (-1, 3)), rtol=1e-6)
        for token, choice in wanted:
            collected[token, choice] = tokens[token]
    np.testing.assert_array_equal(items, collected)
