"""Each rewrite rule is taken by its cases, which match one device; the registry refuses rules that collide."""

import numpy as np
import pytest
import rewrite_cases
import tensorflow as tf
from rewrite_cases import CASES, TABLE
from tensorflow.python.framework import ops

import tfshard
from tfshard import _private
from tfshard.operations import registry
from tools.site import rules as rules_tables

RULES = registry.all_rules()
NAMES = sorted({rule.name for rule in RULES})


def cases_of(name: str) -> list[str]:
    return sorted({case for rule in RULES if rule.name == name for case in rule.cases})


def test_every_case_is_that_of_a_rule():
    assert {case for rule in RULES for case in rule.cases} == {*CASES, TABLE}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in NAMES for case in cases_of(name)])
def test_case_goes_through_rule_and_matches_one_device(name, case):
    if case == TABLE:
        rules = set(rewrite_cases.table_rules())
    elif CASES[case].error is not None:
        rules = set(rewrite_cases.refused(CASES[case]))
    else:
        outcome = rewrite_cases.outcome(CASES[case])
        rules = set(outcome.rules)
        for ours, theirs in zip(outcome.values, rewrite_cases.on_one_device(CASES[case]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert name in rules


def test_each_mode_of_a_rule_has_a_case():
    for rule in RULES:
        modes = {CASES[case].eager for case in rule.cases if case in CASES} or {False}
        assert modes == {mode for mode, has in ((False, rule.graph), (True, rule.eager)) if has}, rule.name


def test_tables_of_rules_are_current():
    for name in rules_tables.TABLES:
        assert rules_tables.page(name) == (rules_tables.DOCS / name).read_text(), "python -m tools.site.rules --write"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} of {rule.operations[0]}")
def test_gradient_of_rule_is_what_tensorflow_registers(rule):
    def has_gradient(operation: str) -> bool:
        try:
            return ops.gradient_registry.lookup(operation) is not None
        except LookupError:
            return False

    found = [has_gradient(operation) for operation in rule.operations]
    is_refusal = rule.function.__annotations__["return"] is None and "refuse" in rule.function.__name__
    assert any(found) if rule.gradient == "registered" or callable(rule.gradient) else is_refusal or not any(found)


# --- the registry itself -----------------------------------------------------------------------------


@pytest.fixture
def empty(monkeypatch):
    monkeypatch.setattr(registry, "_rules", {})


def rule(function, *, operations=("Sin",), graph=True, eager=False, **options):
    options = {"gradient": "registered", "fault": "nothing", "cases": ("none",)} | options
    return registry.rewrite_rule(*operations, graph=graph, eager=eager, **options)(function)


def first(call):
    return None


def second(call):
    return None


def condition(call):
    return True


def test_second_rule_of_an_operation_must_have_another_order(empty):
    rule(first)
    with pytest.raises(ValueError, match="have the same order"):
        rule(second)
    with pytest.raises(ValueError, match="have the same order"):
        rule(second, eager=True)
    rule(second, graph=False, eager=True)
    rule(first, order=-1)
    names = [each.name for each in registry.rules_of("Sin", eager=False)]
    assert names == ["test_registry.first"] * 2
    assert [each.order for each in registry.rules_of("Sin", eager=False)] == [-1, 0]


def test_condition_of_a_rule_needs_a_docstring(empty):
    with pytest.raises(ValueError, match="needs a docstring"):
        rule(first, when=condition)


@pytest.mark.parametrize("options", [{"operations": ()}, {"graph": False}])
def test_rule_without_an_operation_or_a_mode_is_refused(empty, options):
    with pytest.raises(ValueError, match="needs an operation"):
        rule(first, **options)


def derivatives(strategy: tfshard.ShardedStrategy) -> list[float]:
    """Return the derivative of a sine at 0.5: of a step, and of the body of a loop."""

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.sin(x)
            z = tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1]
        return [tape.gradient(y, x), tape.gradient(z, x)]

    return [float(each) for each in strategy.run(tf.function(step, autograph=False), args=(tf.constant(0.5),))]


def test_tapes_take_the_registered_gradient_and_loops_that_of_the_rule(empty):
    """A rule with another derivative than the operation: 3 in place of a cosine."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    expected = np.cos(0.5)
    np.testing.assert_allclose(derivatives(strategy), [expected, expected], rtol=1e-6)
    rule(lambda call: 3.0 * call.inputs[0])
    np.testing.assert_allclose(derivatives(strategy), [expected, 3.0], rtol=1e-6)


def test_gradient_function_of_a_rule_is_that_of_loops(empty):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))

    def gradient(operation, upstream):
        return 5.0 * upstream

    def same(call):
        return _private.same_operation(call, call.inputs)

    rule(same, gradient=gradient)
    np.testing.assert_allclose(derivatives(strategy), [np.cos(0.5), 5.0], rtol=1e-6)
