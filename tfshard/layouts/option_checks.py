"""Check the values of options. An error names the option, what it takes, and what it was given."""

import enum
from typing import Any, TypeVar

from tfshard.errors import ShardingError, StrategyError

Choice = TypeVar("Choice", bound=enum.Enum)


def positive_integer(name: str, value: Any, error: type[ShardingError] = StrategyError) -> int:
    """Return the value of an option that takes a positive integer.

    Args:
        name: The name of the option.
        value: The value.
        error: The type of the error.

    Raises:
        ShardingError: The value is no positive integer. The error has the type `error`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise error(f"{name} must be a positive integer. Received: {name}={value!r}")
    return value


def choice(choices: type[Choice], name: str, value: Any) -> Choice:
    """Return the member of an enumeration with the value of an option.

    Args:
        choices: The enumeration.
        name: The name of the option.
        value: The value.

    Raises:
        StrategyError: No member has the value.
    """
    found = next((each for each in choices if each.value == value), None)
    if found is None:
        raise StrategyError(
            f"{name} must be one of {tuple(each.value for each in choices)}. Received: {name}={value!r}"
        )
    return found
