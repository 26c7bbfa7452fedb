"""Read items in a thread, ahead of their use.

A `ReadAhead` has no thread of its own that must be stopped. Taking an item starts a thread, which ends as soon as
enough items wait. A loop that stops early therefore leaves nothing behind but the items that wait, which are freed
with the `ReadAhead`.
"""

import atexit
import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

# At its end, a program waits this long for threads that still read. Python stops a thread that returns to it later.
_SECONDS_AT_EXIT = 5.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ReadAhead(Generic[_Item]):
    """Calls a function ahead of the use of its results. Results come in the order of the calls.

    An exception is the result of its call: `peek` and `take` raise it in the caller's thread, with its traceback. No
    call follows until they have raised it.

    Attributes:
        depth: How many items may wait, including one that is being read. 0 reads an item when it is taken.
    """

    def __init__(self, read: Callable[[], _Item], depth: int):
        self.depth = depth
        self._read = read
        self._waiting: collections.deque[_Read[_Item]] = collections.deque()
        self._changed = threading.Condition()
        self._is_reading = False
        self._is_closed = False

    def peek(self) -> _Item:
        """Return the next item without removing it."""
        if self._is_reading:
            with self._changed:
                while self._is_reading and not self._waiting:
                    self._changed.wait()
        if not self._waiting:
            self._waiting.append(self._attempt())
        found = self._waiting[0]
        if found.error is not None:
            self._waiting.popleft()
            raise found.error
        return found.items[0]

    def take(self) -> _Item:
        """Return the next item, and read those that follow in a thread."""
        item = self.peek()
        if not self.depth:
            self._waiting.popleft()
            return item
        thread = threading.Thread(target=self._fill, name="tfshard-input", daemon=True)
        _wait_at_exit()
        with self._changed:
            self._waiting.popleft()
            if self._is_reading or self._is_full():
                return item
        _threads.add(thread)
        try:
            self._is_reading = True
            thread.start()
        except BaseException:  # Ctrl-C may also come once the thread reads.
            self._is_reading = thread.ident is not None and self._is_reading
            raise
        return item

    def waiting(self) -> list[_Item]:
        """Return the items that wait, once no thread reads. Raises an exception that waits, unless it ends the data."""
        with self._changed:
            while self._is_reading:
                self._changed.wait()
            errors = [each.error for each in self._waiting if each.error is not None]
            if errors and not isinstance(errors[0], StopIteration):
                self._waiting.pop()
                raise errors[0]
            return [item for each in self._waiting for item in each.items]

    def clear(self) -> None:
        """Drop the items that wait, once no thread reads."""
        with self._changed:
            while self._is_reading:
                self._changed.wait()
            self._waiting.clear()

    def close(self) -> None:
        """Drop the items that wait, and read no more ahead. Does not wait for a thread that reads."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()

    def _is_full(self) -> bool:
        has_failed = bool(self._waiting) and self._waiting[-1].error is not None
        return self._is_closed or has_failed or len(self._waiting) >= self.depth

    def _fill(self) -> None:
        while True:
            found = self._attempt()
            with self._changed:
                if not self._is_closed:
                    self._waiting.append(found)
                del found
                self._is_reading = not self._is_full()
                self._changed.notify_all()
                if not self._is_reading:
                    return

    def _attempt(self) -> "_Read[_Item]":
        try:
            return _Read((self._read(),), None)
        except BaseException as error:
            return _Read((), error)


class _Read(Generic[_Item]):
    """The result of a call: an item, or an error."""

    def __init__(self, items: tuple[_Item, ...], error: BaseException | None):
        self.items = items
        self.error = error


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(_join)


def _join() -> None:
    end = time.monotonic() + _SECONDS_AT_EXIT
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
