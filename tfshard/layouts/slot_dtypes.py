"""SlotDtypes: the dtype in which the optimizer slots of each variable are stored."""

import dataclasses
import math
import re
from collections.abc import Mapping

from tfshard.errors import StrategyError
from tfshard.layouts.layout_map import VariableSpec

# A user's argument: one dtype for all variables, or a dtype for each pattern of paths.
SlotDtype = str | Mapping[str, str] | None

_DTYPES = ("float32", "bfloat16", "int8")
# Smaller variables keep float32 slots where others have 8 bits: their slots take few bytes, and are sensitive.
WIDE_BELOW_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDtypes:
    """The dtype in which the moments of float32 variables are stored.

    Attributes:
        rules: Regular expressions of full paths, with a dtype each. The first match decides. Without a match, slots
            keep their dtype.
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: SlotDtype) -> "SlotDtypes":
        """Convert a user's argument.

        Raises:
            StrategyError: An unknown dtype, or an invalid regular expression.
        """
        rules = dict(given) if isinstance(given, Mapping) else {} if given is None else {".*": given}
        for pattern, dtype in rules.items():
            if dtype not in _DTYPES:
                names = ", ".join(map(repr, _DTYPES))
                raise StrategyError(
                    f"slot_dtype must be None, or one of {names}, or a mapping from patterns of variables' paths to "
                    f"one of them. Received: slot_dtype={given!r}"
                )
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise StrategyError(
                    f"A pattern in slot_dtype is not a regular expression: {error}. Received: slot_dtype={given!r}"
                ) from error
        return cls(rules=tuple(rules.items()))

    def of_variable(self, spec: VariableSpec) -> str | None:
        """Return the dtype in which the moments of a variable are stored; None if they keep their dtype."""
        if not spec.trainable or spec.dtype != "float32":
            return None
        dtype = next((dtype for pattern, dtype in self.rules if re.fullmatch(pattern, spec.path)), "float32")
        is_small = dtype == "int8" and math.prod(spec.shape) < WIDE_BELOW_ELEMENTS
        return None if dtype == "float32" or is_small else dtype


# All slots keep their dtype.
OWN = SlotDtypes()
