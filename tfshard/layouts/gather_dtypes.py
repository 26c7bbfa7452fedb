"""GatherDtypes: the dtype in which a step gathers the shards of each parameter."""

import dataclasses
import math

from tfshard.layouts import dtype_rules
from tfshard.layouts.dtype_rules import DtypeByPath, Rules
from tfshard.layouts.layout_map import VariableSpec

# The dtypes of codes: one byte an element, with a float32 scale for each block.
CODED = ("int8", "float8_e4m3fn")
# The option for exact gathers, which send the elements.
EXACT = "float32"

# The dtypes of variables that a step may gather in codes.
_ELEMENTS = ("float32", "bfloat16", "float16")
# Smaller variables are gathered exactly. They take few bytes, and models are sensitive to their errors.
EXACT_BELOW_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherDtypes:
    """The dtype in which gathers send the shards of parameters.

    Attributes:
        rules: Regular expressions of full paths, with a dtype each. The first match decides. Without a match, a
            parameter is gathered exactly.
    """

    rules: Rules = ()

    @classmethod
    def of(cls, given: DtypeByPath) -> "GatherDtypes":
        """Convert a user's argument.

        Raises:
            StrategyError: An unknown dtype, or an invalid regular expression.
        """
        return cls(rules=dtype_rules.rules_from(given, "gather_dtype", (EXACT, *CODED)))

    @property
    def rounds(self) -> bool:
        """True if a rule rounds the variables that it matches."""
        return any(dtype != EXACT for _, dtype in self.rules)

    def of_variable(self, spec: VariableSpec) -> str | None:
        """Return the dtype of codes in which a variable is gathered; None for an exact gather.

        Vectors (biases, and the scales and offsets of normalizations) and small variables are gathered exactly.
        """
        dtype = dtype_rules.dtype_at(spec.path, self.rules) or EXACT
        is_matrix = len(spec.shape) > 1 and math.prod(spec.shape) >= EXACT_BELOW_ELEMENTS
        return dtype if dtype != EXACT and is_matrix and spec.dtype in _ELEMENTS else None
