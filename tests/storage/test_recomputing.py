"""Blocks that are recomputed in the backward pass give the same bits, and use less memory."""

import contextlib

import keras
import numpy as np
import pytest

import parity
import recomputed
import tfshard
from tfshard.operations import layer_patch
from tfshard.storage import recomputing
from tfshard.training import attached_model

RS = np.random.RandomState(0)
WIDTH = 16
X = RS.normal(size=(16, WIDTH)).astype("float32")
SEQUENCES = RS.normal(size=(16, 6, WIDTH)).astype("float32")
IMAGES = RS.normal(size=(16, 8, 8, 4)).astype("float32")
Y = RS.normal(size=(16, 4)).astype("float32")


def dense():
    layers = [keras.layers.Dense(WIDTH, activation=("gelu", "silu")[i % 2], name=f"block{i}_dense") for i in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(4)])


def convolutions():
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for i in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", name=f"block{i}_conv")(x)
        x = keras.layers.BatchNormalization(momentum=0.5, name=f"block{i}_bn")(x)
        x = keras.layers.ReLU(name=f"block{i}_relu")(x)
        x = keras.layers.Dropout(0.3, seed=i, name=f"block{i}_dropout")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


def recurrent():
    inputs = keras.Input((6, WIDTH))
    x = inputs
    for i in range(2):
        x = keras.layers.GRU(WIDTH, return_sequences=True, name=f"block{i}_gru")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))


class Attention(keras.layers.Layer):
    """A transformer layer that counts its calls."""

    def build(self, shape):
        self.attention = keras.layers.MultiHeadAttention(2, 8, dropout=0.1, seed=1)
        self.norm, self.up = keras.layers.LayerNormalization(), keras.layers.Dense(32, activation="gelu")
        self.down = keras.layers.Dense(WIDTH)
        self.calls = self.add_weight(shape=(), name="calls", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        self.calls.assign_add(1.0)
        self.add_loss(1e-3 * keras.ops.mean(x**2))
        x = x + self.attention(self.norm(x), x, training=training)
        return x + self.down(self.up(x))


def attention():
    inputs = keras.Input((6, WIDTH))
    x = inputs
    for _ in range(3):
        x = Attention()(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))


MODELS = {
    "dense": (dense, X), "convolutions": (convolutions, IMAGES), "recurrent": (recurrent, SEQUENCES),
    "attention": (attention, SEQUENCES),
}  # fmt: skip
MESHES = {
    "batch2": {"batch": 2}, "batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2},
    "replica2_batch2": {"replica": 2, "batch": 2},
}  # fmt: skip


def run(name, mesh, stage, *, recompute=None, scope=None):
    """Return losses, weights, and the number of recomputed tensors."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    build, x = MODELS[name]
    layout_map = tfshard.LayoutMap()
    layout_map.replicated(".*")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map, zero_stage=stage, analyzer=None)
    with scope or contextlib.nullcontext():
        model = tfshard.as_distributed(build())
    model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), "mse", strategy=strategy)
    if recompute is not None:
        strategy.recompute(model, **recompute)
    with recomputed.added_operations() as again:
        losses = [float(model.train_on_batch(x[:8], Y[:8])) for _ in range(3)]
    weights = {variable.path: np.array(variable) for variable in model.variables}
    return losses, weights, sum(again)


@contextlib.contextmanager
def blocks_recomputed():
    """Make each model that is attached to a strategy recompute its blocks in this context."""
    original = attached_model.AttachedModel.attach

    def attach(self):
        original(self)
        self.strategy.recompute(self.model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_model.AttachedModel, "attach", attach)
        yield


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_keep_their_bits(name, mesh, stage):
    losses, weights, none = run(name, MESHES[mesh], stage)
    assert none == 0
    for keep_products in (False, True):
        again = run(name, MESHES[mesh], stage, recompute={"keep_products": keep_products})
        assert again[2] > 0 or name == "recurrent", "premise: operations were copied"
        # Sums of two are the same in any order. With four devices, differently merged all-reduces add in another order.
        assert again[0][0] == losses[0]
        if mesh in ("batch2", "batch2_model2"):
            assert again[0] == losses
        np.testing.assert_allclose(again[0], losses, rtol=1e-6)
        for path, value in again[1].items():
            np.testing.assert_allclose(value, weights[path], rtol=0, atol=1e-5, err_msg=path)
    if name == "attention":
        assert {float(value) for path, value in weights.items() if path.endswith("calls")} == {3.0}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", ["full", "activations", "larger_than", "list_of_layers"])
def test_layers_made_under_a_remat_scope_are_blocks(mode):
    """Keras's RematScope fails on TensorFlow: its custom gradient takes no keyword arguments in a graph."""
    options = {"larger_than": {"output_size_threshold": 4}, "list_of_layers": {"layer_names": ["block0_dense"]}}
    losses, _, _ = run("dense", MESHES["batch2"], 3)
    scope = keras.RematScope(mode=mode, **options.get(mode, {}))
    again = run("dense", MESHES["batch2"], 3, scope=scope)
    assert again[0] == losses
    assert again[2] > 0


def test_a_remat_scope_and_one_device_are_the_same():
    plain = dense()
    with keras.RematScope(mode="full"):
        model = tfshard.as_distributed(dense())
    model.set_weights(plain.get_weights())
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    plain.compile("sgd", "mse")
    for _ in range(3):
        np.testing.assert_allclose(model.train_on_batch(X, Y), plain.train_on_batch(X, Y), rtol=1e-6)
    assert layer_patch.REMAT in {patch.change for patch in layer_patch.patches_of(model)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("activation", "kept", "keep_products", "saved"),
    [("gelu", 1.9, False, 0.7), ("mish", 3, True, 0.3), ("silu", 1.9, False, 0.7)],
)
def test_activations_of_blocks_are_freed(activation, kept, keep_products, saved):
    """Compares the allocator's peaks of steps, minus the peak of a step with almost no samples.

    `tf.nn.silu` has a custom gradient, to which a tape gives no name scope.
    """
    rows, width, blocks = 512, 256, 8

    def added(count, recompute):
        inputs = keras.Input((width,))
        x = inputs
        for i in range(blocks):
            x = x + keras.layers.Dense(width, activation=activation, name=f"block{i}_dense")(x)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
        model = tfshard.as_distributed(keras.Model(inputs, x))
        model.compile("sgd", "mse", strategy=strategy)
        if recompute:
            strategy.recompute(model, keep_products=keep_products)
        values = np.ones((count, width), "float32")
        profile = tfshard.profile_step(model, (values, values))
        assert profile.peak is not None, "premise"
        return profile.peak.added

    all_kept, freed, none = added(4 * rows, False), added(4 * rows, True), added(4, False)
    # On a device, each block has this many activations of half a MiB, plus its input, except for a few.
    assert all_kept - none >= 4 * blocks * kept * 4 * rows * width, "premise"
    # The inputs of blocks stay.
    inputs = 4 * (blocks + 1) * 4 * rows * width
    assert freed - none - inputs <= (1 - saved) * (all_kept - none - inputs)


def test_what_was_looked_up_is_tied_to_the_gradient(monkeypatch):
    """The lookup depends on a table and a batch: a block that starts with it must not be recomputed at once."""
    tied = []
    original = recomputing.recompute

    def noted(graph, *args):
        found = original(graph, *args)
        ties = [operation for operation in graph.get_operations() if operation.type == "IdentityN"]
        tied.append({each.op.type for tie in ties for each in tie.inputs if "embedding" in each.name})
        return found

    monkeypatch.setattr(recomputing, "recompute", noted)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(8, WIDTH, name="embedding")(inputs)
    for i in range(2):
        x = keras.layers.Dense(WIDTH, activation="gelu", name=f"block{i}_dense")(x)
    model = tfshard.as_distributed(keras.Model(inputs, x))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model.compile("sgd", "mse", strategy=strategy)
    strategy.recompute(model)
    model.train_on_batch(np.zeros((4, 6), "int32"), np.zeros((4, 6, WIDTH), "float32"))
    assert tied and all("GatherV2" in each for each in tied)


def test_what_is_known_when_a_step_is_traced_stays_known():
    """The number of repeated heads, as in Llama's attention, comes from constants. The gradient uses it, too."""

    class Repeated(keras.layers.Layer):
        def build(self, shape):
            self.dense, self.out = keras.layers.Dense(WIDTH, activation="silu"), keras.layers.Dense(WIDTH)

        def call(self, x):
            heads = keras.ops.repeat(keras.ops.reshape(self.dense(x), (-1, 4, 4)), 2, axis=1)
            return x + self.out(keras.ops.reshape(heads, (-1, 2 * WIDTH)))

    def build():
        inputs = keras.Input((WIDTH,))
        return keras.Model(inputs, keras.layers.Dense(4)(Repeated()(Repeated()(inputs))))

    batches = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    reference = parity.train(build, batches, optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", steps=4)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with blocks_recomputed():
        found = parity.train(
            build, batches, optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", strategy=strategy, steps=4
        )
    assert layer_patch.BLOCK in {patch.change for patch in layer_patch.patches_of(found.model)}, "premise"
    parity.assert_same(found, reference, rtol=1e-5, atol=1e-5, slots=False)


def test_a_block_behind_another_may_be_the_only_one_with_gelu():
    """Its block captures the inputs of the GELU, and reads them again for the block before."""

    def build():
        kinds = ("softplus", "gelu", "softplus")
        layers = [keras.layers.Dense(WIDTH, activation=kind, name=f"block{i}_dense") for i, kind in enumerate(kinds)]
        return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(4)])

    losses = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))):
        keras.utils.set_random_seed(0)
        model = build()
        if strategy is None:
            model.compile("sgd", "mse", jit_compile=False)
        else:
            model = tfshard.as_distributed(model)
            model.compile("sgd", "mse", strategy=strategy)
            assert strategy.recompute(model) == ["block0", "block1", "block2"]
        losses.append([float(model.train_on_batch(X[:8], Y[:8])) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ("auto", ["block0", "block1", "block2"]),
        (".*block[01]_dense", ["sequential/block0_dense", "sequential/block1_dense"]),
        ([r".*block(\d)_.*"], ["0", "1", "2"]),
    ],
)
def test_blocks_are_chosen_by_paths(blocks, names):
    keras.backend.clear_session()
    model = tfshard.as_distributed(dense())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", strategy=strategy)
    assert strategy.recompute(model, blocks) == names


def test_transformer_layers_are_blocks_and_not_what_is_in_them():
    keras.backend.clear_session()
    model = tfshard.as_distributed(attention())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", strategy=strategy)
    assert strategy.recompute(model) == ["attention", "attention_1", "attention_2"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [("nothing", "blocks match no layer: 'nothing'. Some paths:"), ("(", "regular expressions"), ([3], "Received: 3")],
)
def test_wrong_blocks_are_refused(blocks, message):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.as_distributed(dense())
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        strategy.recompute(model, blocks)
    flat = tfshard.as_distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)]))
    with pytest.raises(tfshard.errors.StrategyError, match="Found no blocks to recompute") as error:
        strategy.recompute(flat)
    assert "input" not in str(error.value).partition("Some: ")[2]


def test_a_tensor_of_a_block_that_others_use_stays():
    """The loss takes one of two outputs directly. The numbers match one device."""

    class Two(keras.layers.Layer):
        def build(self, shape):
            self.dense, self.other = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH, activation="tanh")

        def call(self, x):
            middle = self.dense(x)
            return self.other(middle), middle

    def build():
        inputs = keras.Input((WIDTH,))
        x, one = Two()(inputs)
        x, other = Two()(x + inputs)
        return keras.Model(inputs, keras.layers.Dense(4)(x * one + other))

    batches = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    reference = parity.train(build, batches, optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", steps=4)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with blocks_recomputed():
        found = parity.train(
            build, batches, optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", strategy=strategy, steps=4
        )
    assert layer_patch.BLOCK in {patch.change for patch in layer_patch.patches_of(found.model)}, "premise"
    parity.assert_same(found, reference, rtol=1e-5, atol=1e-5, slots=False)
