"""Checks that an installed engine has the interface that was tested. Each function returns how a
class differs from the tested class; "" if they are equal.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineInterface:
    """The interface `part` of `engine` that `module` was written for, in the versions `tested`."""

    module: str
    engine: str
    tested: str
    part: str

    def require(self, difference: str, version: str) -> None:
        """Raises ImportError, in one line, if there is a `difference`."""
        if difference:
            versions = "one of those versions" if " and " in self.tested else "that version"
            raise ImportError(
                f"{self.module} was written for {self.engine} {self.tested}; the {self.part} of "
                f"{self.engine} {version} differs ({difference}): use {versions}, or a newer "
                "ritornello"
            )


def abstract_difference(base: Any, expected: frozenset[str]) -> str:
    differ = frozenset(base.__abstractmethods__) ^ expected
    return f"abstract methods differ: {', '.join(sorted(differ))}" if differ else ""


def missing_hooks(base: Any, names: Collection[str]) -> str:
    """Checks that the engine has these hooks: a hook that it never calls causes no error."""
    missing = sorted(name for name in names if not hasattr(base, name))
    return f"hooks are missing: {', '.join(missing)}" if missing else ""


def method_difference(base: Any, methods: Mapping[str, tuple[str, ...]]) -> str:
    """Checks the parameters of methods, without `self`."""
    for name, expected in methods.items():
        method = getattr(base, name, None)
        if method is None:
            return f"{name} is missing"
        parameters = _parameters(method)
        if parameters != expected:
            return f"{name} takes {', '.join(parameters) or 'nothing'}"
    return ""


def constructor_difference(base: Any, expected: tuple[str, ...]) -> str:
    """Checks the parameters of the constructor, without `self`."""
    parameters = _parameters(base.__init__)
    return "" if parameters == expected else f"the constructor takes {', '.join(parameters)}"


def field_difference(name: str, record: Any, expected: tuple[str, ...]) -> str:
    """Checks the fields of a class of records; the result begins with `name`."""
    fields = tuple(inspect.signature(record).parameters)
    return "" if fields == expected else f"{name} has {', '.join(fields)}"


def _parameters(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)[1:]
