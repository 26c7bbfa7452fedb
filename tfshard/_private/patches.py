"""Replace functions of TensorFlow and Keras for the whole process, and list the replacements.

Every replacement that outlives a context is made by `replace`. `tfshard doctor` prints `made()`, and
tests/test_patches.py compares it with what really differs in TensorFlow's and Keras's modules.
"""

import dataclasses
import inspect
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """A function or attribute of TensorFlow or Keras that tfshard replaced in this process.

    Attributes:
        target: The attribute, with its module and class.
        reason: What the replacement does that the original does not.
    """

    target: str
    reason: str


_made: dict[str, Patch] = {}


def replace(owner: Any, name: str, value: Any, reason: str) -> None:
    """Set an attribute of a module, class or object of TensorFlow or Keras for the rest of the process.

    Args:
        owner: The module, class or object.
        name: The attribute.
        value: The replacement.
        reason: What the replacement does, for `tfshard doctor`.
    """
    setattr(owner, name, value)
    if inspect.ismodule(owner):
        place = owner.__name__
    else:
        cls = owner if inspect.isclass(owner) else type(owner)
        place = f"{cls.__module__}.{cls.__qualname__}"
    target = f"{place}.{name}"
    _made.setdefault(target, Patch(target=target, reason=reason))


def made() -> list[Patch]:
    """Return the replacements in this process, in the order in which they were made."""
    return list(_made.values())
