"""Einsum with an ellipsis, which DTensor does not expand ("Broadcasting is unimplemented for einsum"), by letters."""

import string

import tensorflow as tf

from tfshard import _private


def without_ellipsis(call: _private.Call) -> tf.Tensor | None:
    """The same with a letter for each dim that an ellipsis stands for, without dims of size 1 that are broadcast."""
    equation = call.get_attr("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    if "..." not in equation or not all(each.shape.is_fully_defined() for each in call.inputs):
        return None
    sources, result = equation.split("->")
    terms = sources.split(",")
    # The dims of an ellipsis are matched from behind.
    hidden = [
        list(tensor.shape)[term.index(".") :][: tensor.shape.rank - len(term.replace("...", ""))] if "." in term else []
        for term, tensor in zip(terms, call.inputs, strict=True)
    ]
    count = max(map(len, hidden))
    free = [letter for letter in string.ascii_letters if letter not in equation][:count]
    sizes = [max(dims[i - count] for dims in hidden if len(dims) >= count - i) for i in range(count)]
    tensors, spelled = [], []
    for term, tensor, dims in zip(terms, call.inputs, hidden, strict=True):
        letters = free[count - len(dims) :]
        wanted = sizes[count - len(dims) :]
        broadcast = [i for i, (size, full) in enumerate(zip(dims, wanted, strict=True)) if size != full]
        if broadcast:
            start = term.index(".")
            tensor = tf.squeeze(tensor, [start + i for i in broadcast])
        kept = [letter for i, letter in enumerate(letters) if i not in broadcast]
        tensors.append(tensor)
        spelled.append(term.replace("...", "".join(kept)))
    return tf.raw_ops.Einsum(inputs=tensors, equation=",".join(spelled) + "->" + result.replace("...", "".join(free)))
