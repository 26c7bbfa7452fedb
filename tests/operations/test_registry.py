"""Each rewrite rule is taken by its cases, which match one device; the registry refuses rules that collide."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import parity
import rewrite_cases
import tfshard
from rewrite_cases import CASES, TABLE
from tfshard.operations import registry, rewrites
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
        rules: set[str] = set()
        with rewrite_cases.noted_rules(rules):
            strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), tables=".*words/embeddings")
            trained = rewrite_cases.train_table(strategy)
        parity.assert_same(trained, rewrite_cases.train_table(None), rtol=1e-5, atol=1e-6)
    elif CASES[case].error is not None:
        rules = set(rewrite_cases.refused(CASES[case]))
    else:
        outcome = rewrite_cases.outcomes(CASES[case].mesh, CASES[case].eager)[case]
        rules = set(outcome.rules)
        for ours, theirs in zip(outcome.values, rewrite_cases.on_one_device(CASES[case]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert name in rules


def test_each_mode_of_a_rule_has_a_case():
    for rule in RULES:
        modes = {CASES[case].eager for case in rule.cases if case in CASES} or {False}
        assert modes == {mode for mode, has in ((False, rule.graph), (True, rule.eager)) if has}, rule.name
