"""Interface of a class that serves as a remote's backend, opened as `module:Class?argument=value`.

Arguments of an address are strings. The constructor gets them by name, except the options `zstd`
and `key`, which are for Ritornello (compression, and the file of the key that seals objects).
Methods are called from up to 8 threads. If a method raises an exception, but not
`errors.FatalError`, the call is repeated at most twice, within its deadline. `errors.FatalError`
means that an operator must act first: the call is not repeated, and the remote does not call the
backend for a minute. `TypeError`, `AttributeError`, a value of the wrong type, and more bytes from
`get` than requested count as `FatalError`.
"""

from collections.abc import Iterable
from typing import Any, Protocol


class Backend(Protocol):
    """A store of values (byte strings) by name. A name may be written again, with the same pages
    but not always with the same bytes: the last complete write wins.

    `ritornello doctor --backend module:Class` checks that a class meets this contract.
    """

    def get(self, name: str, start: int, stop: int | None) -> Any | None:
        """Returns `value[start:stop]` as bytes or another buffer; None if the name has no value."""

    def exists(self, name: str) -> bool:
        """Returns whether `name` has a value."""

    def set(self, name: str, value: bytes) -> None:
        """Stores a value. Until the call ends, readers see the whole new value, or what `name` had
        before: a whole value or none.
        """


class FullBackend(Backend, Protocol):
    """Adds the methods that `ritornello remote stat`, `fsck` and `gc` use."""

    def delete(self, name: str) -> None:
        """Removes the value of `name`, if the name has a value."""

    def list(self, prefix: str) -> Iterable[tuple[str, int, float]]:
        """Returns name, size in bytes and modification time in seconds since 1970 of every value
        whose name begins with `prefix`.
        """
