"""CSV files and TensorBoard as outputs of measurements."""

import csv
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfshard.errors import TelemetryError


class CsvFile:
    """Appends a row for each epoch to a CSV file. A restarted run continues its file.

    Args:
        path: The file.
        names: The names of the columns after the epoch and the time (UTC).

    Raises:
        TelemetryError: The file exists and has other columns.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]):
        self._path = pathlib.Path(path)
        self._columns = ["epoch", "time", *names]
        header = self._header()
        if header and header != self._columns:
            raise TelemetryError(
                f"'{self._path}' does not have the columns that Telemetry writes, {self._columns}. Choose another "
                f"file, or move this file away. Received: a file with the columns {header}"
            )
        self._is_new = not header

    def _header(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open(newline="") as file:
            return next(csv.reader(file), [])

    def write(self, epoch: int, values: Mapping[str, float]) -> None:
        """Append a row. Missing values leave their column empty."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            if self._is_new:
                writer.writeheader()
            writer.writerow({"epoch": epoch, "time": now, **values})
        self._is_new = False


class Board:
    """Writes `telemetry/...` scalars for TensorBoard, by epoch.

    Works without TensorBoard's package, which `tf.summary.scalar` needs.

    Args:
        log_dir: The directory of a TensorBoard.
    """

    _SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")

    def __init__(self, log_dir: str | os.PathLike[str]):
        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))

    def write(self, epoch: int, values: Mapping[str, float]) -> None:
        """Write the values of an epoch."""
        with self._writer.as_default(step=epoch):
            for name, value in values.items():
                tf.summary.write(f"telemetry/{name}", tf.constant(value, tf.float32), metadata=self._SCALAR)
        self._writer.flush()
