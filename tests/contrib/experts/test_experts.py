"""Experts that the batch axis shards compute the tokens of all devices, and match plain Keras on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.contrib.experts.expert_kind import ExpertKind
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.measure import assert_matches_plan
from tfshard.operations import compiled_blocks

EXPERTS, WIDTH = 8, 8
RANDOM = np.random.RandomState(0)
opt = keras.optimizers


def strategy(mesh=None, **options):
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(mesh or {"batch": 4})), **{"experts": True, **options})


def model(*, masked=False, dtype=None, **options):
    inputs = keras.Input((6, WIDTH))
    x = keras.layers.Masking()(inputs) if masked else inputs
    x = keras.layers.Dense(WIDTH, "tanh", name="into", dtype=dtype)(x)
    options = {"load_balancing": 0.1, **options}
    x = x + tfshard.layers.MixtureOfExperts(EXPERTS, 2 * WIDTH, name="mixture", dtype=dtype, **options)(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(keras.layers.Flatten()(x)))


def batches(*rows):
    """Return batches of samples with six tokens. The last two tokens of every other sample are zeros."""
    found = [(RANDOM.normal(size=(n, 6, WIDTH)), RANDOM.normal(size=(n, 1))) for n in rows or (8, 8)]
    for x, _ in found:
        x[::2, 4:] = 0
    return [(x.astype("float32"), y.astype("float32")) for x, y in found]


def adam(**options):
    """Return Adam with a large epsilon: a small one enlarges the rounding of gradients near zero."""
    return lambda: opt.Adam(0.01, epsilon=1e-3, **options)


def trained(strategy, data, optimizer=None, **options):
    """Train the model for one step on each batch, with a strategy or in plain Keras."""
    training = {"optimizer": optimizer or adam(), "loss": "mse", "steps": len(data)}
    return parity.train(lambda: model(**options), data, strategy=strategy, **training)


def assert_same(run, reference, tolerance=1e-6, losses=1e-6):
    np.testing.assert_allclose(run.losses, reference.losses, rtol=losses)
    for path, expected in reference.weights.items():
        np.testing.assert_allclose(run.weights[path], expected, rtol=0, atol=tolerance, err_msg=path)


def experts_of(made):
    return made.get_layer("mixture").expert_weights


def assert_are_shared(made, devices=4):
    """Check the premise that every device stores equally many experts, and their slots."""
    for variable in experts_of(made):
        for each in (variable.value, *variable.value.slots.values()):
            shapes = [piece.shape for _, piece in each.storage.local_tensors()]
            assert shapes == [(EXPERTS // devices, *variable.shape[1:])] * len(shapes) and len(shapes) == 4
            assert each.layout.storage == ("batch", *(None,) * (len(variable.shape) - 1))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 3, 1, 2])
def test_shared_experts_match_one_device_at_every_stage(stage):
    data = batches(8, 8, 8)
    reference = trained(None, data)
    run = trained(strategy(zero_stage=stage), data)
    assert_are_shared(run.model)
    start = trained(None, data[:0])
    parity.assert_moved(reference, start.weights, tolerance=1e-4)
    assert_same(run, reference)


CASES = {
    "gated with biases": {"gated": True, "use_bias": True},
    "gelu": {"activation": "gelu", "gated": True},
    "relu": {"activation": "relu", "normalize_weights": False},
    "one expert a token": {"top_k": 1, "normalize_weights": False, "router_z": 0.1},
    "all experts": {"top_k": EXPERTS},
    "a capacity": {"capacity_factor": 1.25},
    "masked tokens": {"masked": True, "router_z": 0.1},
    "masked tokens and a capacity": {"masked": True, "capacity_factor": 1.0},
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "on every device"])
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_layer_matches_one_device(case, is_shared):
    """Without `experts=`, every device computes all experts for its local tokens."""
    data = batches()
    reference = trained(None, data, **CASES[case])
    run = trained(strategy(experts=is_shared, zero_stage=3 if is_shared else 1), data, **CASES[case])
    kinds = {variable.value.layout.kind is not None for variable in experts_of(run.model)}
    assert kinds == {is_shared}, "premise"
    assert_same(run, reference)


def test_a_capacity_drops_the_tokens_that_one_device_drops():
    data = batches()
    dropping = trained(None, data, capacity_factor=0.5)
    assert abs(dropping.losses[0] - trained(None, data).losses[0]) > 1e-3, "premise: tokens are dropped"
    assert_same(trained(strategy(), data, capacity_factor=0.5), dropping)


SETTINGS = {
    "rows that the axis does not divide": {"rows": (6, 1, 8, 3)},
    "a model axis": {"mesh": {"batch": 2, "model": 2}, "layout_map": {"out/kernel": ("model", None), ".*": ()}},
    "two devices": {"mesh": {"batch": 2}},
    "one device": {"mesh": {"batch": 1}},
    "microbatches": {"microbatches": 2, "layer": {"load_balancing": 0.0}},
    "microbatches that are reduced once": {"microbatches": 2, "reduce_once": True, "layer": {"load_balancing": 0.0}},
    "narrow slots": {"slot_dtype": "bfloat16", "tolerance": 1e-3, "losses": 1e-5},
    "a compressed reduction": {"compression": "bfloat16", "tolerance": 1e-3, "losses": 1e-3},
    "a clipped norm": {"optimizer": adam(clipnorm=0.05)},
    "a clipped global norm": {"optimizer": adam(global_clipnorm=0.05)},
    "averages": {"optimizer": adam(use_ema=True, ema_overwrite_frequency=2)},
    "accumulated gradients": {
        "optimizer": lambda: opt.SGD(0.1, gradient_accumulation_steps=2), "rows": (8, 8, 8, 8),
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_a_strategy_matches_one_device(name):
    settings = dict(SETTINGS[name])
    data, layer = batches(*settings.pop("rows", ())), settings.pop("layer", {})
    tolerances = {key: settings.pop(key) for key in ("tolerance", "losses") if key in settings}
    optimizer = settings.pop("optimizer", None)
    reference = trained(None, data, optimizer, **layer)
    run = trained(strategy(**settings), data, optimizer, **layer)
    assert {variable.value.layout.kind is not None for variable in experts_of(run.model)} == {True}, "premise"
    assert_same(run, reference, **tolerances)


def test_the_router_is_float32_under_mixed_precision():
    data = batches()
    reference = trained(None, data, dtype="mixed_bfloat16")
    run = trained(strategy(), data, dtype="mixed_bfloat16")
    layer = run.model.get_layer("mixture")
    assert layer(data[0][0]).dtype == tf.bfloat16 and layer.router_kernel.dtype == "float32", "premise"
    assert_same(run, reference, tolerance=5e-3, losses=1e-2)
    traced = tf.function(reference.model.get_layer("mixture")).get_concrete_function(tf.TensorSpec((8, 6, WIDTH)))
    products = [each.outputs[0].dtype for each in traced.graph.get_operations() if "MatMul" in each.type]
    assert products == [tf.float32, *[tf.bfloat16] * 2 * EXPERTS]


def test_router_losses_are_means_over_all_tokens():
    layer = tfshard.layers.MixtureOfExperts(EXPERTS, 4, load_balancing=0.5, router_z=0.25)
    x = RANDOM.normal(size=(2, 6, WIDTH)).astype("float32")
    layer(x, training=True)
    logits = x.reshape(-1, WIDTH) @ layer.router_kernel.numpy()
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1)[:, :2]
    shares = np.array([(chosen == expert).sum() for expert in range(EXPERTS)]) / chosen.size
    balance, z = layer.losses
    np.testing.assert_allclose(balance, 0.5 * EXPERTS * (shares * probabilities.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(z, 0.25 * (np.log(np.exp(logits).sum(1)) ** 2).mean(), rtol=1e-5)
    layer(x, training=False)
    assert not layer.losses


def test_masked_tokens_give_zeros_and_do_not_change_others():
    layer = tfshard.layers.MixtureOfExperts(EXPERTS, 4, load_balancing=0.5, router_z=0.5)
    x = RANDOM.normal(size=(2, 6, WIDTH)).astype("float32")
    mask = np.arange(6) < 4
    outputs = layer(x, mask=np.tile(mask, (2, 1)), training=True).numpy()
    losses = [float(each) for each in layer.losses]
    assert not outputs[:, 4:].any()
    np.testing.assert_allclose(outputs[:, :4], layer(x[:, :4], training=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, [float(each) for each in layer.losses], rtol=1e-5)


def test_a_step_sends_tokens_and_reduces_no_gradient_of_experts():
    """The plan bounds the bytes of the lists of tokens."""
    inputs = keras.Input((128, 64))
    x = keras.layers.Dense(64)(inputs)
    x = x + tfshard.layers.MixtureOfExperts(EXPERTS, 64, name="mixture")(x)
    made = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(1)(x)))
    made.compile("sgd", "mse", strategy=strategy())
    x = RANDOM.normal(size=(16, 128, 64)).astype("float32")
    plan = made.distribute_strategy.plan(made, inputs=x)
    profile = tfshard.profile_step(made, (x, np.ones((16, 128, 1), "float32")))
    assert_matches_plan(profile, plan)
    sent = next(each for each in plan.collectives if each.kind == "all-to-all")
    lists = 4 * (2 * 16 * 128 // 4)  # A list for each device, with both choices of all tokens of a device.
    assert (sent.count, sent.bytes, sent.at_most) == (4, lists * 64 * 4, True)
    assert profile.count("all-to-all") == 4 and 0 < profile.bytes("all-to-all") < sent.count * sent.bytes
    bytes_of_experts = sum(4 * int(np.prod(variable.shape)) for variable in experts_of(made))
    assert profile.bytes("all-reduce") < bytes_of_experts
    assert "With experts=, the gradients of 2 variables stay" in str(made.distribute_strategy.report(made))
    told = tfshard.plan(made, {"batch": 8 // 2}, experts=True)
    assert [each.bytes for each in told.collectives if each.kind == "all-to-all"] == [None]


def test_a_checkpoint_of_shared_experts_fits_other_meshes_and_strategies(tmp_path):
    data = batches(8, 8, 8)
    reference = trained(None, data)
    run = trained(strategy(), data[:2])
    tfshard.CheckpointManager(tmp_path).save(run.model, 2)
    for other in (strategy({"batch": 2}), strategy(experts=False, zero_stage=1)):
        restored = trained(other, data[:0]).model
        tfshard.CheckpointManager(tmp_path).restore(restored)
        loss = float(restored.train_on_batch(*data[2]))
        assert_same(parity.Run(model=restored, losses=[*run.losses, loss]), reference)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("what", ["recomputed", "compiled", "on every device, compiled"])
def test_recomputed_and_uncompiled_blocks_with_experts_match_one_device(what):
    """XLA compiles no block with experts. Recomputation keeps the results of experts."""

    def build(optimizer, **options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6, WIDTH))
        made = keras.Model(inputs, keras.layers.Dense(1)(Block(name="block_1")(Block(name="block_0")(inputs))))
        if "strategy" in options:
            made = tfshard.as_distributed(made)
        made.compile(optimizer, "mse", **options)
        return made

    compiled_blocks.forget_warnings()
    (x, _), y = batches(8)[0], RANDOM.normal(size=(8, 6, 1)).astype("float32")
    plain = build(opt.Adam(0.01), jit_compile=False)
    chosen = strategy(experts=what != "on every device, compiled")
    made = build(opt.Adam(0.01), strategy=chosen, jit_compile="compiled" in what)
    if what == "recomputed":
        assert chosen.recompute(made, ".*block_.") == ["block_0", "block_1"]
        losses = [float(made.train_on_batch(x, y)) for _ in range(2)]
    else:
        with pytest.warns(UserWarning, match="Block 'block_0' .*is not compiled: .*(expert|TopK)"):
            losses = [float(made.train_on_batch(x, y)) for _ in range(2)]
    np.testing.assert_allclose(losses, [float(plain.train_on_batch(x, y)) for _ in range(2)], rtol=1e-6)


@keras.saving.register_keras_serializable(package="tests")
class Block(keras.layers.Layer):
    """A dense layer and a mixture of experts."""

    def build(self, shape):
        self.dense = keras.layers.Dense(WIDTH, "gelu")
        self.dense.build(shape)
        self.mixture = tfshard.layers.MixtureOfExperts(EXPERTS, 2 * WIDTH, load_balancing=0.0)
        self.mixture.build(shape)

    def call(self, inputs):
        return inputs + self.mixture(self.dense(inputs))


@pytest.mark.slow
def test_verify_accepts_shared_experts_and_outputs_match():
    data = batches()
    run = trained(strategy(), data, capacity_factor=1.0)
    assert tfshard.verify(run.model, data[0]).ok
    reference = trained(None, data, capacity_factor=1.0).model
    x = data[0][0]
    np.testing.assert_allclose(run.model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-6)
    np.testing.assert_allclose(run.model(x).numpy(), reference(x).numpy(), atol=1e-6)


def test_a_saved_layer_is_the_same():
    options = {"top_k": 3, "gated": True, "use_bias": True, "capacity_factor": 1.5, "activation": "gelu"}
    made = model(**options)
    loaded = keras.Model.from_config(made.get_config())
    loaded.set_weights(made.get_weights())
    assert loaded.get_layer("mixture").get_config() == made.get_layer("mixture").get_config()
    x = batches(2)[0][0]
    np.testing.assert_array_equal(loaded(x), made(x))
    traced = tf.function(made, input_signature=[tf.TensorSpec((None, 6, WIDTH))])
    np.testing.assert_allclose(traced(x), made(x), rtol=1e-6)


def test_a_persistent_tape_differentiates_a_layer_twice():
    layer, x = tfshard.layers.MixtureOfExperts(EXPERTS, 4), tf.constant(batches(2)[0][0])
    layer.build(x.shape)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = layer(x)
    first, second = tape.gradient(y, x), tape.gradient(y, x, output_gradients=2 * tf.ones_like(y))
    assert np.abs(first).max() > 1e-3
    np.testing.assert_allclose(2 * first, second, rtol=1e-6)


def test_each_kernel_of_each_expert_draws_other_values_of_the_scale_of_a_dense_layer():
    layer = tfshard.layers.MixtureOfExperts(EXPERTS, 64, gated=True)
    layer.build((None, 64))
    kernels = [kernel for variable in layer.expert_weights for kernel in variable.numpy()]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels) == 3 * EXPERTS
    dense = keras.layers.Dense(64)
    dense.build((None, 64))
    np.testing.assert_allclose(np.std(kernels), np.std(dense.kernel.numpy()), rtol=0.05)


# --- what is refused


def test_an_expert_that_depends_on_the_number_of_its_tokens_is_refused():
    with pytest.raises(UnsupportedOperationError, match="an expert uses the number while the step is traced"):
        trained(strategy(), batches(8), activation=lambda x: x - keras.ops.mean(x, axis=0, keepdims=True))


def test_an_eager_step_is_refused():
    made = tfshard.as_distributed(model())
    made.compile("sgd", "mse", strategy=strategy(), run_eagerly=True)
    with pytest.raises(UnsupportedOperationError, match="in compiled steps.*Received: an eager step with layer 'mix"):
        made.train_on_batch(*batches(8)[0])


def dense_model():
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(4, name="out")(inputs))


REFUSED = {
    "experts must be True.*Received: experts=3": (model, {"experts": 3}),
    r"not a regular expression.*Received: experts='\('": (model, {"experts": "("}),
    "finds no mixture of experts": (dense_model, {}),
    r"match no variable: \['.*up_kernle'\]": (model, {"experts": ".*up_kernle"}),
    "must belong to a layer that sends tokens.*Received: 'out/kernel' of layer": (model, {"experts": "out/kernel"}),
    "has no batch axis": (model, {"mesh": {"model": 4}, "layout_map": {".*": ()}}),
    "does not allow. Use a mesh without an axis of replicas": (model, {"mesh": {"replica": 2, "batch": 2}}),
    "experts= does not work on a mesh with a context axis": (model, {"mesh": {"batch": 2, "context": 2}}),
    "the layout map has another layout": (
        model, {"mesh": {"batch": 2, "model": 2}, "layout_map": {"mixture/expert_up_kernel": (None, None, "model")}},
    ),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_before_device_work(message):
    build, options = REFUSED[message]
    with pytest.raises(StrategyError, match=message):
        tfshard.as_distributed(build()).compile("sgd", "mse", strategy=strategy(**options))


def test_the_batch_axis_must_divide_the_experts():
    inputs = keras.Input((WIDTH,))
    made = tfshard.as_distributed(keras.Model(inputs, tfshard.layers.MixtureOfExperts(6, 4, name="mixture")(inputs)))
    with pytest.raises(StrategyError, match="must divide the number of experts.*Received: 6 experts in 'mixture/"):
        made.compile("sgd", "mse", strategy=strategy())


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 0},
        {"hidden_dim": 1.5},
        {"top_k": EXPERTS + 1},
        {"capacity_factor": 0},
        {"load_balancing": -1.0},
        {"router_z": "no"},
    ],
    ids=str,
)
def test_bad_arguments_of_the_layer_are_refused(options):
    with pytest.raises(tfshard.errors.ShardingError, match=f"{next(iter(options))}.*Received"):
        tfshard.layers.MixtureOfExperts(**{"num_experts": EXPERTS, "hidden_dim": 8, **options})


def test_the_settings_of_experts_are_text():
    assert str(ExpertKind.from_option(True)) == "True"
    assert str(ExpertKind.from_option("a/.*")) == "('a/.*',)"
