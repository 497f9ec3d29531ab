"""What can go wrong. Pages that cannot be had are no error: calls return how many were."""

from typing import ClassVar, Literal

__all__ = [
    "ClosedError",
    "FatalError",
    "InvalidError",
    "RetryError",
    "RitornelloError",
    "SettingError",
]


class RitornelloError(Exception):
    """Base class. Raised itself for bytes that cannot be had where a call has no other way to
    say so: compute them.
    """

    kind: ClassVar[Literal["miss", "invalid", "retry", "fatal", "closed"]] = "miss"


class InvalidError(RitornelloError, ValueError):
    """The call was wrong and changed nothing; the message says what to write instead."""

    kind = "invalid"


class SettingError(InvalidError):
    """A setting of `Store.open` or `Cache.open` cannot be read: no later call with it succeeds."""


class RetryError(RitornelloError):
    """Nothing is lost; the same call may succeed later."""

    kind = "retry"


class FatalError(RitornelloError):
    """The store cannot go on; the message says what to do before opening it again."""

    kind = "fatal"


class ClosedError(RitornelloError):
    """The store was closed, or the process was forked after it was opened."""

    kind = "closed"
