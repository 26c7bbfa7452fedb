"""List every public name of tfshard with its parameters in public_api.txt, which test_public_api.py compares.

`python tests/public_api.py` rewrites the file. Its changes belong in the changelog.
"""

import inspect
import pathlib
import types
from collections.abc import Iterator

import tfshard

SNAPSHOT = pathlib.Path(__file__).parent / "public_api.txt"


def signature(of: object) -> str:
    """Return the names, kinds and defaults of parameters. Leaves annotations out, which may improve at any time."""
    try:
        found = inspect.signature(of, follow_wrapped=False)
    except (TypeError, ValueError):
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def of_class(name: str, cls: type) -> Iterator[str]:
    """Yield a class, its constructor, and its methods and properties from tfshard."""
    yield f"class {name}{signature(cls)}"
    for member in sorted(dir(cls)):
        owner = next((each for each in cls.__mro__ if member in vars(each)), object)
        if member.startswith("_") or not owner.__module__.startswith("tfshard"):
            continue
        value = vars(owner)[member]
        if isinstance(value, (staticmethod, classmethod)):
            yield f"  {type(value).__name__} {member}{signature(value.__func__)}"
        elif callable(value):
            yield f"  {member}{signature(value)}"
        else:
            yield f"  {member}"


def lines() -> Iterator[str]:
    """Yield the lines for `tfshard` and its public modules."""
    modules = {"tfshard": tfshard}
    for name in tfshard.__all__:
        value = getattr(tfshard, name)
        if isinstance(value, types.ModuleType):
            modules[f"tfshard.{name}"] = value
    for where, module in sorted(modules.items()):
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]  # fmt: skip
        for name in sorted(names):
            value = getattr(module, name)
            if isinstance(value, type):
                yield from of_class(f"{where}.{name}", value)
            elif callable(value):
                yield f"{where}.{name}{signature(value)}"
            elif not isinstance(value, types.ModuleType):
                yield f"{where}.{name}"


def text() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(text())
