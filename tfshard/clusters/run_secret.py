"""Read the run's secret from a file or the environment, never from the command line, which other users can see."""

import os
import pathlib
import stat
from collections.abc import Mapping

from tfshard.errors import LaunchError

SECRET_VARIABLE, FILE_VARIABLE = "TFSHARD_SECRET", "TFSHARD_SECRET_FILE"
# The shortest secret for several members.
LEAST_CHARACTERS = 32


def read_secret(path: str | None, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the run's secret, or None if there is none.

    Args:
        path: The file. By default the file that TFSHARD_SECRET_FILE names, or else the value of TFSHARD_SECRET.
        environment: The environment variables. By default those of this process.

    Raises:
        LaunchError: The file does not exist, or other users may read it.
    """
    environment = os.environ if environment is None else environment
    path = path or environment.get(FILE_VARIABLE)
    if path is None:
        return environment.get(SECRET_VARIABLE) or None
    try:
        mode = os.stat(path).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LaunchError(
                f"Other users can read the secret file. Run: chmod 600 {path}. Received: mode {stat.filemode(mode)}"
            )
        return pathlib.Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"The secret file cannot be read: {error}. Received: secret_file={path!r}") from None
