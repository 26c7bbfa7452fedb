"""Keras's metrics in steps: fit and evaluate give the values of plain Keras; what is refused is refused by name."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard
from built_in_losses import INPUTS, KINDS, MESHES, documented, fitted, named

# What DTensor by itself refuses of them.
ORDINARY = [
    ("yes or no", name)
    for name in ("auc", "auc_at", "precision_at_recall", "sensitivity_at_specificity", "binary_io_u")
] + [("one of four, by number", "mean_io_u")]


ALL = [(kind, name) for kind in KINDS for name in named(kind)]
TAKEN = sweeps.taken("metrics", ALL, always=ORDINARY, sample=2)


@pytest.mark.filterwarnings("ignore:.*:tfshard.errors.LayoutWarning")
@sweeps.table(
    "kinds of metrics", ("kind", "mesh"), itertools.product(KINDS, MESHES), sample=1,
    always={(kind, "batch4") for kind, _ in TAKEN},
)  # fmt: skip
def test_metrics_of_fit_and_evaluate_are_those_of_plain_keras(kind: str, mesh: str):
    names = [name for of_kind, name in TAKEN if of_kind == kind] or list(named(kind))
    expected, values = fitted(kind, names, None), fitted(kind, names, mesh)
    assert values.keys() == expected.keys() and len(values) >= 4, "loss and a metric, of fit and of evaluate"
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_docs_list_every_metric():
    listed = {row.partition(", ")[2] for row in documented()}
    assert {f"{kind}: {name}" for kind, name in ALL} <= listed, "Write it again: python tests/built_in_losses.py"


def test_every_metric_of_keras_is_in_the_table():
    tried = {type(metric).__name__ for *_, metrics in KINDS.values() for metric in metrics(keras.metrics)}
    classes = {name for name, value in vars(keras.metrics).items() if isinstance(value, type)}
    assert classes - tried == {"Metric", "Mean", "Sum", "MeanMetricWrapper"}


class Printing(keras.layers.Layer):
    def call(self, x):
        tf.print("the sum is", tf.reduce_sum(tf.ones_like(x)))
        return x


class Convolving(keras.layers.Layer):
    def call(self, x):
        return x + over_samples(x)


class Spread(keras.metrics.Metric):
    def __init__(self, name: str):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(over_samples(y_pred))

    def result(self):
        return self.total


class Calling(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), x.shape)


def over_samples(x):
    """A convolution over the batch."""
    return tf.reduce_sum(tf.nn.conv1d(x[None], tf.ones((3, x.shape[-1], 1)), 1, "SAME"))


def compiled(layer: keras.Layer, loss="mse", metrics=None, **options) -> keras.Model:
    model = tfshard.Sequential([keras.Input((5,)), keras.layers.Dense(4), layer])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=1)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, strategy=strategy, **options)
    return model


LABELS = KINDS["numbers"][3]
REFUSED = {
    "layer": (lambda: compiled(Convolving(name="parts")), "layer 'parts' .Convolving., test_metrics.py:.* in "),
    "metric": (
        lambda: compiled(keras.layers.Identity(), metrics=[Spread("spread")]),
        "metric 'spread' .Spread., test_metrics.py:.* in ",
    ),
    "loss": (
        lambda: compiled(keras.layers.Identity(), loss=lambda y_true, y_pred: over_samples(y_pred)),
        "'Conv2D'.* made by: loss '.*' .LossFunctionWrapper., test_metrics.py:.* in ",
    ),
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_refused_operation_is_told_with_who_made_it_and_the_line(place: str):
    build, message = REFUSED[place]
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=message):
        build().fit(INPUTS, LABELS, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("layer", "message"), [(Printing, "tf.print: every device would print"), (Calling, "a Python function")]
)
def test_print_and_python_functions_in_a_compiled_step_are_refused_by_layer_and_line(layer: type, message: str):
    with pytest.raises(
        tfshard.errors.UnsupportedOperationError, match=f"{message}.*layer 'mine' .*test_metrics.py:.* in call"
    ):
        compiled(layer(name="mine")).fit(INPUTS, LABELS, batch_size=8, verbose=0)


def test_print_in_an_eager_step_prints_the_global_value_once(capfd):
    compiled(Printing(), run_eagerly=True).fit(INPUTS, LABELS, batch_size=8, verbose=0)
    assert capfd.readouterr().err.count("the sum is 32") == 3
