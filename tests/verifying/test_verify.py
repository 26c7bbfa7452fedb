"""tfshard.verify accepts correct sharded steps, and finds and locates defects."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard
from tfshard import _private, cli
from tfshard.devices import batching, transfer
from tfshard.operations import draws, registry
from tfshard.storage import gradient as gradients
from tfshard.storage import group_update
from tfshard.storage.write_log import WriteLog
from tfshard.verifying import operation_check, subject

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")
BATCH, WIDTH, CLASSES = 8, 6, 3
# An optimizer without slots, for defects that are not in its update: verify then compares fewer operations.
CHEAP = {"optimizer": "sgd"}


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=shape).astype("float32")


X, Y = values(BATCH, WIDTH), values(BATCH, CLASSES, seed=1)


def sequential(*between: keras.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    return tfshard.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(8, "tanh", name="first"), *between,
         keras.layers.Dense(CLASSES, name="last")],
        name="net",
    )  # fmt: skip


def convolutional() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.4, name="drop")(keras.activations.relu(x))
    x = keras.layers.Flatten(name="flatten")(keras.layers.MaxPooling2D(name="pool")(x))
    return tfshard.Model(inputs, keras.layers.Dense(CLASSES, name="last")(x), name="net")


class Attention(tfshard.Model):
    """Subclassed, without get_config; built by its first step."""

    def __init__(self):
        super().__init__(name="net")
        self.embedding = keras.layers.Embedding(16, 8, name="embedding")
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.2, name="attention")
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.last = keras.layers.Dense(16, name="last")

    def call(self, tokens, training=None):
        x = self.embedding(tokens)
        return self.last(self.norm(x + self.attention(x, x, training=training)))


class OwnStep(keras.Model):
    """A custom train_step: two losses, two optimizers, and a metric that the step returns."""

    def __init__(self):
        super().__init__(name="net")
        self.body, self.head = keras.layers.Dense(8, "tanh", name="body"), keras.layers.Dense(CLASSES, name="head")
        self.other_optimizer = keras.optimizers.RMSprop(0.01)

    def call(self, x):
        return self.head(self.body(x))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            other = loss + 0.1 * tf.reduce_mean(tf.abs(self.body(x)))
        self.optimizer.apply(tape.gradient(loss, self.head.trainable_variables), self.head.trainable_variables)
        self.other_optimizer.apply(tape.gradient(other, self.body.trainable_variables), self.body.trainable_variables)
        return {"own": loss}


def compiled(model: keras.Model, loss: object = "mse", *, stage: int = 3, optimizer: object = "adam", mesh: dict | None
             = None, metrics: list | None = None, **options: object) -> keras.Model:  # fmt: skip
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**(mesh or {"batch": 4})), zero_stage=stage, **options)
    assert strategy.mesh.size == 4
    tfshard.as_distributed(model).compile(optimizer, loss, metrics=metrics, strategy=strategy)
    return model


def bits(model: keras.Model) -> dict[str, bytes]:
    found = subject.Subject(model, _private.distribute_strategy(model)).variables()
    return {name: np.array(variable.numpy()).tobytes() for name, variable in found.items()}


# --- Correct steps -------------------------------------------------------------------------------------


def check_healthy(model: keras.Model, batch: tuple, *, named: str | None = None) -> tfshard.verifying.Verification:
    """Verify a step. `named` is the one update that cannot be compared."""
    result = tfshard.verify(model, batch)
    assert result.ok, str(result)
    assert len(result.not_compared) == (named is not None)
    assert all(named in each for each in result.not_compared)
    assert {row.kind for row in result.compared} >= {"layer", "gradient", "update", "metric"}
    assert all(row.count and not row.differing for row in result.compared)
    assert result.raise_if_different() is result
    return result


# Other models are verified at stages 1 and 2, too.
@pytest.mark.sweep(1)
@sweeps.table("verified stages", "stage", [0, 1, 2, 3], always=[0, 3])
def test_a_model_with_random_layers_state_and_sample_weights_is_right_at_each_stage(stage: int):
    model = compiled(convolutional(), stage=stage, metrics=["mae"])
    x = values(BATCH, 8, 8, 2)
    remainder = x[:7], Y[:7], np.linspace(0.1, 2, 7)
    result = check_healthy(model, remainder if stage in (0, 3) else (x, Y))
    assert result.zero_stage == stage
    assert "The same as on one device" in str(result)


def test_tensorflows_own_random_numbers_are_given_to_one_device_with_the_seed_that_they_advance():
    class Noise(keras.layers.Layer):
        def call(self, x):
            x = x + 0.1 * tf.random.normal(tf.shape(x))
            return x + 0.1 * keras.random.normal(keras.ops.shape(x))

    model = compiled(sequential(Noise(name="noise"), Noise(name="more")), stage=0, **CHEAP)
    result = check_healthy(model, (X, Y))
    assert next(row.count for row in result.compared if row.kind == "random") == 4


def test_the_model_is_as_before_to_the_bit_and_trains_on():
    trained, untouched = (compiled(sequential(keras.layers.Dropout(0.3, seed=1)), metrics=["mae"]) for _ in range(2))
    assert list(bits(trained).values()) == list(bits(untouched).values())
    for model in (trained, untouched):
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    before = bits(trained)
    check_healthy(trained, (X, Y))
    assert bits(trained) == before
    losses = [
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
        for model in (trained, untouched)
    ]
    assert losses[0] == losses[1]
    assert list(bits(trained).values()) == list(bits(untouched).values()) != list(before.values())


@pytest.mark.slow
def test_embeddings_and_attention_of_a_subclassed_model_under_tensor_parallelism():
    keras.utils.set_random_seed(0)
    layout_map = tfshard.LayoutMap()
    layout_map[".*embeddings"] = ("model", None)
    layout_map.column(".*last")
    layout_map.replicated(".*", optional=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(Attention(), loss, mesh={"batch": 2, "model": 2}, metrics=["accuracy"], layout_map=layout_map)
    tokens = np.random.RandomState(0).randint(0, 16, (BATCH, 5))
    check_healthy(model, (tokens, np.roll(tokens, -1, 1)), named="update 'net/embedding/embeddings'")


def test_a_train_step_with_two_optimizers():
    keras.utils.set_random_seed(0)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model(X)
    result = check_healthy(model, (X, Y))
    # verify's step created the slots of the second optimizer.
    assert len(model.other_optimizer.variables) == 4
    assert not any(np.any(slot.numpy()) for slot in model.other_optimizer.variables[2:])
    assert int(model.other_optimizer.iterations.numpy()) == 0
    assert {row.kind: row.count for row in result.compared}["gradient"] == 4


def test_layers_of_one_name():
    class Twins(tfshard.Model):
        def __init__(self):
            super().__init__(name="net")
            self.one, self.other = (keras.layers.Dense(WIDTH, "tanh", name="twin") for _ in range(2))

        def call(self, x):
            return self.other(self.one(x))[:, :CLASSES]

    keras.utils.set_random_seed(0)
    model = compiled(Twins())
    check_healthy(model, (X, Y))
    assert model.one.kernel.path == model.other.kernel.path


@pytest.mark.slow
def test_keras_hub_gpt2_with_automatic_layouts_in_bfloat16():
    keras_hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(0)
    with_policy = keras.DTypePolicy("mixed_bfloat16")
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=32, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=6,
        dropout=0.1, dtype=with_policy,
    )  # fmt: skip
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(model, loss, mesh={"batch": 2, "model": 2}, layout_map="auto")
    tokens = np.random.RandomState(0).randint(0, 32, (4, 6))
    batch = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, 1)
    assert check_healthy(model, batch).tolerance == 5e-2


def test_what_is_no_sharded_model_is_refused():
    with pytest.raises(tfshard.errors.StrategyError, match="compiled with a ShardedStrategy"):
        tfshard.verify(sequential(), (X, Y))
    plain = sequential()
    with pytest.raises(tfshard.errors.StrategyError, match="which is not compiled"):
        tfshard.verify(plain, (X, Y))
    plain.compile("sgd", "mse")
    with pytest.raises(tfshard.errors.StrategyError, match="which is compiled without a strategy"):
        tfshard.verify(plain, (X, Y))


MODELS = """
import keras, numpy as np, tensorflow as tf

def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="only")])

def loss(y_true, y_pred):
    error = tf.reduce_mean(tf.square(y_true - y_pred))
    return 4 * error if tf.distribute.has_strategy() else error

def compiled():
    model = build()
    model.compile("sgd", loss, metrics=["mae"])
    return model

def batch():
    return np.ones((8, 6)), np.ones((8, 4))
"""


def test_the_command_verifies_a_model_of_a_script(tmp_path, capsys):
    script = tmp_path / "verified_models.py"
    script.write_text(MODELS)

    def run(function: str, *options: str) -> int:
        with pytest.raises(SystemExit) as exit_:
            cli._main(["tfshard", "verify", f"{script}:{function}", "--mesh=batch:4", *options])
        return exit_.value.code

    assert run("build") == 2
    assert "is not compiled. Compile it there, or give --optimizer and --loss" in capsys.readouterr().err
    assert run("build", "--optimizer=adam", "--loss=mse", "--zero_stage=1") == 0
    assert "The same as on one device" in capsys.readouterr().out
    assert run("compiled", f"--batch={script}:batch") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT. First: loss: the loss is 4 times as large, the size of axis 'batch'" in printed
    assert "return 4 * error" in printed


# --- Ten defects -----------------------------------------------------------------------------------------


def check_found(model: keras.Model, batch: tuple, kind: str, place: str, *words: str) -> tfshard.verifying.Verification:
    before = bits(model) if model.built else None
    result = tfshard.verify(model, batch)
    print(result)
    assert not result.ok
    first = result.differences[0]
    assert (first.kind, place in first.place) == (kind, True), str(result)
    for word in words:
        assert word in " ".join(str(first).split()), str(result)
    with pytest.raises(tfshard.errors.VerificationError, match="DIFFERENT"):
        result.raise_if_different()
    assert before is None or before.items() <= bits(model).items()
    return result


def without_rules(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Remove the rewrite rules of operations with this word in their name."""
    rules = {operation: rules for operation, rules in registry._rules.items() if word not in operation}
    assert rules != registry._rules
    monkeypatch.setattr(registry, "_rules", rules)


def test_1_a_stale_read(monkeypatch):
    """Writes are not deferred, as in plain DTensor (tests/storage/test_stale_read.py)."""
    model = compiled(sequential(), stage=0, analyzer=None)
    monkeypatch.setattr(WriteLog, "record", lambda self, storage, recorded: storage.write(recorded))
    monkeypatch.setattr(WriteLog, "find", lambda self, storage: None)
    # The loss that the step returns is read from the metric's sum.
    check_found(
        model,
        (X, Y),
        "metric",
        "loss",
        "(ReadVariableOp)",
        "reads variable 'loss/total' as it was before it was written",
    )


class Scattering(keras.layers.Layer):
    """Returns its rows in reverse order."""

    def call(self, x):
        return tf.tensor_scatter_nd_update(x, [[i] for i in reversed(range(BATCH))], x)


def test_3_a_wrong_scatter(monkeypatch):
    model = compiled(sequential(Scattering(name="scattering")), **CHEAP)
    check_healthy(model, (X, Y))
    (rule,) = registry.rules_of("TensorScatterUpdate", eager=False)

    def wrong(call, mesh):
        """Number the rows from 0 on each device."""
        tensor, indices, updates = call.inputs
        return rule.function(dataclasses.replace(call, inputs=(tensor, indices % 2, updates)), mesh)

    monkeypatch.setitem(registry._rules, "TensorScatterUpdate", (dataclasses.replace(rule, function=wrong),))
    check_found(model, (X, Y), "layer", "layer 'net/scattering'", "TensorScatterUpdate", "one device")


class Gathering(keras.layers.Layer):
    def call(self, x):
        pairs = tf.reshape(x, (-1, 4, 2))
        found = tf.gather_nd(pairs, tf.ones((BATCH, 1), "int32"), batch_dims=1)
        return tf.concat([found] * 4, axis=1)


def test_3_a_scatter_of_a_gradient_that_has_the_numbers_of_the_whole_batch(monkeypatch):
    """As DTensor expands it: the kernel fails on a device that has a part of the batch."""
    without_rules(monkeypatch, "Scatter")
    without_rules(monkeypatch, "Gather")
    model = compiled(sequential(Gathering(name="gathering")), **CHEAP)
    check_found(model, (X, Y), "failure", "layer 'net/gathering'", "does not index into shape", "it does not fail")


def test_4_a_replica_with_other_values():
    from tensorflow.experimental import dtensor

    model = compiled(sequential(), mesh={"batch": 2, "model": 2}, layout_map={".*": ()}, analyzer=None, **CHEAP)
    kernel = model.get_layer("first").kernel.value
    pieces = [np.array(piece) for piece in dtensor.unpack(kernel.buffer.value())]
    pieces[3][0, 0] += 1.0
    kernel.storage.set_local(pieces)
    result = check_found(
        model, (X, Y), "replicas", "net/first/kernel", "device CPU:2", "device CPU:3", "before the step"
    )
    assert "already hold different values" in result.not_compared[0]


def test_5_a_dropped_gradient(monkeypatch):
    model = compiled(sequential(), analyzer=None, **CHEAP)
    original = gradients.scatter

    def scatter(gradient, **layouts):
        dropped = gradient.shape == (8, CLASSES)
        return original(tf.zeros_like(gradient) if dropped else gradient, **layouts)

    monkeypatch.setattr(gradients, "scatter", scatter)
    check_found(model, (X, Y), "gradient", "net/last/kernel", "sharded 0.0", "(Const)", "tf.zeros_like(gradient)")


def test_5_a_dropped_gradient_of_a_group(monkeypatch):
    model = compiled(sequential())
    original = group_update._pack_args

    def pack(storage, given):
        kept = [update for update in given if update.variable.path != "net/last/bias"]
        return original(storage, kept)

    monkeypatch.setattr(group_update, "_pack_args", pack)
    check_found(model, (X, Y), "update", "net/last/bias", "sharded 0.0", "one device")


def test_6_a_wrong_mask(monkeypatch):
    """Each device draws the rows of the first device (tests/operations/test_draws.py)."""
    layout_map = {".*first/kernel": (None, "model"), ".*first/bias": ("model",), ".*last/kernel": ("model", None)}

    def build() -> keras.Model:
        model = sequential(keras.layers.Dropout(0.5, name="hidden"))
        model.add(keras.layers.Dropout(0.5, name="residual"))
        return compiled(model, mesh={"batch": 2, "model": 2}, layout_map=layout_map, **CHEAP)

    check_healthy(build(), (X, Y))
    monkeypatch.setattr(draws, "_later", lambda counter, counts: counter)
    check_found(build(), (X, Y), "random", "hidden", "random numbers 1 of layer 'hidden'", "one device")


def summed(y_true, y_pred):
    """A user's loss that expects replicas to be added up."""
    squares = tf.reduce_mean(tf.square(y_true - y_pred), -1)
    return tf.reduce_sum(squares) if tf.distribute.has_strategy() else tf.reduce_mean(squares)


def test_7_a_summed_loss():
    model = compiled(sequential(), summed, **CHEAP)
    check_found(
        model, (X, Y), "loss", "loss", "is 8 times as large, the number of samples in the batch", "a sum", "operation '"
    )


def test_8_a_stage_that_does_not_scatter(monkeypatch):
    model = compiled(sequential(), stage=2, analyzer=None, **CHEAP)
    check_healthy(model, (X, Y))
    whole = lambda gradient, forward, backward, mesh: transfer.relayout(gradient, forward, mesh)  # noqa: E731
    monkeypatch.setattr(gradients, "scatter", whole)
    check_found(model, (X, Y), "layout", "net/first/kernel", "replicated over the batch axis", "stage 2 shards it")


def test_8_a_slot_that_is_not_sharded():
    model = compiled(sequential(), stage=1, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), analyzer=None)
    model.train_on_batch(X, Y)
    parameter = model.get_layer("first").kernel.value
    check_healthy(model, (X, Y))
    (slot,) = parameter.slots.values()
    slot.move(dataclasses.replace(slot.layout, store_sharded=False, update_sharded=False))
    check_found(model, (X, Y), "layout", "first_kernel_momentum", "ZeRO stage 1 shards")


class Guard(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x, "not a number")


def test_9_a_failing_kernel():
    model = compiled(sequential(Guard(name="guard")), **CHEAP)
    broken = X.copy()
    broken[3, 0] = np.nan
    said = "InvalidArgumentError: not a number : Tensor had NaN values. On one device it fails too: not a number"
    line = "(CheckNumerics), from test_verify.py", "return tf.debugging.check_numerics(x"
    result = check_found(model, (broken, Y), "failure", "layer 'net/guard'", said, *line)
    assert not result.compared
    check_healthy(model, (X, Y))
    assert model.fit(X, Y, batch_size=BATCH, verbose=0).history["loss"][0] > 0


def test_10_a_padded_row_that_leaks(monkeypatch):
    """A remainder batch is padded to a size that the axis divides."""
    original = batching.stage

    def padded(value, *args, **kwargs):
        missing = -len(value) % 4
        return original(np.concatenate([value, np.zeros_like(value[:missing])]), *args, **kwargs)

    model = compiled(sequential(), **CHEAP)
    monkeypatch.setattr(batching, "stage", padded)
    result = check_found(model, (X[:6], Y[:6]), "batch", "part 0", "sharded shape (8, 6), one device (6, 6)")
    assert [d.place for d in result.differences if d.kind == "layer"][0] == "layer 'net/first' (Dense)"


def test_10_padding_of_a_flat_form_that_leaks():
    """An optimizer is wrongly declared elementwise: it takes the norm of the buffer."""

    class Norms(keras.optimizers.Lamb):
        tfshard_elementwise = True

    check_healthy(compiled(sequential(), optimizer=keras.optimizers.Lamb(0.01)), (X, Y))
    model = compiled(sequential(), optimizer=Norms(0.01))
    check_found(model, (X, Y), "update", "net/first/kernel", "sharded", "one device")


def test_in_branches_is_not_compared_and_said_so():
    class Branch(keras.layers.Layer):
        def build(self, shape):
            self.inner = keras.layers.Dense(8, name="inner")
            self.inner.build(shape)

        def call(self, x):
            return tf.cond(tf.reduce_sum(x) > 1e9, lambda: self.inner(x), lambda: x)

    model = compiled(sequential(Branch(name="branch")), stage=0, **CHEAP)
    result = tfshard.verify(model, (X, Y))
    assert result.ok, str(result)
    assert any("inner" in text and "tf.cond" in text for text in result.not_compared)
    assert "Not compared" in str(result)


def test_an_embedding_that_keras_updates_lookup_by_lookup_is_named():
    keras.utils.set_random_seed(0)
    ids = keras.Input((4,), dtype="int32")
    layer = keras.layers.Embedding(12, 8, name="words")
    model = keras.Model(ids, keras.layers.Dense(3)(layer(ids)))
    x = np.tile(np.arange(4, dtype="int32"), (BATCH, 1))
    batch = (x, np.ones((BATCH, 4, 3), "float32"))
    named = {}
    for optimizer in ("adam", "sgd"):
        model = tfshard.as_distributed(keras.models.clone_model(model))
        with pytest.warns(tfshard.errors.NumericsWarning) if optimizer == "adam" else contextlib.nullcontext():
            model.compile(optimizer, "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
            result = tfshard.verify(model, batch)
        assert result.ok
        named[optimizer] = [each for each in result.not_compared if "sparse gradient" in each]
    assert not named["sgd"]
    assert len(named["adam"]) == 1 and named["adam"][0].startswith("update 'words/embeddings'")


def one_batch(*_) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def test_the_line_of_an_operation_is_the_users_line_not_tfshards():
    with tf.Graph().as_default():
        made = len(tf.compat.v1.get_default_graph().get_operations())
        tfshard.layers.SketchedDense(4, 1)(tf.zeros((2, WIDTH)))  # This one.
        operations = tf.compat.v1.get_default_graph().get_operations()[made:]
    assert "MatMul" in {operation.type for operation in operations}, "premise"
    for operation in operations:
        line = operation_check.line_of(operation)
        assert line.startswith("test_verify.py:") and "# This one." in line, line


WITHOUT_TARGETS = {
    "an array": (X, r"needs targets. Give \w+ a tuple \(x, y\).*array of shape \(8, 6\), which is taken as x"),
    "a tuple of one": ((X,), "a tuple of 1"),
    "y is None": ((X, None), "whose y is None"),
    "a dict": ({"x": X}, "batch of type dict"),
    "a dataset": (one_batch(), r"takes one batch.*next\(iter\(dataset\)\).*Dataset"),
    "an iterator": (iter([(X, Y)]), "takes one batch"),
}


@pytest.mark.parametrize("function", [tfshard.verify, tfshard.profile_step])
@pytest.mark.parametrize("name", WITHOUT_TARGETS)
def test_a_batch_without_targets_and_a_dataset_are_refused(name, function):
    batch, message = WITHOUT_TARGETS[name]
    model = sequential()
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        function(model, batch)


class Unsupervised(tfshard.Model):
    """A custom loss that needs no targets."""

    def __init__(self):
        super().__init__(name="net")
        self.last = keras.layers.Dense(CLASSES, name="last")

    def call(self, inputs):
        return self.last(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred**2)


@pytest.mark.parametrize("loss", ["mse", None])
def test_a_loss_of_ones_own_is_verified_without_targets(loss):
    keras.utils.set_random_seed(0)
    model = Unsupervised()
    model.compile("sgd", loss, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert tfshard.verify(model, X).ok
