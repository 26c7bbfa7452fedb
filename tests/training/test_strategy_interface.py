"""The strategy has all members that TensorFlow, Keras and KerasTuner call, with the parameters of other strategies."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, input_lib, mirrored_strategy

import tfshard
from tfshard.training import hooks

EXTENDED = (distribute_lib.StrategyExtendedV2, distribute_lib.StrategyExtendedV1, mirrored_strategy.MirroredExtended)
INTERFACES = {
    "strategy": (tfshard.ShardedStrategy, (tf.distribute.Strategy, tf.distribute.MirroredStrategy)),
    "extended": (hooks.ShardedExtended, EXTENDED),
    "replica context": (hooks._ReplicaContext, (tf.distribute.ReplicaContext,)),
    "value context": (hooks._ValueContext, (tf.distribute.experimental.ValueContext,)),
}
# Members for MirroredStrategy's internal work, and for TensorFlow 1's sessions and input functions.
INTERNAL = {
    "_get_cross_device_ops",
    "_get_variable_creator_initial_value",
    "_initialize_multi_worker",
    "_initialize_single_worker",
    "_initialize_strategy",
    "_input_workers",
    "_input_workers_with_options",
    "_make_collective_ops_with_fallbacks",
    "_make_input_fn_iterator",
    "_collective_key_base",
    "_experimental_make_numpy_dataset",
    "_experimental_run_steps_on_iterator",
    "experimental_make_numpy_dataset",
    "experimental_run_steps_on_iterator",
}


def kind(cls: type, name: str) -> str:
    found = inspect.getattr_static(cls, name)
    return "method" if inspect.isroutine(found) else "attribute"


def members(cls: type) -> list[str]:
    names = [name for name in dir(cls) if not name.startswith("__") and not name.startswith("_tf_api")]
    return [name for name in names if name not in INTERNAL]


CASES = [
    (what, theirs, name) for what, (_, classes) in INTERFACES.items() for theirs in classes for name in members(theirs)
]


def test_each_member_of_tensorflows_strategies_is_there_and_is_called_alike():
    assert len(CASES) > 100, "premise"
    problems = []
    for what, theirs, name in CASES:
        ours, where = INTERFACES[what][0], f"{what}.{name} of {theirs.__name__}"
        if not hasattr(ours, name):
            problems.append(f"{where} is missing")
        elif kind(ours, name) != kind(theirs, name):
            problems.append(f"{where} is no {kind(theirs, name)}")
        elif kind(theirs, name) == "method" and theirs is not mirrored_strategy.MirroredExtended:  # It renames some.
            problems += differences(where, getattr(theirs, name), getattr(ours, name))
    assert not problems, "\n".join(problems)


def differences(where: str, theirs, ours) -> list[str]:
    """Return the calls that a method of TensorFlow accepts and ours does not."""
    if inspect.unwrap(ours) is inspect.unwrap(theirs):
        return []
    expected, found = (inspect.signature(each).parameters for each in (theirs, ours))
    if any(each.kind is each.VAR_KEYWORD for each in found.values()):
        found_names = None
    else:
        found_names = list(found)
    problems = []
    for place, parameter in enumerate(expected.values()):
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if found_names is not None and (
            parameter.name not in found_names or found_names.index(parameter.name) != place
        ):
            problems.append(f"{where}: parameter {place} is '{parameter.name}'. Received: {found_names}")
        elif parameter.default is not parameter.empty and parameter.name in found:
            if found[parameter.name].default is parameter.empty:
                problems.append(f"{where}: '{parameter.name}' has a default")
    return problems


def strategy() -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))


def test_values_of_the_interface_say_that_there_is_one_replica_and_one_worker():
    chosen = strategy()
    extended, ones = chosen.extended, np.ones((4, 2), "float32")
    assert extended._in_multi_worker_mode() is False
    assert extended._global_batch_size is True
    assert extended._get_replica_id_in_sync_group(0) == extended._get_local_replica_id(0) == 0
    assert len(extended.worker_devices) == 4, "premise"
    assert extended.worker_devices_by_replica == (extended.worker_devices,)
    assert not input_lib._enable_get_next_as_optional(chosen, tf.data.Dataset.range(4).batch(2), -2)
    for value in (
        extended.broadcast_to(tf.constant(ones), ["CPU:0"]),
        extended._gather_to(tf.constant(ones), ["CPU:0"], 0),
        extended.reduce_to("SUM", tf.constant(ones), "CPU:0"),
        extended.batch_reduce_to("SUM", [(tf.constant(ones), "CPU:0")])[0],
    ):
        np.testing.assert_array_equal(value, ones)
    with chosen.scope():
        count = tf.Variable(1.0)
    extended.update_non_slot(count, lambda: count.assign_add(2.0))
    assert float(count) == 3.0
    dataset = extended._experimental_distribute_dataset(tf.data.Dataset.from_tensors(ones), None)
    assert [tuple(batch.shape) for batch in dataset] == [(4, 2)]


def test_the_context_of_a_replica_reduces_gathers_and_updates():
    chosen = strategy()
    with chosen.scope():
        count = tf.Variable(1.0, name="count")

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.reduce_sum(x))
        same = chosen.extended._replica_ctx_all_reduce("SUM", total)
        chosen.extended._replica_ctx_update(count, lambda v, by: v.assign_add(by), args=(1.0,), group=True)
        return total, same, context.all_gather(x, axis=0), context.replica_id_in_sync_group

    total, same, gathered, _ = chosen.run(tf.function(step), args=(np.ones((8, 2), "float32"),))
    assert float(total) == float(same) == 16.0
    assert gathered.shape == (8, 2)
    assert float(count) == 2.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_keras_tuner_searches_with_a_strategy(tmp_path):
    """Searches with `distribution_strategy=`, and with models compiled with `strategy=`."""
    keras_tuner = pytest.importorskip("keras_tuner")
    chosen = strategy()
    x = np.random.RandomState(0).normal(size=(32, 4)).astype("float32")

    def build(hp, **options):
        model = tfshard.Sequential(
            [keras.Input((4,)), keras.layers.Dense(hp.Int("units", 4, 12, 4)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", **options)
        return model

    for name, options, compiled in (
        ("distribution", {"distribution_strategy": chosen}, {}),
        ("compile", {}, {"strategy": chosen}),
    ):
        tuner = keras_tuner.RandomSearch(
            lambda hp, compiled=compiled: build(hp, **compiled),
            objective="val_loss", max_trials=2, directory=tmp_path, project_name=name, seed=1, **options,
        )  # fmt: skip
        tuner.search(x, x[:, :1], validation_data=(x, x[:, :1]), epochs=2, batch_size=8, verbose=0)
        (best,) = tuner.get_best_models(1)
        assert isinstance(best.layers[0].kernel.value, tfshard.storage.ShardedVariable)
        np.testing.assert_allclose(
            best.evaluate(x, x[:, :1], batch_size=8, verbose=0), tuner.oracle.get_best_trials(1)[0].score, rtol=1e-4
        )
