"""The layout linter finds each mistake before a step runs, and names its fix."""

import re

import keras
import keras_hub
import numpy as np
import pytest

import tfshard
from tfshard import cli
from tfshard.graph import auto_layout
from tfshard.layouts.axes import MeshAxes

MESH = {"batch": 2, "model": 2}


def mlp() -> keras.Model:
    inputs = keras.Input((32,))
    x = keras.layers.Dense(64, activation="relu", name="up")(inputs)
    x = keras.layers.Dense(32, name="down")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(x), name="mlp")


def column_row(**rules) -> tfshard.LayoutMap:
    """Return a correct map for `mlp`, with other rules for some layers."""
    layout_map = tfshard.LayoutMap()
    for layer, kind in {"up": "column", "down": "row", "head/kernel": "replicated", **rules}.items():
        if kind is not None:
            getattr(layout_map, kind)(layer)
    return layout_map


def found(layout_map, model=None, mesh=MESH) -> dict:
    return {(finding.kind, finding.where): finding for finding in tfshard.lint(model or mlp(), mesh, layout_map)}


def compile_with(layout_map, model=None) -> keras.Model:
    model = tfshard.as_distributed(model or mlp())
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**MESH), layout_map))
    return model


def test_a_correct_map_has_no_findings():
    assert found(column_row()) == {}
    assert found("auto") == {}
    compile_with(column_row()).train_on_batch(np.ones((4, 32)), np.ones((4, 5)))


def test_a_pattern_that_matches_nothing_is_an_error_that_names_near_paths():
    finding = found(_with(column_row(), "dwn/kernel"))["unmatched", "dwn/kernel"]
    assert finding.is_error
    assert "re.fullmatch" in finding.message
    with pytest.raises(tfshard.errors.LayoutError, match="dwn/kernel: it matches no variable"):
        compile_with(_with(column_row(), "dwn/kernel"))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda m: m.column("up/kernel"),
            r"matches variable 'up/kernel', .* names a layer. Write layout_map.column\('up'\)",
        ),
        (lambda m: m.row(".*wn/kernel"), r"matches variable 'down/kernel', .* Write layout_map.row\('down'\)"),
        (
            lambda m: m.add("down", ("model", None)),
            r"matches layer 'down'.* layout_map\['down/kernel'\] = \('model', None\)",
        ),
    ],
)
def test_a_pattern_of_the_wrong_kind_says_what_it_should_name(add, message):
    layout_map = tfshard.LayoutMap()
    add(layout_map)
    (unmatched,) = [each for each in tfshard.lint(mlp(), MESH, layout_map) if each.kind == "unmatched"]
    assert re.search(message, unmatched.message)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda m: m.column("up/kernel"),
            r"matches the end of variable 'net/up/kernel', .* names a layer. Write layout_map.column\('net/up'\)",
        ),
        (
            lambda m: m.column("up"),
            r"the end of layer 'net/up', .* Write layout_map.column\('net/up'\), or layout_map.column\('.\*/up'\)",
        ),
        (
            lambda m: m.row("up|down"),
            r"Write layout_map.row\('net/up'\), or layout_map.row\('.\*/\(\?:up\|down\)'\)",
        ),
        (
            lambda m: m.add("up", ("model",)),
            r"matches the end of layer 'net/up', .* layout_map\['net/up/kernel'\].*column\('net/up'\)",
        ),
        (
            lambda m: m.add("up/kernel", (None, "model")),
            r"the end of variable 'net/up/kernel', .* Write layout_map\['net/up/kernel'\] = \(None, 'model'\), or ",
        ),
        (lambda m: m.row("net/dwn"), r"no layer .*Similar layers: \['net/down', 'net/\w+', 'net/\w+'\]"),
        (lambda m: m.add("net/dwn/kernel", ()), r"no variable.*Similar variables: \['net/down/kernel', "),
    ],
)  # fmt: skip
def test_a_pattern_without_the_name_of_the_model_says_what_to_write(add, message):
    model = keras.Sequential(
        [keras.Input((32,)), keras.layers.Dense(64, name="up"), keras.layers.Dense(32, name="down"),
         keras.layers.Dense(4, name="head")],
        name="net",
    )  # fmt: skip
    layout_map = tfshard.LayoutMap()
    add(layout_map)
    (unmatched,) = [each for each in tfshard.lint(model, MESH, layout_map) if each.kind == "unmatched"]
    assert re.search(message, unmatched.message), unmatched.message


def test_a_model_axis_that_no_rule_names_is_warned_of_at_the_users_line():
    mesh = {"outer": 2, "inner": 2}
    layout_map = tfshard.LayoutMap()
    layout_map.column("up", axis="inner")
    layout_map.row("down", axis="inner")
    layout_map.replicated("head/kernel")
    (finding,) = tfshard.lint(mlp(), mesh, layout_map)
    assert (finding.kind, finding.is_error, finding.where) == ("idle axis", False, "axis 'outer'")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map)
    with pytest.warns(tfshard.errors.LayoutWarning, match=r"axis 'outer': .* roles={'outer': 'data'}") as record:
        tfshard.as_distributed(mlp()).compile("sgd", "mse", strategy=strategy)
    assert record[0].filename == __file__, "the warning points to the line that compiles"
    # With the role of its name, or with a given role, the axis takes the batch.
    assert tfshard.lint(mlp(), MeshAxes.of(mesh, {"outer": "data"}), layout_map) == ()


@pytest.mark.parametrize("name", ["dp", "data", "fsdp"])
def test_lint_names_the_role_that_an_axis_has_by_its_name(name, recwarn):
    layout_map = tfshard.LayoutMap()
    layout_map.column("up", axis="tp")
    layout_map.row("down", axis="tp")
    layout_map.replicated("head/kernel")
    mesh = {name: 2, "tp": 2}
    (finding,) = tfshard.lint(mlp(), mesh, layout_map)
    assert (finding.kind, finding.is_error, finding.where) == ("named role", False, f"axis '{name}'")
    assert (
        str(finding).startswith(f"note (named role) at axis '{name}': ")
        and f"roles={{'{name}': 'tensor'}}" in finding.message
    )
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map)
    assert MeshAxes.of(mesh).data == name
    tfshard.as_distributed(mlp()).compile("sgd", "mse", strategy=strategy)
    assert not recwarn.list, "compile does not warn of a role that is as intended"


def _with(layout_map: tfshard.LayoutMap, pattern: str, axes=(None, "model")) -> tfshard.LayoutMap:
    layout_map[pattern] = axes
    return layout_map


def test_a_large_variable_left_whole_is_an_error_unless_allowed():
    finding = found(column_row(**{"head/kernel": None}))["left whole", "head/kernel"]
    assert finding.is_error
    assert "layout_map.replicated('head/kernel')" in finding.message
    model = mlp()
    with pytest.raises(tfshard.errors.LayoutError, match=r"head/kernel: 4% of the model's bytes are replicated"):
        compile_with(column_row(**{"head/kernel": None}), model)
    assert not any(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.variables)
    compile_with(column_row(), model)


def test_a_model_axis_that_nothing_uses_is_one_error():
    assert list(found(None)) == [("left whole", "axis 'model'")]
    with pytest.raises(tfshard.errors.LayoutError, match=r"nothing is sharded over it.*layout_map='auto'"):
        compile_with(None)
    compile_with({".*": ()})


def test_a_model_axis_that_nothing_uses_is_an_error_in_a_deep_model_too():
    def build():
        layers = [keras.layers.Dense(8, name=f"dense_{i}") for i in range(60)]
        return keras.Sequential([keras.Input((8,)), *layers])

    mesh = {"batch": 2, "model": 2}
    # Each kernel has 64 of the 60 * 72 elements: a single one is not large (2% of the bytes).
    assert 64 / (60 * 72) < auto_layout.LARGE_SHARE == 0.02
    plan = tfshard.plan(tfshard.abstract_model(build), mesh)
    (refused,) = plan.refused
    assert "axis 'model': nothing is sharded over it" in refused
    with pytest.raises(tfshard.errors.LayoutError, match="nothing is sharded over it"):
        compile_with(None, build())
    assert tfshard.plan(build(), mesh, {".*": ()}).refused == ()
    assert tfshard.plan(build(), mesh, {".*dense_0/kernel": (None, "model")}).refused == ()


@pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")
def test_a_column_after_a_column_warns_that_a_row_saves_a_collective():
    wrong = column_row(down="column")
    finding = found(wrong)["column after column", "down/kernel"]
    assert not finding.is_error
    assert "layout_map.row('down')" in finding.message
    with pytest.warns(tfshard.errors.LayoutWarning, match="column after column: down/kernel"):
        model = compile_with(wrong)
    # The model runs, and the row rule saves collectives.
    batch = np.ones((4, 32)), np.ones((4, 5))
    columns, pair = (tfshard.profile_step(each, batch) for each in (model, compile_with(column_row())))
    assert len(columns.collectives) > len(pair.collectives)


def test_transposed_dims_are_found():
    wrong = column_row(up="row", down="column")
    findings = found(wrong)
    assert "layout_map['up/kernel'] = (None, 'model')" in findings["transposed", "up/kernel"].message
    assert "layout_map['down/kernel'] = ('model', None)" in findings["transposed", "down/kernel"].message


def test_an_indivisible_dim_is_an_error():
    finding = found(column_row(**{"head/kernel": None, "head": "column"}))["indivisible", "head/kernel"]
    assert finding.is_error
    assert "does not divide dim 1 of 'head/kernel'" in finding.message


def test_two_rules_for_one_weight_are_an_error():
    finding = found(_with(column_row(), ".*up/kernel"))["ambiguous", "up/kernel"]
    assert finding.is_error
    assert "['up', '.*up/kernel']" in finding.message


class Borrowed(keras.layers.Layer):
    """Computes logits from another layer's table."""

    def __init__(self, weight, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.weight))


def test_a_tied_weight_with_two_rules_is_an_error_that_names_the_weight():
    tokens = keras.Input((4,), dtype="int32")
    embedding = keras.layers.Embedding(64, 32, name="tokens")
    x = embedding(tokens)
    model = keras.Model(tokens, Borrowed(embedding.embeddings, name="logits")(x))
    layout_map = {"tokens/embeddings": ("model", None), "logits/embeddings": (None, "model")}
    finding = found(layout_map, model)["tied", "logits/embeddings"]
    assert finding.is_error
    assert "'tokens/embeddings'" in finding.message
    assert "Remove one of the two" in finding.message


LLAMA = {"vocabulary_size": 64, "num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 4, "hidden_dim": 16,
         "intermediate_dim": 32}  # fmt: skip


def test_the_transposed_rules_of_kerashubs_own_maps_are_found():
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices=[f"cpu:{i}" for i in range(4)])
    own = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    findings = found(own, keras_hub.models.LlamaBackbone(**LLAMA))
    query = findings["transposed", "transformer_layer_0/self_attention/query/kernel"]
    assert "layout_map['transformer_layer_0/self_attention/query/kernel'] = (None, 'model', None)" in query.message
    assert not any(finding.is_error for finding in findings.values())


def test_an_axis_that_is_not_in_the_mesh_is_an_error():
    with pytest.raises(tfshard.errors.LayoutError, match="Axis 'modle' is not in the mesh"):
        tfshard.lint(mlp(), MESH, {"up/kernel": (None, "modle")})


# --- The command -----------------------------------------------------------------------------------------

CORRECT, WRONG, SLOW = column_row(), column_row(**{"head/kernel": None}), column_row(down="column")


@pytest.mark.parametrize(("name", "code", "text"), [
    ("CORRECT", 0, "No findings"), ("WRONG", 1, "error (left whole) at head/kernel: "),
    ("SLOW", 0, "warning (column after column) at down/kernel: "), ("auto", 0, "No findings"),
])  # fmt: skip
def test_the_command_prints_findings_and_exits_with_1_for_errors(name, code, text, capsys):
    layout_map = name if name == "auto" else f"test_linter:{name}"
    assert cli._run(["lint", "test_linter:mlp", "--mesh=batch:2,model:2", f"--layout_map={layout_map}"]) == code
    assert text in capsys.readouterr().out


def test_a_sharded_convolution_that_cannot_be_is_an_error_before_dtensor_refuses_it():
    inputs = keras.Input((8, 4))
    model = keras.Model(inputs, keras.layers.Conv1D(8, 3, name="conv")(inputs))
    layout_map = tfshard.LayoutMap()
    layout_map.column("conv")
    finding = found(layout_map, model)["unsupported", "conv/kernel"]
    assert finding.is_error
    assert "layout_map.replicated('conv/kernel')" in finding.message
    assert "only Conv2D and Conv3D" in tfshard.auto_layout_map(model, MESH)["conv/kernel"].reason


# --- errors with any layout map ----------------------------------------------------------------------------


def elastic() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, keras.layers.Dense(8)(keras.layers.RandomElasticTransform(name="elastic")(inputs)))


def constrained() -> keras.Model:
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0))(inputs))


@pytest.mark.parametrize("kind", ["cannot be expanded", "left whole"])
def test_lint_and_plan_say_what_compile_and_the_first_step_refuse(kind):
    model = elastic() if kind == "cannot be expanded" else constrained()
    optimizer = keras.optimizers.SGD(0.1)
    mesh = {"batch": 2, "model": 2} if kind == "left whole" else {"batch": 4}
    if kind != "cannot be expanded":
        assert tfshard.lint(model, {"batch": 4}, None) == (), "premise: the model itself is right"
    (finding,) = tfshard.lint(model, mesh, None)
    assert (finding.kind, finding.is_error) == (kind, True)
    planned = tfshard.plan(model, mesh, optimizer=optimizer)
    assert planned.refused == (str(finding),)
    assert f"cannot be trained with this plan: error ({kind}) at " in " ".join(str(planned).split())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh))
    text = finding.message.partition(". ")[0].partition("cannot be sharded: ")
    with pytest.raises(tfshard.ShardingError, match=re.escape(text[2] or text[0])):
        tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy)
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
    # Also for a model that is only planned.
    if kind == "cannot be expanded":
        assert tfshard.lint(tfshard.abstract_model(elastic), mesh)[0].kind == kind


@pytest.mark.parametrize("command", ["lint", "plan"])
def test_the_commands_say_what_cannot_be_sharded_at_all(command, capsys):
    assert cli._run([command, "test_linter:elastic", "--mesh=batch:4"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "error (cannot be expanded) at layer 'elastic': a RandomElasticTransform cannot be sharded" in printed
    assert "random_map" in printed
