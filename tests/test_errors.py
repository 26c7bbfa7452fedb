"""Bad input raises a typed error with fault, choices and fix before any device work, and the process can go on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard


def build() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(12, name="up"), keras.layers.Dense(10, name="down")],
        name="mlp",
    )


def strategy(layout_map=None, stage=3, **axes) -> tfshard.ShardedStrategy:
    """Return a strategy with a layout map that replicates all other variables over the model axis."""
    if layout_map is None or isinstance(layout_map, dict):
        layout_map = tfshard.LayoutMap(layout_map)
        layout_map.replicated(".*")
    return tfshard.ShardedStrategy(
        tfshard.create_mesh(**(axes or {"batch": 2, "model": 2})), layout_map, zero_stage=stage
    )


def compile_with(layout_map) -> keras.Model:
    model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=strategy(layout_map))
    return model


@pytest.fixture(autouse=True)
def the_process_stays_usable():
    yield
    model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=strategy())
    assert np.isfinite(model.train_on_batch(np.ones((4, 6)), np.ones((4, 10))))


def test_axis_not_in_the_mesh():
    with pytest.raises(
        tfshard.errors.LayoutError,
        match=r"Axis 'modle' is not in the mesh. Mesh axes: \('batch', 'model'\).*'.*up/kernel'",
    ):
        strategy({".*up/kernel": (None, "modle")})


def test_mesh_larger_than_the_devices():
    with pytest.raises(tfshard.errors.MeshError, match="needs 64 devices, but only 4 CPU devices exist"):
        tfshard.create_mesh(batch=64)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "axes", [{}, {"batch": 0}, {"batch": -1, "model": -1}, {"batch": 2.0}, {"batch": -1, "model": 3}]
)
def test_mesh_that_cannot_exist(axes):
    with pytest.raises(tfshard.errors.MeshError, match="Received"):
        tfshard.create_mesh(**axes)


@pytest.mark.parametrize(
    ("given", "meant"),
    [((4,), "batch=4"), ((2, 2), "batch=2, model=2"), (([4, 1],), "batch=4, model=1"), (({"dp": 4},), "dp=4"),
     (("batch",), "batch=4")],
)  # fmt: skip
def test_sizes_of_a_mesh_without_names_are_refused_with_the_call_that_is_meant(given, meant):
    with pytest.raises(tfshard.errors.MeshError, match=rf"such as create_mesh\({meant}\)\. Received: create_mesh"):
        tfshard.create_mesh(*given)


def test_dim_that_does_not_divide_leaves_the_model_as_it_was():
    model = tfshard.as_distributed(build())
    before = model.get_weights()
    wrong = strategy({"mlp/down/kernel": (None, "model")}, batch=1, model=4)
    with pytest.raises(
        tfshard.errors.LayoutError,
        match=r"(?s)Axis 'model' of size 4 does not divide dim 1 of 'mlp/down/kernel'.*size 10",
    ):
        model.compile("sgd", "mse", strategy=wrong)
    assert not any(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.variables)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_pattern_that_matches_nothing():
    with pytest.raises(
        tfshard.errors.LayoutError,
        match=r"(?s)does not fit model 'mlp'.*nothing/kernel: it matches no variable.*mlp/up/kernel",
    ):
        compile_with({"nothing/kernel": (None, "model")})
    layout_map = tfshard.LayoutMap()
    layout_map.add("nothing/kernel", (None, "model"), optional=True)
    layout_map.column("none/.*", optional=True)
    layout_map.replicated(".*")
    tfshard.as_distributed(build()).compile(
        "sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
    )


def test_variable_matched_twice():
    with pytest.raises(tfshard.errors.LayoutError, match="mlp/up/kernel: two rules for one weight"):
        compile_with({".*up/kernel": (None, "model"), ".*kernel": ("model", None)})


def test_layout_longer_than_the_rank():
    with pytest.raises(
        tfshard.errors.LayoutError, match=r"'mlp/up/bias' has more dims than the variable.*shape=\(12,\)"
    ):
        compile_with({".*up/bias": ("model", None)})


def test_an_axis_twice_in_one_layout():
    with pytest.raises(tfshard.errors.LayoutError, match="An axis can shard only one dim"):
        compile_with({".*up/kernel": ("model", "model")})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [4, -1, "3", True, None])
def test_unknown_stage(stage):
    with pytest.raises(tfshard.errors.StrategyError, match="Unknown ZeRO stage. Stages: 0"):
        strategy(stage=stage)


def test_a_stage_of_another_type_is_refused_with_the_right_type():
    with pytest.raises(tfshard.errors.StrategyError, match="Received: zero_stage='3'. Give an integer"):
        strategy(stage="3")


MEASURING = {
    "report": lambda s, m: s.report(m),
    "sync_stats": lambda s, m: s.sync_stats(m),
    "check_consistency": lambda s, m: s.check_consistency(m),
}


@pytest.mark.parametrize("method", MEASURING)
def test_a_model_of_which_nothing_is_on_the_mesh_is_not_measured(method):
    chosen, measure = strategy(batch=4), MEASURING[method]
    with pytest.raises(tfshard.errors.StrategyError, match=r"'late' is not built.*model.build\(input_shape\)"):
        measure(chosen, keras.Sequential([keras.layers.Dense(4)], name="late"))
    plain = build()
    plain.compile("adam", "mse")
    for model in (build(), plain):
        with pytest.raises(tfshard.errors.StrategyError, match=rf"strategy\.{method} measures .* 'mlp' is on them"):
            measure(chosen, model)


def test_a_report_says_what_is_missing():
    chosen = strategy(batch=4)
    with chosen.scope():
        model = build()
    report = chosen.report(model)
    assert report.bytes_per_device("parameter") > 0 == report.bytes_per_device("slot")
    assert "is not compiled, so it has no optimizer slots yet" in str(report) and report.notes
    assert "is not compiled" in report.summary()
    with chosen.scope():
        model.compile("adam", "mse")
    assert "The optimizer creates its slots in the first training step" in str(chosen.report(model))
    model.train_on_batch(np.ones((4, 6)), np.ones((4, 10)))
    report = chosen.report(model)
    assert report.notes == () and report.bytes_per_device("slot") > report.bytes_per_device("parameter")


def test_model_built_under_another_strategy():
    model = compile_with(None)
    with pytest.raises(tfshard.errors.StrategyError, match="under another strategy"):
        strategy(batch=4).report(model)
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        other = build()
    with pytest.raises(tfshard.errors.StrategyError, match="under another strategy.*MirroredStrategy"):
        tfshard.as_distributed(other).compile("sgd", "mse", strategy=strategy())
    with pytest.raises(tfshard.errors.StrategyError, match="must be a tfshard.ShardedStrategy"):
        tfshard.as_distributed(build()).compile("sgd", "mse", strategy=mirrored)


def test_initialize_again_with_other_arguments():
    assert tfshard.initialize() == tfshard.initialize(num_devices=4) == tfshard.initialize(4, "cpu")
    with pytest.raises(tfshard.errors.InitializationError, match="already started with Runtime"):
        tfshard.initialize(num_devices=2)
    with pytest.raises(tfshard.errors.InitializationError, match="Unknown device type. Device types"):
        tfshard.initialize(device_type="NPU")


def test_layer_that_cannot_be_expanded_names_itself_and_the_remedy():
    model = tfshard.as_distributed(
        keras.Sequential([keras.Input((8, 8, 3)), keras.layers.RandomElasticTransform(name="elastic")])
    )
    with pytest.raises(tfshard.errors.UnsupportedLayerError, match=r"'elastic' \(RandomElastic.*random_map"):
        model.compile("sgd", "mse", strategy=strategy())


def test_wrong_types():
    with pytest.raises(tfshard.errors.StrategyError, match="as_distributed takes a keras.Model"):
        tfshard.as_distributed("model")
    with pytest.raises(tfshard.errors.MeshError, match="must come from tfshard.create_mesh"):
        tfshard.ShardedStrategy({"batch": 4})
    with pytest.raises(tfshard.errors.LayoutError, match="layout_map must be"):
        strategy(layout_map=3)
    with pytest.raises(tfshard.errors.LayoutError, match="A layout is a tuple"):
        tfshard.LayoutMap({".*": "model"})
    with pytest.raises(tfshard.errors.LayoutError, match="not a regular expression"):
        tfshard.LayoutMap({"(": (None,)})


def test_ragged_batches_are_refused():
    chosen = strategy()
    with pytest.raises(tfshard.errors.StrategyError, match="Ragged batches cannot"):
        chosen.run(lambda x: x, args=(tf.ragged.constant([[1], [2, 3]]),))


def test_an_operation_that_dtensor_refuses_is_named_and_the_process_goes_on():
    def by_time(t):
        return t * tf.cast(tf.timestamp(), tf.float32)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Lambda(by_time)])
    model.compile("sgd", "mse", strategy=strategy)
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=r"operation 'Timestamp'"):
        model.train_on_batch(np.ones((8, 4)), np.ones((8, 4)))
    model = tfshard.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", strategy=strategy)
    assert np.isfinite(model.train_on_batch(np.ones((8, 4)), np.ones((8, 4))))


def test_a_tf_function_around_a_step_says_where_its_batches_and_its_loop_belong():
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    dataset = chosen.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(np.ones((8, 4), "f")).batch(8))
    with chosen.scope():
        kernel = tf.Variable(np.ones((4, 2), "float32"))
    step = tf.function(lambda x: chosen.run(lambda x: tf.reduce_sum(x @ kernel), args=(x,)))
    for batch in (np.ones((8, 4), "float32"), tf.ones((8, 4))):
        with pytest.raises(
            tfshard.errors.StrategyError, match="batch that is not on the mesh. Take its batches from strategy.ex"
        ):
            step(batch)
    assert [float(step(batch)) for batch in dataset] == [64.0]
    for over in (lambda data: [step(batch) for batch in data], lambda data: step(next(data))):
        with pytest.raises(tfshard.errors.StrategyError, match="iterated in Python, not inside a tf.function"):
            tf.function(over)(iter(dataset))
