"""SlotDtypes: the dtype in which the optimizer slots of each variable are stored."""

import dataclasses
import math

from tfshard.layouts import dtype_rules
from tfshard.layouts.dtype_rules import DtypeByPath, Rules
from tfshard.layouts.layout_map import VariableSpec

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

    rules: Rules = ()

    @classmethod
    def of(cls, given: DtypeByPath) -> "SlotDtypes":
        """Convert a user's argument.

        Raises:
            StrategyError: An unknown dtype, or an invalid regular expression.
        """
        return cls(rules=dtype_rules.rules_from(given, "slot_dtype", _DTYPES))

    def of_variable(self, spec: VariableSpec) -> str | None:
        """Return the dtype in which the moments of a variable are stored; None if they keep their dtype."""
        if not spec.trainable or spec.dtype != "float32":
            return None
        dtype = dtype_rules.dtype_at(spec.path, self.rules) or "float32"
        is_small = dtype == "int8" and math.prod(spec.shape) < WIDE_BELOW_ELEMENTS
        return None if dtype == "float32" or is_small else dtype


# All slots keep their dtype.
OWN = SlotDtypes()
