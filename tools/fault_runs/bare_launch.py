"""Run `tfshard launch` without importing TensorFlow. It takes the flags for which `Launch` has a field.

python tools/fault_runs/bare_launch.py --num_processes=2 tools/fault_runs/bare_client.py --steps=20
"""

import dataclasses
import sys

import bare  # noqa: F401

from tfshard.clusters import run_secret
from tfshard.launch import hosts, launcher, options


def main(arguments: list[str]) -> int:
    """Launch, and return the exit code."""
    given: dict[str, object] = {}
    while arguments[0].startswith("--"):
        name, _, text = arguments.pop(0)[2:].partition("=")
        given[name] = text
    kinds = {field.name: float if field.type is float else int for field in dataclasses.fields(options.Launch)}
    names = str(given.pop("hosts")).split(",") if "hosts" in given else None
    index = int(str(given.pop("host_index"))) if "host_index" in given else None
    found = hosts.find_hosts(names, index)
    given.setdefault("port", found.port)
    launch = options.Launch(
        command=(sys.executable, *arguments), hosts=found.names, host_index=found.index, identity=found.identity,
        secret=run_secret.read_secret(None),
        **{name: kinds[name](str(text)) for name, text in given.items()},
    )  # fmt: skip
    return launcher.launch(launch)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        # The command line prints errors in this form.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
