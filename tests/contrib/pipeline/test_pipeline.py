"""Models on a pipeline match one device."""

import functools
import gc
import threading
import weakref

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.framework.func_graph import FuncGraph

import parity
import recomputed
import tfshard
from tfshard.contrib.pipeline import runner
from tfshard.contrib.pipeline.models import pipeline_of
from tfshard.devices import transfer
from tfshard.errors import MeshError, StrategyError

layers = keras.layers
RS = np.random.RandomState(0)
X = RS.normal(size=(32, 8)).astype("float32")
Y = RS.randint(0, 3, 32)
TOKENS = RS.randint(1, 10, (32, 6))
TOKENS[:, 4:] *= RS.randint(0, 2, (32, 2))
TAGS = RS.randint(0, 3, (32, 6))
WEIGHTS = RS.uniform(size=32).astype("float32")
ENTROPY = "sparse_categorical_crossentropy"
TWO = {"pipeline": 2, "batch": 2}


def mlp():
    hidden = [layers.Dense(16, activation="gelu", name=f"dense_{number}") for number in range(3)]
    return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(3, activation="softmax", name="top")])


def skips():
    inputs = keras.Input((8,))
    a = layers.Dense(8, activation="tanh", name="a")(inputs)
    b = layers.Dense(8, activation="tanh", name="b")(a)
    c = layers.Add()([a, layers.Dense(8, name="c")(b)])
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="d")(layers.Concatenate()([c, inputs, a])))


def masked():
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(10, 8, mask_zero=True)(tokens)
    hidden = layers.Dense(8, activation="tanh", name="middle")(layers.LSTM(8, return_sequences=True)(hidden))
    hidden = layers.LSTM(8, return_sequences=True)(hidden)
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(hidden))


def regularized():
    norm = keras.regularizers.L2(0.1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, kernel_regularizer=norm),
            layers.ActivityRegularization(l2=0.3),
            layers.Dense(8, activation="tanh", name="middle"),
            layers.Dense(3, kernel_regularizer=norm, activation="softmax"),
        ]
    )


def two_outputs():
    inputs = keras.Input((8,))
    a = layers.Dense(8, activation="tanh")(inputs)
    one = layers.Dense(3, activation="softmax", name="one")(a)
    b = layers.Dense(8, activation="tanh", name="middle")(a)
    return keras.Model(inputs, [one, layers.Dense(3, activation="softmax", name="two")(b)])


def tied():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=16,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone)


def adam(**settings):
    return lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, **settings)


# The model, the stages, the mesh, and other differences of each training.
CASES = {
    "stage 3": {},
    "stage 0": {"zero_stage": 0},
    "gpipe": {"schedule": "gpipe", "zero_stage": 2},
    "interleaved": {"stages": 4, "schedule": "interleaved"},
    "four ranks of one device": {"stages": 4, "mesh": {"pipeline": 4}},
    "ranks last in the mesh": {"mesh": {"batch": 2, "pipeline": 2}},
    "an axis with another name": {"mesh": {"pp": 2, "dp": 2}, "roles": {"pp": "pipeline", "dp": "data"}},
    "tensor-parallel": {"mesh": {"pipeline": 2, "model": 2}, "strategy": {"layout_map": "auto"}},
    "batches that are not divided": {"rows": 30, "batch_size": 15},
    "interleaved, not divided": {"rows": 30, "batch_size": 15, "stages": 4, "schedule": "interleaved"},
    "skips": {"build": skips, "stages": ["c"]},
    "skips over ranks": {"build": skips, "stages": ["b", "c", "d"], "mesh": {"pipeline": 4}},
    "masks": {"build": masked, "stages": ["middle"], "x": TOKENS, "y": TAGS, "embeds": True},
    "masks and weights": {
        "build": masked, "stages": ["middle"], "x": TOKENS, "y": TAGS, "embeds": True,
        "weights": RS.uniform(size=(32, 6)).astype("float32"),
        "loss": lambda: keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
    },
    "regularizers": {"build": regularized, "stages": ["middle"]},
    "two outputs": {
        "build": two_outputs, "stages": ["middle"], "y": [Y, Y], "loss": lambda: [ENTROPY] * 2, "metrics": None,
    },
    "a table that is the last matrix": {
        "build": tied, "stages": 2, "x": {"token_ids": TOKENS, "padding_mask": (TOKENS > 0).astype("int32")},
        "y": TOKENS, "loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    "a table that is the last matrix, tensor-parallel": {
        "build": tied, "stages": 2, "x": {"token_ids": TOKENS, "padding_mask": (TOKENS > 0).astype("int32")},
        "y": TOKENS, "loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "mesh": {"pipeline": 2, "model": 2}, "strategy": {"layout_map": "auto"},
    },
    "clipped by the norm of all": {"optimizer": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1)},
    "a table clipped by the norm of all": {
        "build": tied, "stages": 2, "x": {"token_ids": TOKENS, "padding_mask": (TOKENS > 0).astype("int32")},
        "y": TOKENS, "loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1), "embeds": True,
    },
    "averages": {"optimizer": adam(use_ema=True, ema_overwrite_frequency=3, clipnorm=0.5)},
    "sums of steps": {"optimizer": adam(gradient_accumulation_steps=2)},
    "a schedule of rates": {
        "optimizer": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.CosineDecay(0.01, 10))
    },
    "factored slots": {"optimizer": lambda: keras.optimizers.Adafactor(0.01)},
    "slots of all": {"optimizer": lambda: keras.optimizers.Nadam(0.01)},
    "weighted": {"weights": WEIGHTS, "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9)},
}  # fmt: skip


def run(case, strategy=None):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    rows = case.get("rows", 32)
    cut = functools.partial(keras.tree.map_structure, lambda array: array[:rows])
    x, y = cut(case.get("x", X)), cut(case.get("y", Y))
    weights, batch_size = case.get("weights"), case.get("batch_size", 16)
    model, settings = case.get("build", mlp)(), {}
    if strategy is not None:
        model = tfshard.pipeline(model, case.get("stages", 2), microbatches=4, schedule=case.get("schedule", "1f1b"))
        settings["strategy"] = strategy
    optimizer = case.get("optimizer", adam())()
    if strategy is None and case.get("embeds"):
        parity.dense_gradients(optimizer)
    metrics = case.get("metrics", ["accuracy"])
    model.compile(optimizer, case.get("loss", lambda: ENTROPY)(), metrics=metrics, weighted_metrics=[], **settings)
    given = {"batch_size": batch_size, "sample_weight": weights, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **given).history
    return {
        "history": history,
        "evaluated": model.evaluate(x, y, return_dict=True, **given),
        "predicted": model.predict(x, batch_size=batch_size, verbose=0),
        "weights": model.get_weights(),
        "slots": [variable.numpy() for variable in optimizer.variables],
        "model": model,
    }


def strategy_of(case):
    mesh = tfshard.create_mesh(**case.get("mesh", TWO), roles=case.get("roles"))
    return tfshard.ShardedStrategy(mesh, zero_stage=case.get("zero_stage", 3), **case.get("strategy", {}))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_one_device(name):
    case = CASES[name]
    expected, found = run(case), run(case, strategy_of(case))
    pipeline = pipeline_of(found["model"])
    homes = {variable.value.mesh.to_string() for variable in found["model"].trainable_variables}
    assert len(homes) == len(pipeline.ranks) > 1, "premise: variables are on several meshes"
    assert pipeline.measured.schedule.microbatches > 1
    for what in ("history", "evaluated", "predicted", "weights", "slots"):
        pairs = zip(keras.tree.flatten(expected[what]), keras.tree.flatten(found[what]), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6, err_msg=what)
    assert pipeline.measured.in_flight == pipeline.measured.schedule.in_flight, "as much is kept as the schedule says"


# --- State and random numbers


@pytest.mark.slow
def nested():
    """Return a model of nested models, which the cut opens: a pipeline calls their layers only."""
    inputs = keras.Input((8,))
    hidden = inputs
    for number in range(4):
        inside = keras.Input((8,))
        wide = layers.Dense(32, activation="gelu", name=f"up_{number}")(inside)
        inner = layers.Dense(8, name=f"down_{number}")(layers.Dropout(0.2, seed=number)(wide))
        hidden = keras.Model(inside, inner, name=f"body_{number}")(hidden)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="top")(hidden))


@pytest.mark.slow
@pytest.mark.parametrize(("build", "stages"), [(mlp, ["dense_2"]), (nested, ["up_2"])])
def test_blocks_of_a_pipelined_model_are_recomputed_with_the_same_numbers(build, stages):
    keras.utils.set_random_seed(0)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**TWO))
    models = [tfshard.pipeline(build(), stages=stages, microbatches=2) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), ENTROPY, strategy=strategy)
    with recomputed.added_operations() as copied:
        losses = [[float(model.train_on_batch(X, Y))] for model in models]
        assert not any(copied), "premise"
        # After the first step: the compiled functions without blocks must go.
        blocks = strategy.recompute(models[1], r"(?:.*/)?(dense|body)_(\d)" if build is mlp else r"(?:.*/)?(body)_(\d)")
        assert len(blocks) == (3 if build is mlp else 4)
        for model, own in zip(models, losses, strict=True):
            copied.clear()
            own += [float(model.train_on_batch(X, Y)) for _ in range(2)]
            # One function of each stage has a backward pass.
            assert sum(each > 0 for each in copied) == (2 if model is models[1] else 0)
    assert losses[0][0] == losses[1][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_a_compiled_model_is_freed_with_its_pipeline():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**TWO))

    def graphs():
        gc.collect()
        return sum(isinstance(each, FuncGraph) for each in gc.get_objects())

    def train():
        model = tfshard.pipeline(mlp(), stages=["dense_2"], microbatches=2)
        model.compile(keras.optimizers.Adam(0.01), ENTROPY, strategy=strategy)
        model.fit(X, Y, batch_size=16, verbose=0)
        model.predict(X, verbose=0)
        assert pipeline_of(model).model is model and graphs() > before, "premise"
        return weakref.ref(model), weakref.ref(pipeline_of(model))

    before = graphs()
    model, pipeline = train()
    assert graphs() <= before
    assert model() is None and pipeline() is None
    assert not [each for each in threading.enumerate() if each.name.startswith("tfshard_rank") and each.is_alive()]


def test_batch_statistics_are_those_of_the_microbatches_one_after_the_other():
    def build():
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Dense(8, name="middle")]
        return keras.Sequential([keras.Input((8,)), *hidden, layers.BatchNormalization(), layers.Dense(3)])

    plain, ours = build(), tfshard.pipeline(build(), ["middle"], microbatches=4)
    plain.compile(keras.optimizers.SGD(0.0), "mse")
    plain.fit(X, X[:, :3], batch_size=4, shuffle=False, verbose=0)
    ours.compile(keras.optimizers.SGD(0.0), "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**TWO)))
    ours.fit(X, X[:, :3], batch_size=16, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_a_dropped_unit_has_no_gradient():
    """The backward pass recomputes the stage with the mask of the forward pass."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(16, kernel_initializer="zeros", name="bits"),
            layers.Dropout(0.5, seed=3),
            layers.Dense(1, use_bias=False, kernel_initializer="ones", name="sum"),
        ]
    )
    bits = np.array([2.0**number for number in range(16)], "float32")
    model.layers[0].bias.assign(bits)
    model = tfshard.pipeline(model, ["sum"], microbatches=1)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=2))
    model.layers[-1].trainable = False
    model.compile(keras.optimizers.SGD(1.0), lambda y, predicted: keras.ops.sum(predicted), strategy=strategy)
    masks = []
    for _ in range(3):
        before = np.array(model.layers[0].bias.numpy())
        loss = model.train_on_batch(np.ones((1, 4), "float32"), np.zeros((1, 1), "float32"))
        updated = before != model.layers[0].bias.numpy()
        assert loss == pytest.approx(2 * before[updated].sum(), rel=1e-5), "those that were kept are updated"
        masks.append(updated.tolist())
        model.layers[0].bias.assign(bits)
        model.layers[0].kernel.assign(np.zeros((4, 16)))
    assert not all(mask == masks[0] for mask in masks), "premise: masks differ"


# --- Checkpoints, files, callbacks


def compiled(mesh):
    keras.utils.set_random_seed(0)
    model = mlp()
    model = tfshard.pipeline(model, mesh["pipeline"], microbatches=4) if "pipeline" in mesh else model
    tfshard.as_distributed(model)
    model.compile(adam()(), ENTROPY, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh)))
    return model


def fit(model, epochs=1, **given):
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **given).history["loss"]


@pytest.fixture(scope="module")
def plain_losses():
    keras.utils.set_random_seed(0)
    model = mlp()
    model.compile(adam()(), ENTROPY)
    return fit(model, epochs=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(TWO, {"batch": 4}), (TWO, {"pipeline": 4}), ({"batch": 4}, TWO), (TWO, TWO)], ids=str
)
def test_a_checkpoint_goes_on_on_another_mesh(before, after, plain_losses, tmp_path):
    model = compiled(before)
    fit(model, epochs=2)
    tfshard.CheckpointManager(tmp_path).save(model, step=4)
    other = compiled(after)
    tfshard.CheckpointManager(tmp_path).restore(other)
    np.testing.assert_allclose(fit(other, epochs=2), plain_losses[2:], rtol=1e-5)


@pytest.mark.slow
def test_a_run_is_resumed(plain_losses, tmp_path):
    fit(compiled(TWO), epochs=2, callbacks=[tfshard.CheckpointCallback(tmp_path, every_steps=1)])
    resumed = fit(compiled(TWO), epochs=4, callbacks=[tfshard.CheckpointCallback(tmp_path, every_steps=1)])
    np.testing.assert_allclose(resumed, plain_losses[2:], rtol=1e-5)


@pytest.mark.slow
def test_a_saved_model_loads_in_plain_keras(tmp_path):
    model = compiled(TWO)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    assert int(loaded.optimizer.iterations.numpy()) == 2


@pytest.mark.slow
def test_a_clone_is_cut_and_compiled_as_it_was(plain_losses):
    model = compiled(TWO)
    clone = keras.models.clone_model(model)
    assert pipeline_of(clone) is not None and pipeline_of(clone) is not pipeline_of(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(fit(clone, epochs=4), plain_losses, rtol=1e-5)


def test_a_learning_rate_that_a_callback_sets_reaches_all_ranks():
    model = compiled(TWO)
    fit(model)
    before = model.get_weights()
    fit(model, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)])
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_table_that_is_set_is_set_on_all_ranks():
    case = CASES["a table that is the last matrix"]
    model = run(case, strategy_of(case))["model"]
    values = [RS.normal(size=each.shape).astype("float32") for each in model.get_weights()]
    model.set_weights(values)
    plain = tied()
    plain.set_weights(values)
    given = {key: tf.constant(each) for key, each in case["x"].items()}
    np.testing.assert_allclose(model.predict(case["x"], verbose=0), plain(given), rtol=1e-4, atol=1e-5)


# --- Plans and reports


def test_the_plan_is_what_is_measured():
    model = compiled(TWO)
    planned = tfshard.pipelining.plan(model, X[:16])
    fit(model)
    reports, measured = tfshard.pipelining.reports(model), tfshard.pipelining.measured(model)
    held = [report.bytes_per_device() for report in reports]
    assert [stage.stored.resting_bytes() for stage in planned.stages] == held
    assert planned.bytes_per_device("slot") > 0
    assert planned.stages[0].sent_bytes > 0
    assert measured.sent_bytes == 2 * planned.stages[0].sent_bytes, "activations, and as many gradients"
    assert 0 < planned.bubble() < 1
    assert "1f1b" in str(planned)
    assert planned.to_dict()["schedule"] == "1f1b"


def test_slots_and_parameters_of_a_part_are_on_its_rank_only():
    model = compiled(TWO)
    fit(model)
    reports = tfshard.pipelining.reports(model)
    of_rank = [{row.path for row in report.variables if row.kind == "parameter"} for report in reports]
    assert of_rank[0] and of_rank[1] and not of_rank[0] & of_rank[1]


# --- Refusals


def plainly(mesh=TWO, **settings):
    return lambda: tfshard.as_distributed(mlp()).compile(
        "sgd", ENTROPY, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **settings)
    )


def cut_for(mesh=TWO, stages=2, schedule="1f1b", microbatches=4, strategy=(), build=mlp, **settings):
    def compile():
        model = tfshard.pipeline(build(), stages, microbatches=microbatches, schedule=schedule)
        chosen = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **dict(strategy))
        model.compile(settings.pop("optimizer", "sgd"), ENTROPY, strategy=chosen, **settings)

    return compile


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def with_a_step_of_its_own():
    return OwnStep([keras.Input((8,)), layers.Dense(4), layers.Dense(3)])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (plainly(), "tfshard.pipeline"),
        (cut_for(mesh={"batch": 4}), "no pipeline axis"),
        (cut_for(mesh={"pipeline": 4}), "interleaved"),
        (cut_for(schedule="zigzag"), "Schedules"),
        (cut_for(microbatches=0), "microbatches"),
        (cut_for(strategy={"microbatches": 2}), "number of microbatches of a pipeline"),
        (cut_for(strategy={"tables": ".*embeddings"}), "Leave out tables="),
        (cut_for(run_eagerly=True), "run_eagerly"),
        (cut_for(jit_compile=True), "jit_compile"),
        (cut_for(build=with_a_step_of_its_own), "train_step"),
        (cut_for(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), "one optimizer"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(make, says):
    with pytest.raises((StrategyError, ValueError), match=says):
        make()


def test_a_loop_of_ones_own_is_refused():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**TWO))
    with pytest.raises(StrategyError, match="pipeline axis"):
        strategy.run(lambda: tf.constant(1))


def test_two_pipeline_axes_are_refused():
    with pytest.raises(MeshError, match="at most one axis with the role 'pipeline'"):
        tfshard.create_mesh(pipeline=2, other=2, roles={"other": "pipeline"})


def test_each_place_on_the_axis_has_a_device_of_dtensors_which_does_one_function_at_a_time():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=2, batch=2))
    tensors = [transfer.host_to_mesh(np.ones((2, 2), "float32"), (None, None), each.mesh) for each in strategy.ranks]
    assert tensors[0].device != tensors[1].device
    for tensor, each in zip(tensors, strategy.ranks, strict=True):
        assert transfer.is_dtensor(tensor)
        assert dtensor.fetch_layout(tensor + 1).mesh == each.mesh
        assert dtensor.fetch_layout(transfer.relayout(tensor, ("batch", None), each.mesh)).mesh == each.mesh
        np.testing.assert_array_equal(transfer.to_host(tensor + 1), np.full((2, 2), 2.0))


@pytest.mark.slow
def test_a_failing_task_ends_the_step_and_the_process_goes_on(monkeypatch):
    model = compiled(TWO)
    fit(model)
    before = model.get_weights()
    pipeline = pipeline_of(model)
    assert pipeline.measured is not None, "premise: functions are compiled, threads do the tasks"
    original = runner.Runner.run

    def failing(self, schedule, tasks, do):
        def fail(task):
            if task.stage == 1 and task.microbatch == 2:
                raise tf.errors.InternalError(None, None, "a device is gone")
            do(task)

        return original(self, schedule, tasks, fail)

    monkeypatch.setattr(runner.Runner, "run", failing)
    with pytest.raises(tf.errors.InternalError, match="a device is gone"):
        fit(model)
    monkeypatch.undo()
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    fit(model)
