"""Show examples of docstrings on the site: render `>>>` lines as blocks of code. An extension of griffe."""

import re
from typing import Any

import griffe

# From the first line with a prompt to the next empty line.
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring with its examples as Markdown blocks of code."""
    text = _EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)
    return re.sub(r"^Examples?:$(?=\n\n)", "**Example**", text, flags=re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
