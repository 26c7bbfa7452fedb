"""Rewrite rules that refuse operations. The message says what to do instead."""

from tfshard import _private
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import origins
from tfshard.operations.registry import rewrite_rule

_EAGERLY = "Compile the model with run_eagerly=True"
_REFUSED = {
    "PrintV2": f"tf.print: every device would print. {_EAGERLY}, where it prints once, or print in a callback",
    **dict.fromkeys(
        ("PyFunc", "PyFuncStateless", "EagerPyFunc"),
        "a Python function (tf.py_function, tf.numpy_function): every device would call it on its local values. "
        "Write it with TensorFlow operations, or do it in the input pipeline",
    ),
}


@rewrite_rule(
    *_REFUSED, graph=True, eager=False, gradient="none", sizes="any",
    fault="refuses them without naming the place in the model", cases=("print",),
)  # fmt: skip
def refuse(call: _private.Call) -> None:
    """Refuse the operation, and name the layer and the line. In an eager step `tf.print` prints once."""
    place = origins.find(call.type)
    raise UnsupportedOperationError(
        f"A compiled step on a mesh cannot have {_REFUSED[call.type]}. It is in {place[-1] if place else 'the step'}"
    )
