"""The program of each process of `tfshard.spawn`."""

import contextlib
import os
import pathlib
import sys
import traceback

import cloudpickle

from tfshard.devices import clients, startup
from tfshard.launch.spawning import CALL, ERROR, RESULT


def main(folder: pathlib.Path) -> None:
    """Call the function and write its result, or its error."""
    client = os.environ["TFSHARD_CLIENT_ID"]
    try:
        path, function, args = cloudpickle.loads((folder / CALL).read_bytes())
        sys.path[:] = [*dict.fromkeys((*path, *sys.path))]
        result = function(*args)
        # A function that trains nothing and makes no tensor joins the run here, so that all end together.
        startup.initialize()
        _write(folder / f"{RESULT}{client}", result)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        pickled = None
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
        _write(folder / f"{ERROR}{client}", (text, type(error).__name__, pickled))
        raise


def _write(file: pathlib.Path, value: object) -> None:
    part = file.with_name(f"part-{file.name}")
    part.write_bytes(cloudpickle.dumps(value))
    part.rename(file)


if __name__ == "__main__":
    assert clients.is_to_join() or clients.here().is_launched, "It is started by tfshard.spawn."
    main(pathlib.Path(sys.argv[1]))
