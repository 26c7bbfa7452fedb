"""The rewrite rule of Einsum with an ellipsis ("Broadcasting is unimplemented for einsum")."""

import string

import tensorflow as tf

from tfshard import _private
from tfshard.operations.registry import rewrite_rule


def has_ellipsis(call: _private.Call) -> bool:
    """The equation has an ellipsis, and the ranks of all operands are known."""
    return "..." in _equation(call) and all(each.shape.rank is not None for each in call.inputs)


def _equation(call: _private.Call) -> str:
    equation = call.get_attr("equation")
    return equation.decode() if isinstance(equation, bytes) else str(equation)


@rewrite_rule(
    "Einsum", graph=True, eager=False, gradient="registered", when=has_ellipsis, sizes="unknown",
    fault="refuses it", cases=("einsum of unknown size",),
)  # fmt: skip
@rewrite_rule(
    "Einsum", graph=True, eager=True, gradient="registered", when=has_ellipsis,
    fault="refuses it", cases=("einsum with an ellipsis", "einsum in an eager step"),
)  # fmt: skip
def spell_ellipsis(call: _private.Call) -> tf.Tensor:
    """Write a letter for each dim that the ellipsis stands for, and squeeze dims of size 1 that are broadcast."""
    equation = _equation(call)
    sources, result = equation.split("->")
    terms = sources.split(",")
    # The dims of an ellipsis are matched from behind.
    hidden = [
        list(tensor.shape)[term.index(".") :][: tensor.shape.rank - len(term.replace("...", ""))] if "." in term else []
        for term, tensor in zip(terms, call.inputs, strict=True)
    ]
    count = max(map(len, hidden))
    free = [letter for letter in string.ascii_letters if letter not in equation][:count]
    # An unknown size (None) equals the other sizes, or the size of a dim that the operands are broadcast along.
    each_dim = [[dims[i - count] for dims in hidden if len(dims) >= count - i] for i in range(count)]
    is_one = [all(size == 1 for size in sizes) for sizes in each_dim]
    tensors, spelled = [], []
    for term, tensor, dims in zip(terms, call.inputs, hidden, strict=True):
        letters = free[count - len(dims) :]
        broadcast = [i for i, size in enumerate(dims) if size == 1 and not is_one[count - len(dims) + i]]
        if broadcast:
            start = term.index(".")
            tensor = tf.squeeze(tensor, [start + i for i in broadcast])
        kept = [letter for i, letter in enumerate(letters) if i not in broadcast]
        tensors.append(tensor)
        spelled.append(term.replace("...", "".join(kept)))
    return tf.raw_ops.Einsum(inputs=tensors, equation=",".join(spelled) + "->" + result.replace("...", "".join(free)))
