"""The code in the documents: blocks of Python, which run, and commands, which exist.

A block that cannot run has `<!-- not run: REASON -->` in the line above it. An invisible comment defines names that a
page assumes, such as the reader's data. The comment runs at its place in the page:

    <!-- setup
    x, y = ...
    -->
"""

import ast
import dataclasses
import pathlib
import re
import shlex
import textwrap

from tfshard import command_line

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
# Foreign programs. They end a command of ours on the same line.
_SHELL = {"sudo", "export", "srun", "pip", "python", "python3"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A block of Python.

    Attributes:
        line: The number of its first line in the page, from 1.
        code: The code without the page's indentation.
        reason: The reason why it is not run; None if it is run.
    """

    line: int
    code: str
    reason: str | None


def python_blocks(text: str) -> list[Block]:
    """Return the blocks of a page, including setup comments, in order."""
    found = []
    for block in _BLOCK.finditer(text):
        name = "setup" if block["setup"] is not None else "code"
        if name == "setup" or block["language"] == "python":
            line = text.count("\n", 0, block.start(name)) + 1
            found.append(Block(line=line, code=textwrap.dedent(block[name]), reason=block["reason"]))
    return found


def program(text: str) -> str:
    """Return the runnable blocks of a page as one program. Each block keeps its line numbers."""
    lines: list[str] = []
    for block in python_blocks(text):
        if block.reason is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def plain_lines(text: str) -> list[str]:
    """Return the lines of blocks that are not marked as Python, and of indented blocks."""
    blocks = [block for block in _BLOCK.finditer(text) if block["language"] in ("", "bash")]
    lines = [line for block in blocks for line in (block["code"] or "").splitlines()]
    return lines + re.findall(r"^    (\S.*)$", _BLOCK.sub("", text), re.MULTILINE)


def shown_code(text: str) -> list[str]:
    """Return the lines of blocks that are not marked as Python, and the inline code."""
    # A command may be broken over two lines of a paragraph.
    in_lines = re.findall(r"(?<!`)`([^`]+)`(?!`)", _BLOCK.sub("", text))
    return plain_lines(text) + [" ".join(each.split()) for each in in_lines]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return this repository's commands in a page: the program or `tfshard <command>`, and its flags."""
    found = []
    for line in shown_code(text):
        try:
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        except ValueError:  # An apostrophe: prose.
            continue
        while words and (words[0] in _SHELL or words[0] == "--ntasks-per-node=1"):
            words = words[1:]
        if words[:1] == ["-m"]:
            words = words[1:]
        if not words:
            continue
        if words[0] == "tfshard" and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]+", words[1]):
            found += _split(f"tfshard {words[1]}", words[2:])
        elif re.fullmatch(r"(tools|tests|examples)/[\w/]+\.(py|sh)|tools\.[\w.]+", words[0]):
            found += _split(words[0], words[1:])
    return found


def _split(name: str, words: list[str]) -> list[tuple[str, list[str]]]:
    """Split a command that starts another command, with the flags of each."""
    for i, word in enumerate(words):
        if re.fullmatch(r"examples/\w+\.py|train\.py", word) or word == "--module" or word.endswith("=--module"):
            mine = [each for each in words[:i] if each.startswith("--")]
            mine += [word.removesuffix("=--module")] if word.startswith("--") else []
            inner = words[i:] if not word.startswith("--") else words[i + 1 :]
            if inner[:1] == ["tfshard"]:
                return [(name, mine), *_split(f"tfshard {inner[1]}", inner[2:])]
            return [(name, mine)] + ([_plain(inner)] if inner[0] != "train.py" else [])
    return [_plain([name, *words])]


def _plain(words: list[str]) -> tuple[str, list[str]]:
    return words[0], [word for word in words[1:] if word.startswith("--") and word != "--"]


def flags_of(name: str) -> set[str] | None:
    """Return the flags that a program takes, or None if the program does not exist.

    Reads them from the program's source, and from the files of tools/ and examples/ that it imports or starts.
    """
    if name.startswith("tfshard "):
        command = command_line.COMMANDS.get(name.split()[1])
        return None if command is None else set(command.options())
    path = ROOT / (name if "/" in name else name.replace(".", "/"))
    if not path.suffix:
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return _flags_in(path, set()) if path.is_file() else None


def _flags_in(path: pathlib.Path, seen: set[pathlib.Path]) -> set[str]:
    if path in seen:
        return set()
    seen.add(path)
    text = path.read_text()
    found = set(re.findall(r"DEFINE_\w+\(\s*\"([\w-]+)\"", text))
    found |= set(re.findall(r"add_argument\(\s*\"--([\w-]+)\"", text))
    if path.suffix == ".sh":
        found |= set(re.findall(r"== --(\w+)", text))
        found |= {"numprocesses", "dist"} if "pytest" in text else set()
        others = re.findall(r"(?:tools|tests|examples)/[\w/]+\.py", text)
        others += [each.replace(".", "/") + ".py" for each in re.findall(r"-m (tools\.[\w.]+)", text)]
    else:
        others = _imported(path, ast.parse(text))
    for other in others:
        if (ROOT / other).is_file():
            found |= _flags_in(ROOT / other, seen)
    return found


def _imported(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """Return the files of tools/, examples/ and its folder that a program may import."""
    found = []
    here = str(path.parent.relative_to(ROOT))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            file = name.replace(".", "/") + ".py"
            found += [file] if name.startswith("tools.") else [f"{here}/{file}", f"examples/{file}"]
    return found
