"""`check_consistency(model, batch)` compares the gradients of devices, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = X[:, :4].copy()
MESHES = {"batch=4": {"batch": 4}, "batch=2 x model=2": {"batch": 2, "model": 2}}


class Faulty(keras.layers.Layer):
    """Multiplies by a scale. If `faulty`, each device adds its number to the gradient of the scale."""

    def __init__(self, *, faulty: bool, **kwargs):
        super().__init__(**kwargs)
        self.faulty = faulty

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        @tf.custom_gradient
        def read(scale):
            def gradient(upstream):
                if not self.faulty:
                    return upstream
                add = tfshard.local_map(lambda g, i: g + i, in_layouts=[(), ("batch",)], out_layouts=[()])
                return add(upstream, tf.range(4.0))

            return tf.identity(scale), gradient

        return x * read(tf.convert_to_tensor(self.scale))


def compiled(mesh, *, stage=0, faulty=False, **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(16, "relu", name="first"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
        Faulty(faulty=faulty, name="faulty"), keras.layers.Dense(4, name="last"),
    ]  # fmt: skip
    model = tfshard.Sequential([keras.Input((8,)), *layers], name="chain")
    layout_map = (
        tfshard.LayoutMap({})
        if "model" not in mesh
        else tfshard.LayoutMap({"chain/first/kernel": (None, "model"), "chain/last/kernel": ("model", None)})
    )
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map, zero_stage=stage, **options)
    model.compile("adam", "mse", metrics=["mae"], strategy=strategy)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_a_correct_model_pass_and_its_state_stays(mesh, stage):
    model = compiled(MESHES[mesh], stage=stage, microbatches=2)
    model.train_on_batch(X, Y)
    before = model.get_weights(), [np.array(v) for v in model.optimizer.variables], model.get_metrics_result()
    model.distribute_strategy.check_consistency(model, (X, Y))
    after = model.get_weights(), [np.array(v) for v in model.optimizer.variables], model.get_metrics_result()
    keras.tree.map_structure(np.testing.assert_array_equal, before, after)
    assert model.distribute_strategy.microbatches == 2
    # The next step is that of a model that was not checked, with the same dropout mask.
    other = compiled(MESHES[mesh], stage=stage, microbatches=2)
    other.train_on_batch(X, Y)
    model.reset_metrics()
    other.reset_metrics()
    assert float(model.train_on_batch(X, Y)[0]) == float(other.train_on_batch(X, Y)[0])


@pytest.mark.parametrize("analyzer", [None, tfshard.ParameterAnalyzer()], ids=["alone", "grouped"])
def test_a_gradient_that_differs_between_devices_is_named_with_its_values(analyzer):
    model = compiled(MESHES["batch=4"], faulty=True, analyzer=analyzer)
    strategy = model.distribute_strategy
    # Premise: the variables are equal, and the step runs.
    strategy.check_consistency(model)
    with pytest.raises(tfshard.errors.ConsistencyError) as caught:
        strategy.check_consistency(model, (X, Y))
    assert "The gradient of variable 'chain/faulty/scale' should be the same on all devices" in str(caught.value)
    values = dict(part.split(" has ") for part in str(caught.value).split("device ") if " has " in part)
    numbers = [float(value.partition(",")[0].partition(". ")[0]) for value in values.values()]
    assert list(values) == [f"CPU:{number}" for number in range(4)]
    np.testing.assert_allclose(np.subtract(numbers, numbers[0]), range(4), atol=1e-5)


def test_a_batch_without_targets_and_a_model_without_loss_are_refused():
    model = compiled(MESHES["batch=4"])
    with pytest.raises(tfshard.errors.StrategyError, match="its step needs targets. Give check_consistency"):
        model.distribute_strategy.check_consistency(model, X)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        bare = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(tfshard.errors.StrategyError, match="compiled model.*which is not compiled"):
        strategy.check_consistency(bare, (X, Y))
