"""Exceptions. Missing pages raise no exception where a call returns how many pages it moved."""

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
    """Base class of all errors. An error of this class itself, not of a subclass, says that pages
    are missing, if the return value of the call cannot say so: compute the missing pages. Raised by
    `flush`, it says that acknowledged puts or deletes may be lost: repeat them.
    """

    kind: ClassVar[Literal["miss", "invalid", "retry", "fatal", "closed"]] = "miss"


class InvalidError(RitornelloError, ValueError):
    """Invalid call; nothing was changed. The message says what to pass instead."""

    kind = "invalid"


class SettingError(InvalidError):
    """A setting of `Store.open` or `Cache.open` is invalid: repeating the call with the same
    setting fails again.
    """


class RetryError(RitornelloError):
    """The call failed for a reason that may pass: the same call may succeed later."""

    kind = "retry"


class FatalError(RitornelloError):
    """The store cannot continue. The message says what to do before opening it again."""

    kind = "fatal"


class ClosedError(RitornelloError):
    """The store was closed, or was opened in the parent process before a fork."""

    kind = "closed"
