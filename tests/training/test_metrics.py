"""Keras's metrics in steps: fit and evaluate match plain Keras, and refusals name the metric."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard
from built_in_losses import INPUTS, KINDS, MESHES, documented, fitted, keras_class, metric_outcomes, named

# Metrics that DTensor alone refuses.
ORDINARY = [
    ("yes or no", name)
    for name in ("auc", "auc_at", "precision_at_recall", "sensitivity_at_specificity", "binary_io_u")
] + [("one of four, by number", "mean_io_u")]
# Metrics that are computed without gathering what a model axis shards. Our functions must keep their masks.
MASKED = ("masked, one of four, by number", ("sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy"))


ALL = [(kind, name) for kind in KINDS for name in named(kind)]
# Keras raises the second warning for weights of counting metrics.
IGNORED = ("ignore:.*:tfshard.errors.LayoutWarning", "ignore:You are passing weight as `float`:UserWarning")
TAKEN = sweeps.taken("metrics", ALL, always=ORDINARY, sample=3)


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings(*IGNORED)
@sweeps.table(
    "kinds of metrics", ("kind", "mesh"), itertools.product(KINDS, MESHES),
    always={(kind, "batch4") for kind, _ in TAKEN} | {("yes or no", "model4")}, sample=1,
)  # fmt: skip
def test_metrics_of_fit_and_evaluate_are_those_of_plain_keras(kind: str, mesh: str):
    """Includes sample weights, masks, and a last batch that the batch axis does not divide."""
    names = [name for of_kind, name in TAKEN if of_kind == kind] or list(named(kind))[:4]
    assert metric_outcomes(kind, names, mesh) == dict.fromkeys(names, "right")


@pytest.mark.slow
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("mesh", ["batch2_model2", "model4"])
def test_metrics_that_leave_classes_sharded_keep_masks(mesh: str):
    kind, names = MASKED
    expected = fitted(kind, list(names), None)
    weighted, alone = (expected[f"{each}{names[0]}"] for each in ("weighted_", ""))
    assert abs(weighted - alone) > 1e-3, "premise: weights count"
    assert metric_outcomes(kind, list(names), mesh) == dict.fromkeys(names, "right")


def test_the_docs_list_every_metric():
    listed = {row.partition(", ")[2]: outcomes for row, outcomes in documented().items()}
    assert {f"{kind}: {name}" for kind, name in ALL} <= set(listed), "Write it again: python tests/built_in_losses.py"
    assert {len(outcomes) for outcomes in listed.values()} == {len(MESHES)}


def test_every_metric_of_keras_is_in_the_table():
    tried = {keras_class(metric) for kind in KINDS.values() for metric in kind.metrics()}
    classes = {name for name, value in vars(keras.metrics).items() if isinstance(value, type)}
    assert classes - tried == {"Metric"}


class Printing(keras.layers.Layer):
    def call(self, x):
        tf.print("the sum is", tf.reduce_sum(tf.ones_like(x)))
        return x


class Convolving(keras.layers.Layer):
    def call(self, x):
        return x + by_time(x)


class Spread(keras.metrics.Metric):
    def __init__(self, name: str):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(by_time(y_pred))

    def result(self):
        return self.total


class Calling(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), x.shape)


def by_time(x):
    """Depend on the time of day, which DTensor does not expand."""
    return tf.reduce_sum(x) * tf.cast(tf.timestamp(), tf.float32)


def compiled(layer: keras.Layer, loss="mse", metrics=None, **options) -> keras.Model:
    model = tfshard.Sequential([keras.Input((5,)), keras.layers.Dense(4), layer])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=1)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, strategy=strategy, **options)
    return model


LABELS = KINDS["numbers"].labels
REFUSED = {
    "layer": (lambda: compiled(Convolving(name="parts")), "layer 'parts' .Convolving., test_metrics.py:.* in "),
    "metric": (
        lambda: compiled(keras.layers.Identity(), metrics=[Spread("spread")]),
        "metric 'spread' .Spread., test_metrics.py:.* in ",
    ),
    "loss": (
        lambda: compiled(keras.layers.Identity(), loss=lambda y_true, y_pred: by_time(y_pred)),
        "'Timestamp'.* made by: loss '.*' .LossFunctionWrapper., test_metrics.py:.* in ",
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
