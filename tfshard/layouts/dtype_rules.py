"""Dtypes that users choose by patterns of variables' paths: of stored slots, and of gathers."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tfshard.errors import StrategyError

# A user's argument: one dtype for all variables, or a dtype for each pattern of paths.
DtypeByPath: TypeAlias = str | Mapping[str, str] | None
# Regular expressions of full paths, with a dtype each. The first match decides.
Rules: TypeAlias = tuple[tuple[str, str], ...]


def rules_from(given: DtypeByPath, option: str, dtypes: Sequence[str]) -> Rules:
    """Check and pack a user's argument.

    Args:
        given: The argument.
        option: Its name, for messages.
        dtypes: The dtypes that users can choose.

    Raises:
        StrategyError: An unknown dtype, or an invalid regular expression.
    """
    rules = dict(given) if isinstance(given, Mapping) else {} if given is None else {".*": given}
    for pattern, dtype in rules.items():
        if dtype not in dtypes:
            names = ", ".join(map(repr, dtypes))
            raise StrategyError(
                f"{option} must be None, or one of {names}, or a mapping from patterns of variables' paths to "
                f"one of them. Received: {option}={given!r}"
            )
        try:
            re.compile(pattern)
        except (TypeError, re.error) as error:
            raise StrategyError(
                f"A pattern in {option} is not a regular expression: {error}. Received: {option}={given!r}"
            ) from error
    return tuple(rules.items())


def dtype_at(path: str, rules: Rules) -> str | None:
    """Return the dtype of the variable at `path`; None if no pattern matches."""
    return next((dtype for pattern, dtype in rules if re.fullmatch(pattern, path)), None)
