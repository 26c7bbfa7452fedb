"""Write the tables of rewrite rules in docs/design.md and docs/operations.md from the registry.

`python -m tools.site.rules` prints how the tables differ from the registry, `--write` writes them.
"""

import argparse
import difflib
import inspect
import pathlib
import sys
from collections.abc import Iterable

from tfshard.operations import registry, rewrites
from tfshard.operations.registry import Rule

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MARK = "<!-- `python -m tools.site.rules --write` writes this table. -->\n\n"


def summary(function: object) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".")


def codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def condition(rule: Rule) -> str:
    """Return when a rule applies, in words."""
    parts = [] if rule.when is None else [summary(rule.when)]
    if rule.sizes == "unknown":
        parts.append("A shape depends on values")
    return "; ".join(parts) or "always"


def modes(rule: Rule) -> str:
    return " and ".join(mode for mode, has in (("graph", rule.graph), ("eager", rule.eager)) if has)


def gradient(rule: Rule) -> str:
    return rule.gradient if isinstance(rule.gradient, str) else f"`{rule.gradient.__name__}` in loops and branches"


def by_module() -> list[Rule]:
    """Return the rules in the order of their modules and of their lines."""
    modules = [module.__name__ for module in rewrites.MODULES]

    def place(rule: Rule) -> tuple[int, int, str]:
        line = inspect.unwrap(rule.function).__code__.co_firstlineno
        return modules.index(rule.function.__module__), line, rule.sizes

    return sorted(registry.all_rules(), key=place)


def design_table() -> str:
    """Return a row for each rule: what DTensor does, and what the rule does instead."""
    rows = [
        "| operations | what DTensor does | the rule | when | gradient | in | rule |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule in by_module():
        cells = (
            codes(rule.operations), rule.fault, summary(rule.function), condition(rule), gradient(rule), modes(rule),
            f"`{rule.name}`",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def operations_table() -> str:
    """Return a row for each list of rules, with the operations that have the list."""
    lists: dict[tuple[str, ...], list[str]] = {}
    for operation in sorted(registry.rewritten_operations()):
        found = tuple(f"{rule.name} ({modes(rule)})" for rule in registry.rules_of(operation))
        lists.setdefault(found, []).append(operation)
    rows = ["| TensorFlow operations | rules, the first that applies wins |", "|---|---|"]
    for names, operations in sorted(lists.items(), key=lambda item: item[1]):
        rules = ", ".join(
            f"{number}. `{name.partition(' ')[0]}` {name.partition(' ')[2]}" for number, name in enumerate(names, 1)
        )
        rows.append(f"| {codes(operations)} | {rules} |")
    return "\n".join(rows) + "\n"


TABLES = {"design.md": design_table, "operations.md": operations_table}


def page(name: str) -> str:
    """Return a page of the docs with the table of today."""
    before, mark, rest = (DOCS / name).read_text().partition(MARK)
    assert mark, f"docs/{name} has no table of rewrite rules."
    return before + mark + TABLES[name]() + "\n" + rest.partition("\n\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Write the tables.")
    write = parser.parse_args().write
    for name in TABLES:
        text = page(name)
        if write:
            (DOCS / name).write_text(text)
        else:
            sys.stdout.writelines(
                difflib.unified_diff((DOCS / name).read_text().splitlines(True), text.splitlines(True))
            )


if __name__ == "__main__":
    main()
