"""Weak collections that tell their keys apart by identity.

A class of a user may define equality. Its objects may then be equal, and have no hash unless the class defines one.
Models, layers, optimizers and functions of users are therefore keys of these collections, and never of `weakref`'s.

No value may refer to its key: the collection would then keep the key alive.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, overload

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Default = TypeVar("_Default")


class WeakIdentityDict(Generic[_Key, _Value]):
    """A dict that drops an entry when nothing else refers to its key."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[_Key], _Value]] = {}

    def __setitem__(self, key: _Key, value: _Value) -> None:
        owner, number = weakref.ref(self), id(key)

        def drop(_: object) -> None:
            """Remove the entry. The interpreter calls this before another object can have the id."""
            collection = owner()
            if collection is not None:
                collection._entries.pop(number, None)

        self._entries[number] = weakref.ref(key, drop), value

    def __getitem__(self, key: _Key) -> _Value:
        return self._entries[id(key)][1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __iter__(self) -> Iterator[_Key]:
        """Iterate over the keys that live, in the order in which they were added."""
        # A list: other threads may change the dict.
        found = (reference() for reference, _ in list(self._entries.values()))
        return iter([key for key in found if key is not None])

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def get(self, key: _Key) -> _Value | None: ...
    @overload
    def get(self, key: _Key, default: _Default) -> _Value | _Default: ...
    def get(self, key: _Key, default: object = None) -> object:
        """Return the value of a key, or the default."""
        entry = self._entries.get(id(key))
        return default if entry is None else entry[1]

    def setdefault(self, key: _Key, default: _Value) -> _Value:
        """Return the value of a key. A missing key gets the default."""
        entry = self._entries.get(id(key))
        if entry is None:
            self[key] = default
            return default
        return entry[1]

    def pop(self, key: _Key) -> _Value | None:
        """Remove a key, and return its value. Returns None if the key is missing."""
        entry = self._entries.pop(id(key), None)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


class WeakIdentitySet(Generic[_Key]):
    """A set that drops an object when nothing else refers to it."""

    def __init__(self) -> None:
        self._members: WeakIdentityDict[_Key, None] = WeakIdentityDict()

    def add(self, member: _Key) -> None:
        """Add an object."""
        self._members[member] = None

    def update(self, members: Iterable[_Key]) -> None:
        """Add several objects."""
        for each in members:
            self.add(each)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[_Key]:
        """Iterate over the objects that live, in the order in which they were added."""
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
