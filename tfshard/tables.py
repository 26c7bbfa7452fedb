"""Tables as text."""

import io
from typing import Any

import rich.console


def as_text(*parts: Any) -> str:
    """Rich tables and lines of text, printed 120 characters wide.

    >>> as_text("A line.", "Another.")
    'A line.\\nAnother.\\n'
    """
    out = io.StringIO()
    console = rich.console.Console(file=out, width=120)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return out.getvalue()
