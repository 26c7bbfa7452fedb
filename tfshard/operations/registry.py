"""The registry of rewrite rules: which TensorFlow operations of a step are replaced, when, and by what.

A rewrite rule is a function with the decorator `rewrite_rule`. It takes a `_private.Call` (and the mesh, if it names a
second parameter), and returns the tensors that replace the outputs of the operation, or None to leave it unchanged.
While `rewrites.rewritten` is open, the rules of an operation are called in their order; the first that returns tensors
wins.

Two mechanisms differentiate a step. A tape records the operation of the model, with the operands of the model and the
outputs of the rule, after the operations of the rule. Therefore a tape calls the gradient that TensorFlow registered
for the operation, in a graph and in eager code. But TensorFlow differentiates loops and branches by the graph of the
body: it finds the operations of the rule, and calls their gradients. `gradient` says what loops and branches use:

- `"registered"`: TensorFlow's gradient of the operation. The operations of the rule have the same derivative.
- a function: the gradient that loops and branches get in place of TensorFlow's. It replaces the gradient of those
  operations of the rule that have the type of the rewritten operation.
- `"none"`: TensorFlow registers no gradient, or the rule refuses the operation.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private

Tensors: TypeAlias = tf.Tensor | list[tf.Tensor] | None
Gradient: TypeAlias = Literal["registered", "none"] | Callable[..., Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewriteRule:
    """A rewrite rule. `rewrite_rule` documents the fields."""

    operations: tuple[str, ...]
    function: Callable[..., Tensors]
    graph: bool
    eager: bool
    gradient: Gradient
    fault: str
    cases: tuple[str, ...]
    when: Callable[..., bool] | None = None
    order: int = 0
    sizes: Literal["known", "any", "unknown"] = "known"
    local: Literal["no", "also", "only"] = "no"

    @property
    def name(self) -> str:
        """The module and the function, such as "scatters.top_k"."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    def applies(self, call: _private.Call, mesh: dtensor.Mesh) -> bool:
        """Return whether the condition of the rule holds for an operation."""
        return self.when is None or bool(_call(self.when, call, mesh))

    def rewrite(self, call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
        """Return the tensors that replace the outputs of an operation, or None to leave the operation."""
        with self._gradient_override(call):
            result = _call(self.function, call, mesh)
        return [result] if tf.is_tensor(result) else result

    def _gradient_override(self, call: _private.Call) -> contextlib.AbstractContextManager[None]:
        if not callable(self.gradient) or not call.outputs:
            return contextlib.nullcontext()
        override: contextlib.AbstractContextManager[None] = call.outputs[0].graph.gradient_override_map(
            {call.type: _gradient_name(self)}
        )
        return override


# The rules of each operation, in their order.
_rules: dict[str, tuple[RewriteRule, ...]] = {}


def rewrite_rule(
    *operations: str,
    graph: bool,
    eager: bool,
    gradient: Gradient,
    fault: str,
    cases: tuple[str, ...],
    when: Callable[..., bool] | None = None,
    order: int = 0,
    sizes: Literal["known", "any", "unknown"] = "known",
    local: Literal["no", "also", "only"] = "no",
) -> Callable[[_Function], _Function]:
    """Register a function as the rewrite rule of operations.

    Args:
        *operations: Types of operations, such as `"TopKV2"`.
        graph: True to apply the rule while a step is traced.
        eager: True to apply the rule in an eager step.
        gradient: The right gradient. A function sets the gradient in loops and branches only (see the module).
        fault: How DTensor fails with the operation, for the table in docs/design.md.
        cases: Names of the tests of the rule, in tests/operations/rewrite_cases.py.
        when: A function with a docstring and the parameters of the rule. The rule is skipped if the function returns
            False.
        order: The place of the rule among the rules of an operation: smaller numbers come first. Two rules that may
            apply to one call must differ in it.
        sizes: `"known"`: the rule is skipped if the shape of an operand or result depends on values. `"any"`: the rule
            applies to all shapes. `"unknown"`: the rule applies only if a shape depends on values, to operands that
            `unsized.rewrite` has replicated, after all other rules.
        local: `"no"`: the rule is skipped for operations on local shards (`local_map`). `"only"`: the rule applies to
            these operations alone. `"also"`: the rule applies to all operations.

    Raises:
        ValueError: No operation, neither graph nor eager, another rule with the same order, or a condition without a
            docstring.
    """

    def register(function: _Function) -> _Function:
        rule = RewriteRule(
            operations=operations, function=function, graph=graph, eager=eager, gradient=gradient, fault=fault,
            cases=cases, when=when, order=order, sizes=sizes, local=local,
        )  # fmt: skip
        _check(rule)
        if callable(gradient):
            tf.RegisterGradient(_gradient_name(rule))(gradient)
        for operation in operations:
            _rules[operation] = tuple(sorted((*_rules.get(operation, ()), rule), key=_place))
        return function

    return register


def _check(rule: RewriteRule) -> None:
    if not rule.operations or not (rule.graph or rule.eager):
        raise ValueError(f"Rewrite rule {rule.name} needs an operation, and graph=True or eager=True.")
    if rule.when is not None and not inspect.getdoc(rule.when):
        raise ValueError(f"The condition of rewrite rule {rule.name} needs a docstring, for the table of rules.")
    for operation in rule.operations:
        for other in _rules.get(operation, ()):
            if other.order == rule.order and _compete(rule, other):
                raise ValueError(
                    f"Rewrite rules {other.name} and {rule.name} of operation '{operation}' have the same order. Give "
                    f"the second one another order=. Received: order={rule.order}"
                )


def _place(rule: RewriteRule) -> tuple[bool, bool, int]:
    return rule.sizes == "unknown", rule.local == "only", rule.order


def _compete(one: RewriteRule, other: RewriteRule) -> bool:
    """Return whether two rules of an operation may meet: in one mode, for shapes of one kind, in one place."""
    in_one_mode = (one.graph and other.graph) or (one.eager and other.eager)
    apart = ("unknown" in (one.sizes, other.sizes) and one.sizes != other.sizes) or {one.local, other.local} == {
        "no",
        "only",
    }
    return in_one_mode and not apart


def first_rewrite(rules: Iterable[RewriteRule], call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Try the rules in their order, and return the outputs of the first rule that rewrites the operation, or None."""
    for rule in rules:
        if rule.applies(call, mesh):
            result = rule.rewrite(call, mesh)
            if result is not None:
                return result
    return None


def rules_of(operation: str, *, eager: bool | None = None) -> tuple[RewriteRule, ...]:
    """Return the rules of an operation in their order: for eager steps, for graphs, or all."""
    rules = _rules.get(operation, ())
    return rules if eager is None else tuple(rule for rule in rules if (rule.eager if eager else rule.graph))


def rewritten_operations(*, eager: bool | None = None) -> frozenset[str]:
    """Return the types of the operations that have a rule: in eager steps, in graphs, or at all."""
    return frozenset(operation for operation in _rules if rules_of(operation, eager=eager))


def all_rules() -> list[RewriteRule]:
    """Return each rule once, by operation."""
    return list({id(rule): rule for rules in _rules.values() for rule in rules}.values())


def _gradient_name(rule: RewriteRule) -> str:
    return f"Tfshard{rule.name.title().replace('.', '').replace('_', '')}"


def _call(function: Callable[..., Any], call: _private.Call, mesh: dtensor.Mesh) -> Any:
    """Call a rule or a condition, with the mesh if it takes one."""
    return function(call, mesh) if _takes_mesh(function) else function(call)


@functools.cache
def _takes_mesh(function: Callable[..., Any]) -> bool:
    return len(inspect.signature(function).parameters) > 1
