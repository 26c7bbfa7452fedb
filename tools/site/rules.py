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
from tfshard.operations.registry import RewriteRule

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MARK = "<!-- `python -m tools.site.rules --write` writes this table. -->\n\n"


def summary(function: object) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".")


def codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def condition(rule: RewriteRule) -> str:
    """Return when a rule applies, in words."""
    parts = [] if rule.when is None else [summary(rule.when)]
    if rule.sizes == "unknown":
        parts.append("A shape depends on values")
    return "; ".join(parts) or "always"


def modes(rule: RewriteRule) -> str:
    found = " and ".join(mode for mode, has in (("graph", rule.graph), ("eager", rule.eager)) if has)
    return found + (", unknown sizes" if rule.sizes == "unknown" else "") + (", local" if rule.local == "only" else "")


def gradient(rule: RewriteRule) -> str:
    return rule.gradient if isinstance(rule.gradient, str) else f"`{rule.gradient.__name__}` in loops and branches"


def by_module() -> list[RewriteRule]:
    """Return the rules in the order of their modules and of their lines."""
    rules = registry.all_rules()
    core = [module.__name__ for module in rewrites.MODULES]
    extensions = sorted({rule.function.__module__ for rule in rules} - {*core})
    modules = [*core, *extensions]

    def place(rule: RewriteRule) -> tuple[int, int, str]:
        line = inspect.unwrap(rule.function).__code__.co_firstlineno
        return modules.index(rule.function.__module__), line, rule.sizes

    return sorted(rules, key=place)


def design_table() -> str:
    """Return a row for each rule: what DTensor does, and what the rule does instead."""
    names = ("operations", "what DTensor does", "instead", "when", "gradient", "in", "rule")
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for rule in by_module():
        cells = (
            codes(rule.operations), rule.fault, summary(rule.function), condition(rule), gradient(rule), modes(rule),
            f"`{rule.name}`",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def operations_table() -> str:
    """Return a row for each list of rules, with the operations that have the list."""
    lists: dict[str, list[str]] = {}
    for operation in sorted(registry.rewritten_operations()):
        found = enumerate(registry.rules_of(operation), 1)
        cell = ", ".join(f"{number}. `{rule.name}` ({modes(rule)})" for number, rule in found)
        lists.setdefault(cell, []).append(operation)
    rows = ["| TensorFlow operations | rules, the first that applies wins |", "|---|---|"]
    rows += [f"| {codes(names)} | {cell} |" for cell, names in sorted(lists.items(), key=lambda item: item[1])]
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
        today, text = (DOCS / name).read_text(), page(name)
        if write:
            (DOCS / name).write_text(text)
        else:
            sys.stdout.writelines(difflib.unified_diff(today.splitlines(True), text.splitlines(True)))


if __name__ == "__main__":
    main()
