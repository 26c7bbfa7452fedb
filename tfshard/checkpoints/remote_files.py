"""RemoteDirectory: a directory on a remote file system, through fsspec, with retries and errors that name the cause.

An object store has no rename of a directory and no sync. It has three properties that checkpoints rely on: an object
appears as a whole or not at all, an object that was written can be read at once, and a listing contains every object
that was written before the listing began. S3, Google Cloud Storage and Azure have all three. A file system such as HDFS
shows files while they are written; there, files that readers wait for are written under another name and renamed.

fsspec keeps listings in memory by default; that cache is turned off here.
"""

import contextlib
import datetime
import errno
import importlib.util
import os
import pathlib
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from tfshard.errors import CheckpointError, CheckpointStorageError

# A failed request is repeated for this long, with pauses that double from the first to the last.
RETRY_SECONDS = 60.0
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 8.0
# A multi-part upload sends parts of this size, and holds one part in memory.
_PART_BYTES = 16 << 20

# The extra of tfshard that installs the file system of a protocol, or the package itself.
_INSTALL = {
    "s3": "pip install 'tfshard[s3]'",
    "s3a": "pip install 'tfshard[s3]'",
    "gs": "pip install 'tfshard[gcs]'",
    "gcs": "pip install 'tfshard[gcs]'",
    "hdfs": "pip install pyarrow, with the libhdfs of Hadoop",
    "abfs": "pip install adlfs",
    "abfss": "pip install adlfs",
    "az": "pip install adlfs",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

# Errors of requests that may succeed when they are repeated.
_TRANSIENT_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "EIO", "ENETDOWN",
        "ENETUNREACH", "EPIPE", "EREMOTEIO", "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip
_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
# By name, because none of these packages has to be installed: aiohttp, botocore, requests, urllib3, httpx, google-auth.
_TRANSIENT_NAMES = frozenset(
    (
        "ChunkedEncodingError ClientConnectionError ClientOSError ClientPayloadError ConnectTimeout "
        "ConnectTimeoutError ConnectionClosedError EndpointConnectionError FSTimeoutError HTTPClientError "
        "IncompleteRead IncompleteReadError InvalidChunkLength ProtocolError ReadError ReadTimeout ReadTimeoutError "
        "RemoteProtocolError ResponseParserError ResponseStreamingError ServerDisconnectedError ServerTimeoutError "
        "TransportError WriteError"
    ).split()
)
_REFUSED_CREDENTIALS = frozenset(
    (
        "ClientAuthenticationError DefaultCredentialsError NoCredentialsError NoRegionError PartialCredentialsError "
        "ProfileNotFound SSOTokenLoadError TokenRetrievalError UnauthorizedSSOTokenError"
    ).split()
)

_Result = TypeVar("_Result")


def is_url(directory: object) -> bool:
    """Return True for the URL of a remote directory, False for a local path.

    >>> is_url("s3://bucket/run"), is_url("runs/a"), is_url("file:///runs/a")
    (True, False, False)
    """
    if not isinstance(directory, str) or "://" not in directory:
        return False
    return directory.partition("://")[0].lower() not in ("file", "local")


def local_path(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a local directory, which may be given as a `file://` URL."""
    found = _URL.match(directory) if isinstance(directory, str) else None
    return pathlib.Path(directory if found is None else found[2])


def is_transient(error: BaseException) -> bool:
    """Return True if the request that raised the error may succeed when it is repeated.

    Timeouts, lost connections, and the answers 408, 425, 429 and 5xx ("SlowDown" of S3 is a 503) are transient.
    """
    for each in _causes(error):
        if isinstance(each, (FileNotFoundError, PermissionError)):
            return False
        status = _status(each)
        if status is not None:
            return status in _TRANSIENT_STATUS
    for each in _causes(error):
        names = {kind.__name__ for kind in type(each).__mro__}
        if isinstance(each, (TimeoutError, ConnectionError)) or names & _TRANSIENT_NAMES:
            return True
        if isinstance(each, OSError) and each.errno in _TRANSIENT_ERRNO:
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client library contains."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore.
        found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = next(
            (value for name in ("status", "status_code", "code") if (value := getattr(error, name, None)) is not None),
            getattr(response, "status_code", None),
        )
    with contextlib.suppress(TypeError, ValueError):
        if 100 <= int(found) < 600:
            return int(found)
    return None


def _error(message: str) -> CheckpointStorageError:
    error: CheckpointStorageError = CheckpointStorageError(message)
    return error


class RemoteDirectory:
    """A directory on a remote file system. Names of files are relative to it, with `/`.

    Each method repeats requests that fail with a transient error, for `RETRY_SECONDS`.

    Args:
        url: The URL of the directory, with a protocol that fsspec knows.
        options: The keyword arguments of the fsspec file system.

    Attributes:
        url: The URL, without `/` at the end.

    Raises:
        CheckpointStorageError: The package of the protocol is missing, or the options are wrong.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None):
        found = _URL.match(url)
        if found is None or "::" in url or not found[2].strip("/"):
            raise CheckpointStorageError(
                "The URL of a remote directory must have a protocol, a bucket or host, and a directory, and no chain "
                f"('::'): 's3://bucket/run', 'gs://bucket/run', 'hdfs://host/run', 'memory://run'. Received: {url!r}"
            )
        self._protocol = found[1].lower()
        self.url = url.rstrip("/")
        self._fs, self._root = self._connect(dict(options or {}))

    def __repr__(self) -> str:
        return f"RemoteDirectory({self.url!r})"

    def _connect(self, options: dict[str, Any]) -> tuple[Any, str]:
        if importlib.util.find_spec("fsspec") is None:
            raise self._missing("fsspec")
        import fsspec

        if self._protocol not in fsspec.available_protocols():
            raise CheckpointStorageError(
                f"fsspec knows no protocol '{self._protocol}'. Protocols: {', '.join(fsspec.available_protocols())}. "
                f"Received: {self.url!r}"
            )
        options = {"use_listings_cache": False, "skip_instance_cache": True, **options}
        if self._protocol in ("s3", "s3a"):
            # Else botocore and s3fs repeat each request for up to a minute before tfshard sees the error.
            options.setdefault("config_kwargs", {"retries": {"mode": "standard", "total_max_attempts": 2}})
        try:
            fs, root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise self._missing(str(error)) from error
        except Exception as error:
            raise self._failure("opening the file system", error, 1) from error
        if self._protocol in ("s3", "s3a"):
            fs.retries = 2
        return fs, str(root).rstrip("/")

    def _missing(self, what: str) -> CheckpointStorageError:
        install = _INSTALL.get(self._protocol, "pip install 'tfshard[remote]', and the package that fsspec names")
        return _error(
            f"A package for '{self._protocol}://' is not installed: {what}. Install it: {install}. "
            f"Received: {self.url!r}"
        )

    def _failure(self, operation: str, error: BaseException, tries: int) -> CheckpointStorageError:
        names = {kind.__name__ for each in _causes(error) for kind in type(each).__mro__}
        if isinstance(error, PermissionError) or names & _REFUSED_CREDENTIALS:
            remedy = "Check the credentials, and their rights to list, read, write and delete there"
        elif isinstance(error, FileNotFoundError):
            remedy = "Check the URL: the bucket or the host must exist"
        elif is_transient(error):
            remedy = f"tfshard repeated the request for {RETRY_SECONDS:.0f} seconds; check the network and the server"
        else:
            remedy = "Check the URL and storage_options"
        told = re.sub(r"\s+", " ", str(error)) or "no message"
        return _error(
            f"The remote file system failed: {operation}, after {tries} {'try' if tries == 1 else 'tries'}: "
            f"{type(error).__name__}: {told:.300}. {remedy}. Received: {self.url!r}"
        )

    def retried(self, operation: str, call: Callable[[], _Result], *, seconds: float | None = None) -> _Result:
        """Call a function until it does not raise a transient error.

        Args:
            operation: The operation, for the message.
            call: The function. A repeated call must be harmless.
            seconds: How long to repeat. Default: `RETRY_SECONDS`.

        Raises:
            FileNotFoundError: The function raised it.
            CheckpointStorageError: Another error, or a transient error for too long.
        """
        end = time.monotonic() + (RETRY_SECONDS if seconds is None else seconds)
        pause, tries = _FIRST_PAUSE, 0
        while True:
            tries += 1
            try:
                return call()
            except FileNotFoundError:
                raise
            except CheckpointError:
                raise
            except Exception as error:
                wait = pause * random.uniform(0.5, 1.0)
                if not is_transient(error) or time.monotonic() + wait > end:
                    raise self._failure(operation, error, tries) from error
            time.sleep(wait)
            pause = min(2 * pause, _LAST_PAUSE)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def address(self, name: str) -> str:
        """Return the URL of a file or directory, for messages and for users."""
        return f"{self.url}/{name}" if name else self.url

    # --- reading

    def find(self, name: str = "") -> dict[str, int]:
        """Return the size of each file in this directory, or in a subdirectory of it, at any depth."""

        def call() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(name), detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root) + 1
            return {
                path[start:]: int(entry["size"] or 0)
                for path, entry in ((str(path), entry) for path, entry in found.items())
                if path.startswith(f"{self._path(name)}/") and not path.endswith("/")
            }

        return self.retried(f"listing '{name or '.'}'", call)

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of a file, or the bytes from `begin` up to `end`.

        Raises:
            FileNotFoundError: The file does not exist.
        """

        if begin is not None and begin == end:
            return b""

        def call() -> bytes:
            content: bytes = self._fs.cat_file(self._path(name), start=begin, end=end)
            if begin is not None and end is not None and len(content) > end - begin:
                # A server that ignores ranges.
                raise OSError(f"{len(content)} bytes instead of {end - begin}")
            return content

        return self.retried(f"reading '{name}'", call)

    def exists(self, name: str) -> bool:
        """Return True if a file exists."""

        def call() -> bool:
            self._fs.invalidate_cache()
            try:
                self._fs.info(self._path(name))
            except FileNotFoundError:
                return False
            return True

        return self.retried(f"looking for '{name}'", call)

    def modified(self, name: str) -> datetime.datetime | None:
        """Return when a file was written, by the server's clock; None if the file system does not tell."""

        def call() -> datetime.datetime | None:
            self._fs.invalidate_cache()
            try:
                found = self._fs.modified(self._path(name))
            except (NotImplementedError, KeyError, TypeError, ValueError, AttributeError):
                return None
            return found if isinstance(found, datetime.datetime) else None

        return self.retried(f"looking for '{name}'", call)

    # --- writing

    def write(
        self,
        name: str,
        content: bytes,
        *,
        publishes: bool = False,
        seconds: float | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a small file. An existing file is replaced.

        Args:
            name: The file.
            content: Its content.
            publishes: True if readers must never see a part of the file. Only object stores never show a part, so other
                file systems write the file under another name first.
            seconds: How long to repeat the request. Default: `RETRY_SECONDS`.
            before: Called before each request. An error of it ends the repetition.
        """

        def put() -> None:
            path = self._path(name)
            if not publishes or self._protocol in _OBJECT_STORES:
                self._fs.pipe_file(path, content)
                return
            if self._fs.exists(path):
                if self._fs.cat_file(path) == content:
                    return  # The request before this one was successful, but its reply was lost.
                self._fs.rm_file(path)
            self._fs.pipe_file(f"{path}{UNPUBLISHED}", content)
            self._fs.mv(f"{path}{UNPUBLISHED}", path)

        def call() -> None:
            before()
            with self._parents_made(name) as again:
                put()
            if again:
                put()

        try:
            self.retried(f"writing '{name}'", call, seconds=seconds)
        except FileNotFoundError as error:
            raise self._failure(f"writing '{name}'", error, 1) from error

    def upload(self, name: str, path: pathlib.Path) -> int:
        """Write a file with the content of a local file, in parts, and return its size.

        The file appears when its last part was sent.
        """
        size = path.stat().st_size

        def send() -> None:
            if size <= _PART_BYTES:
                self._fs.pipe_file(self._path(name), path.read_bytes())
                return
            with open(path, "rb") as source, self._fs.open(self._path(name), "wb", block_size=_PART_BYTES) as target:
                try:
                    while part := source.read(_PART_BYTES):
                        target.write(part)
                except BaseException:
                    # Closing the file would commit what was sent.
                    with contextlib.suppress(Exception):
                        target.discard()
                    with contextlib.suppress(AttributeError):
                        target.closed = True
                    raise

        def call() -> None:
            with self._parents_made(name) as again:
                send()
            # The reply to the request that ends an upload may be lost. The repeated request then finds no upload.
            if again and self._size(name) != size:
                send()
            if self._size(name) != size:
                raise ConnectionError(f"'{name}' does not have {size} bytes")

        try:
            self.retried(f"writing '{name}' ({size} bytes)", call)
        except FileNotFoundError as error:
            raise self._failure(f"writing '{name}'", error, 1) from error
        return size

    def _size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _parents_made(self, name: str) -> Iterator[list[bool]]:
        """Make the missing directories if a write fails because of them, and say that it has to be repeated.

        Buckets are never made.
        """
        again: list[bool] = []
        try:
            yield again
        except FileNotFoundError:
            parts = self._path(name).split("/")[:-1]
            for count in range(2, len(parts) + 1):
                parent = "/".join(parts[:count])
                if parent and not self._fs.exists(parent):
                    with contextlib.suppress(FileExistsError):
                        self._fs.mkdir(parent, create_parents=False)
            again.append(True)

    # --- deleting

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Files that do not exist are skipped."""
        for name in names:

            def call(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))

            self.retried(f"deleting '{name}'", call)

    def delete_directory(self, name: str) -> None:
        """Delete the empty directory `name`, on a file system that has directories."""
        with contextlib.suppress(Exception):  # An object store has none, and an empty directory does no harm.
            self._fs.rmdir(self._path(name))

    def abort_uploads(self, name: str) -> None:
        """Abort unfinished multi-part uploads of files in a directory. S3 keeps and bills their parts otherwise.

        Only file systems with the interface of s3fs can do this.
        """
        if not hasattr(self._fs, "call_s3") or not hasattr(self._fs, "split_path"):
            return
        bucket, prefix, _ = self._fs.split_path(self._path(name))
        prefix = f"{prefix}/" if prefix else ""

        def call() -> None:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for each in found.get("Uploads") or ():
                with contextlib.suppress(FileNotFoundError):
                    self._fs.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"]
                    )

        # Without this right the leftovers stay, which is harmless; a lifecycle rule of the bucket can delete them.
        with contextlib.suppress(CheckpointStorageError, FileNotFoundError):
            self.retried("aborting unfinished uploads", call, seconds=5.0)

    def probe(self, name: str, *, write: bool) -> None:
        """Check that the directory can be used.

        Args:
            name: The name of a file to write and to delete.
            write: True to write; False to list only.

        Raises:
            CheckpointStorageError: The directory cannot be used. The message names the reason.
        """
        self._fs.invalidate_cache()
        if write:
            self.write(name, b"", seconds=_PROBE_SECONDS)
            self.delete([name])
        try:
            self.retried("listing the directory", lambda: self._fs.ls(self._root), seconds=_PROBE_SECONDS)
        except FileNotFoundError as error:
            # A directory without files does not exist on an object store. Its bucket must.
            bucket = self._root.lstrip("/").split("/")[0]
            if self._protocol in _BUCKETS and not self.retried(
                "looking for the bucket", lambda: bool(self._fs.exists(bucket)), seconds=_PROBE_SECONDS
            ):
                raise self._failure("listing the directory", error, 1) from error


# How long the first requests are repeated, when a manager is made.
_PROBE_SECONDS = 20.0
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs"))
# An object appears as a whole when it is written.
_OBJECT_STORES = frozenset(
    ("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "ocilake", "oss", "r2", "s3", "s3a", "tos")
)
# The suffix of a file that will be renamed.
UNPUBLISHED = ".unpublished"
