"""Gradients outside a strategy's step: Grad-CAM, saliency, integrated gradients, gradients by weights."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard

RS = np.random.RandomState(0)
IMAGES = RS.randn(4, 6, 6, 3).astype("float32")
WORDS = RS.randint(0, 12, (4, 5))
LAYERS = keras.layers
MODEL_AXIS = {"images": {"conv.*/kernel": (None, None, None, "model")}, "words": {"embed/embeddings": ("model",)}}
MESHES = {
    "stage 0": ({"batch": 4}, {"zero_stage": 0}),
    "stage 1": ({"batch": 4}, {"zero_stage": 1, "analyzer": None}),
    "grouped": ({"batch": 4}, {}),
    "alone": ({"batch": 4}, {"analyzer": None}),
    "model axis": ({"batch": 2, "model": 2}, {}),
    "replicas": ({"replica": 2, "batch": 2}, {}),
}
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")


def images() -> keras.Model:
    inputs = keras.Input((6, 6, 3))
    x = LAYERS.Conv2D(4, 3, activation="tanh", name="conv1")(inputs)
    x = LAYERS.BatchNormalization()(x)
    body = keras.Model(x, LAYERS.Conv2D(6, 3, activation="gelu", name="conv2")(x), name="nested")
    x = body(x)
    return keras.Model(inputs, LAYERS.Dense(4, name="head")(LAYERS.GlobalAveragePooling2D(name="pool")(x)))


def words() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    x = LAYERS.Embedding(12, 8, name="embed")(inputs)
    x = LAYERS.LayerNormalization()(x + LAYERS.MultiHeadAttention(2, 4, name="pool")(x, x))
    return keras.Model(inputs, LAYERS.Dense(4, name="head")(LAYERS.GlobalAveragePooling1D()(LAYERS.GRU(8)(x)[:, None])))


def adapted() -> keras.Model:
    model = words()
    model.get_layer("embed").enable_lora(2)
    model.get_layer("head").enable_lora(2)
    for layer in ("embed", "head"):
        adapter = model.get_layer(layer)._trainable_variables[-1]
        adapter.assign(np.linspace(-1, 1, np.prod(adapter.shape), dtype="float32").reshape(adapter.shape))
    return model


def quantized() -> keras.Model:
    inputs = keras.Input((6, 6, 3))
    x = LAYERS.Conv2D(4, 3, activation="tanh", name="conv1")(inputs)
    hidden = LAYERS.Dense(8, activation="gelu", name="pool")
    model = keras.Model(inputs, LAYERS.Dense(4, name="head")(LAYERS.GlobalAveragePooling2D()(hidden(x))))
    hidden.quantize("int8")
    return model


MODELS = {
    "images": (images, IMAGES),
    "words": (words, WORDS),
    "adapted": (adapted, WORDS),
    "quantized": (quantized, IMAGES),
}


def compiled(kind: str, mesh: str | None) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, strategy = MODELS[kind][0](), None
    if mesh is not None:
        axes, options = MESHES[mesh]
        if mesh == "model axis":
            options = {"layout_map": {**MODEL_AXIS[kind], "head/kernel": ("model",), ".*": ()}}
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), **options)
    tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy, jit_compile=False)
    return model


def parts(model: keras.Model) -> keras.Model:
    """Return a model with the outputs of the first layer and of the model."""
    return keras.Model(model.input, [model.layers[1].output, model.output])


# --- ways to take a gradient: functions of a model and a batch that return numbers


def by_activation(model, x):
    with tf.GradientTape() as tape:
        hidden, outputs = parts(model)(x)
        score = tf.reduce_sum(tf.gather(outputs, [1, 2], axis=1))
    return tape.gradient(score, hidden)


def by_activation_in_a_function(model, x):
    return tf.function(functools.partial(by_activation, model))(x)


def layer_by_layer(model, x):
    """Open the tape after the first layer, and compute the later layers in a function."""
    head = keras.Model(model.layers[1].output, model.output)
    hidden = tf.function(model.layers[1])(x)
    with tf.GradientTape(persistent=True) as tape:
        found = tf.function(head)(hidden)
        score = tf.reduce_sum(found**2)
    with tf.GradientTape() as whole:
        hidden = tf.function(model.layers[1])(x)
        loss = tf.reduce_sum(tf.tanh(hidden) * tf.stop_gradient(hidden))
    return tape.gradient(score, hidden), tape.gradient(score, found), whole.gradient(loss, hidden)


def twice(model, x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            hidden, outputs = parts(model)(x)
            loss = tf.reduce_sum(tf.tanh(outputs))
        slope = inner.gradient(loss, hidden)
        norm = tf.reduce_sum(slope**2)
    return slope, outer.gradient(norm, hidden)


def jacobians(model, x):
    with tf.GradientTape(persistent=True) as tape:
        hidden, outputs = parts(model)(x)
        outputs = outputs[:, :2]
    return tape.jacobian(outputs, hidden, experimental_use_pfor=False), tape.batch_jacobian(outputs, hidden)


def forward(model, x):
    hidden, _ = parts(model)(x)
    head = keras.Model(model.layers[1].output, model.output)
    with tf.autodiff.ForwardAccumulator(hidden, tf.ones_like(hidden)) as accumulator:
        outputs = head(hidden)
    return accumulator.jvp(outputs)


def integrated(model, x):
    """Return integrated gradients of the first layer's output."""
    head = keras.Model(model.layers[1].output, model.output)
    end = model.layers[1](x)
    total = tf.zeros_like(end)
    for share in (0.25, 0.75):
        with tf.GradientTape() as tape:
            point = share * end
            tape.watch(point)
            score = head(point)[:, 0]
        total += tape.gradient(score, point)
    return total * end


def by_input(model, x):
    x = tf.constant(x)
    if not x.dtype.is_floating:
        return 0.0
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.reduce_max(model(x), 1)
    return tape.gradient(score, x)


def by_weights(model, x):
    """Return gradients by weights.

    They are taken in eager code, in a function and with tf.gradients; of the same layers twice; of watched weights; and
    of an eager loss by a function's weights.
    """
    weights = [weight.value for weight in model.trainable_variables]

    def found(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2) + tf.reduce_mean(model(x))
        # To TensorFlow, frozen weights of Keras stay trainable.
        assert {id(weight) for weight in weights} <= {id(variable) for variable in tape.watched_variables()}
        return [
            tf.convert_to_tensor(g)
            for g in tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        ]

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.function(model)(x) ** 2)
    with tf.GradientTape(watch_accessed_variables=False) as watching:
        watching.watch(weights[0])
        other = tf.reduce_sum(model(x) ** 2)
    in_graph = tf.function(lambda x: tf.gradients(tf.reduce_sum(model(x) ** 2), weights[-2:]))
    return [
        *found(x),
        *tf.function(found)(x),
        *tape.gradient(loss, model.trainable_variables[-2:]),
        *watching.gradient(other, [*weights[:1], weights[-1]], unconnected_gradients=tf.UnconnectedGradients.ZERO),
        *in_graph(x),
    ]


def by_weights_forward(model, x):
    weight = model.trainable_variables[-1].value
    with tf.autodiff.ForwardAccumulator(weight, tf.ones(weight.shape)) as accumulator:
        outputs = tf.tanh(model(x))
    return accumulator.jvp(outputs)


WAYS = (by_activation, by_activation_in_a_function, layer_by_layer, twice, jacobians, forward, integrated, by_input,
        by_weights, by_weights_forward)  # fmt: skip


@functools.cache
def expected(kind: str) -> dict:
    model, x = compiled(kind, None), MODELS[kind][1]
    return {way.__name__: flat(way(model, x)) for way in WAYS}


def flat(found) -> list:
    return [None if leaf is None else np.array(tf.convert_to_tensor(leaf)) for leaf in tf.nest.flatten(found)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [*(("images", mesh) for mesh in MESHES), ("words", "alone"), ("words", "model axis"), ("adapted", "grouped"),
     ("quantized", "alone")],
)  # fmt: skip
def test_gradients_where_no_strategy_runs_the_step_are_those_of_keras(kind, mesh):
    model, x = compiled(kind, mesh), MODELS[kind][1]
    axes = parity.shard_axes(model)
    assert ("batch" in axes, "model" in axes) == (mesh not in ("stage 0", "stage 1"), mesh == "model axis"), "premise"
    assert all(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.trainable_variables)
    for way in WAYS:
        want = expected(kind)[way.__name__]
        got = flat(way(model, x))
        assert len(got) == len(want) and any(w is not None for w in want), "premise"
        for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            assert (ours is None) == (theirs is None), (way.__name__, number)
            if theirs is None:
                continue
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=f"{way.__name__} {number}")
