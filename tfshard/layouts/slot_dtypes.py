"""SlotDtypes: in which dtype the optimizer slots of each variable rest."""

import dataclasses
import math
import re
from collections.abc import Mapping

from tfshard.errors import StrategyError
from tfshard.layouts.layout_map import VariableSpec

# What users may give: one for all variables, or by patterns of their paths.
SlotDtype = str | Mapping[str, str] | None

_DTYPES = ("float32", "bfloat16", "int8")
# Variables of fewer elements keep float32 slots where others have 8 bits: they are few bytes, and sensitive.
WIDE_BELOW_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDtypes:
    """In which dtype the moments of float32 variables rest.

    Attributes:
        rules: Regular expressions of whole paths, with a dtype each. The first that matches decides; without any,
            slots keep their own dtype.
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: SlotDtype) -> "SlotDtypes":
        """What a user asked for.

        Raises:
            StrategyError: An unknown dtype, or a pattern that is no regular expression.
        """
        rules = dict(given) if isinstance(given, Mapping) else {} if given is None else {".*": given}
        for pattern, dtype in rules.items():
            if dtype not in _DTYPES:
                names = ", ".join(map(repr, _DTYPES))
                raise StrategyError(
                    f"slot_dtype must be None, or one of {names}, or one of them for each pattern of variables' paths. "
                    f"Received: slot_dtype={given!r}"
                )
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise StrategyError(
                    f"A pattern in slot_dtype is no regular expression: {error}. Received: slot_dtype={given!r}"
                ) from error
        return cls(rules=tuple(rules.items()))

    def of_variable(self, spec: VariableSpec) -> str | None:
        """The dtype in which the moments of a variable rest; None for their own."""
        if not spec.trainable or spec.dtype != "float32":
            return None
        dtype = next((dtype for pattern, dtype in self.rules if re.fullmatch(pattern, spec.path)), "float32")
        is_small = dtype == "int8" and math.prod(spec.shape) < WIDE_BELOW_ELEMENTS
        return None if dtype == "float32" or is_small else dtype


# All slots keep their own.
OWN = SlotDtypes()
