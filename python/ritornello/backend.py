"""What a class must have to be a remote's backend, opened as `module:Class?argument=value`.

Arguments of an address are strings, and are given by name. Methods are called from several threads
at once. An exception costs the call, and is tried again while there is time; `errors.FatalError`
says that somebody must change something first, and the backend is left alone for a minute. A wrong
type says so too.
"""

from collections.abc import Iterable
from typing import Any, Protocol


class Backend(Protocol):
    """Named values, each written once: whoever writes a name again writes the same bytes.

    `ritornello doctor --backend module:Class` puts a class through everything it must do.
    """

    def get(self, name: str, start: int, stop: int | None) -> Any | None:
        """`value[start:stop]` (bytes, or another buffer) of the value; None if there is none."""

    def exists(self, name: str) -> bool:
        """Whether `name` has a value."""

    def set(self, name: str, value: bytes) -> None:
        """Gives `name` a value, which readers see whole or not at all."""


class FullBackend(Backend, Protocol):
    """With what `ritornello remote stat`, `fsck` and `gc` need."""

    def delete(self, name: str) -> None:
        """Takes the value of `name` away, if it has one."""

    def list(self, prefix: str) -> Iterable[tuple[str, int, float]]:
        """Name, bytes and seconds since 1970 of all whose name begins with `prefix`."""
