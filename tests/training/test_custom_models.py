"""Models of keras.io that cannot be called, and have a train_step that calls their inner models: a VAE and a GAN."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfshard

RS = np.random.RandomState(0)
X = RS.randn(22, 6).astype("float32")  # The last batch has 6 samples, which the devices do not divide.
NOISE = RS.randn(22, 2).astype("float32")  # Given as data: random layers draw other numbers than on one device.


def vae_class(base: type) -> type:
    class VAE(base):
        def __init__(self, encoder, decoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.decoder = decoder
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.kl_loss_tracker]

        def train_step(self, data):
            data, noise = data
            with tf.GradientTape() as tape:
                z_mean, z_log_var = self.encoder(data)
                reconstruction = self.decoder(z_mean + ops.exp(0.5 * z_log_var) * noise)
                kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
                kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
                total_loss = ops.mean(ops.sum((data - reconstruction) ** 2, axis=1)) + kl_loss
            grads = tape.gradient(total_loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.kl_loss_tracker.update_state(kl_loss)
            return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}

    return VAE


def vae(base: type) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu")(inputs)
    encoder = keras.Model(inputs, [layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)])
    latent = keras.Input((2,))
    decoder = keras.Model(latent, layers.Dense(6)(layers.Dense(8, activation="relu")(latent)), name="decoder")
    return vae_class(base)(encoder, decoder)


def gan_class(base: type) -> type:
    class GAN(base):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator

        def compile(self, d_optimizer, g_optimizer, loss_fn, **kwargs):
            super().compile(**kwargs)
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn
            self.d_loss_metric = keras.metrics.Mean(name="d_loss")
            self.g_loss_metric = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self):
            return [self.d_loss_metric, self.g_loss_metric]

        def train_step(self, data):
            real_images, noise = data
            batch_size = ops.shape(real_images)[0]
            combined = ops.concatenate([self.generator(noise), real_images], axis=0)
            labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(combined))
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(ops.zeros((batch_size, 1)), self.discriminator(self.generator(noise)))
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
            self.d_loss_metric.update_state(d_loss)
            self.g_loss_metric.update_state(g_loss)
            return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}

    return GAN


def gan(base: type) -> keras.Model:
    keras.utils.set_random_seed(0)
    discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.LeakyReLU(), layers.Dense(1)])
    generator = keras.Sequential([keras.Input((2,)), layers.Dense(8), layers.LeakyReLU(), layers.Dense(6)])
    return gan_class(base)(discriminator, generator)


def vae_options() -> dict:
    return {"optimizer": keras.optimizers.Adam(0.01)}


def gan_options() -> dict:
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizers = {"d_optimizer": keras.optimizers.Adam(0.01), "g_optimizer": keras.optimizers.RMSprop(0.02)}
    return {**optimizers, "loss_fn": loss_fn}


def compiled(build, options, way: str | None) -> keras.Model:
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    if way == "scope":
        with strategy.scope():
            model = build(keras.Model)
        model.compile(**options())
    elif way == "Model":
        model = build(tfshard.Model)
        model.compile(**options(), strategy=strategy)
    elif way == "as_distributed":
        model = tfshard.as_distributed(build(keras.Model))
        model.compile(**options(), strategy=strategy)
    else:
        model = build(keras.Model)
        model.compile(**options(), jit_compile=False)
    return model


def fit(model: keras.Model) -> dict:
    dataset = tf.data.Dataset.from_tensor_slices((X, NOISE)).batch(8)
    return model.fit(dataset, epochs=2, shuffle=False, verbose=0).history


# Each way with one of the models, and one way twice.
@pytest.mark.slow
@pytest.mark.parametrize(("build", "ways"), [(vae, ("scope", "Model")), (gan, ("as_distributed", "scope"))])
def test_a_model_of_models_trains_as_on_one_device_through_all_ways(build, ways):
    options = {vae: vae_options, gan: gan_options}[build]
    reference = compiled(build, options, None)
    expected = fit(reference)
    part = {vae: "decoder", gan: "generator"}[build]
    expected_part = getattr(reference, part).predict(NOISE, verbose=0)
    for way in ways:
        model = compiled(build, options, way)
        history = fit(model)
        used = [model.optimizer] if build is vae else [model.d_optimizer, model.g_optimizer]
        variables = model.weights + [v for metric in model.metrics for v in metric.variables]
        variables += [v for optimizer in used for v in optimizer.variables]
        assert all(isinstance(v.value, tfshard.storage.ShardedVariable) for v in variables), way
        assert all("batch" in v.value.layout.storage for v in model.trainable_weights), way
        assert history.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(history[key], values, atol=2e-5, err_msg=f"{way} {key}")
        for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=way)
        # A part alone, by Keras's predict, uses the current values.
        np.testing.assert_allclose(getattr(model, part).predict(NOISE, verbose=0), expected_part, atol=2e-5)
        getattr(model, part).set_weights([0 * weight for weight in getattr(model, part).get_weights()])
        assert np.all(getattr(model, part).predict(NOISE, verbose=0) == 0)


def test_an_encoder_that_draws_predicts_by_itself():
    """Keras's predict writes its seed generator, which is on the mesh."""

    class Sampling(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, inputs):
            return inputs + keras.random.normal(ops.shape(inputs), seed=self.seed_generator)

    def run(strategy):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        encoder = keras.Model(inputs, Sampling()(layers.Dense(4)(inputs)))
        outer = tfshard.as_distributed(keras.Sequential([encoder, layers.Dense(2)]))
        outer.compile("sgd", "mse", strategy=strategy)
        assert isinstance(encoder.layers[-1].seed_generator.state.value, tfshard.storage.ShardedVariable) == bool(
            strategy
        )
        return [encoder.predict(X, batch_size=11, verbose=0) for _ in range(2)]

    ours, theirs = run(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))), run(None)
    assert np.abs(theirs[0] - theirs[1]).max() > 0.1, "premise: each call draws others"
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
