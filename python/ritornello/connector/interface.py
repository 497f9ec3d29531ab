"""Checks that an installed engine has the interface that was tested. Each check returns the
difference that keeps an adapter from working with the installed class; "" if there is none.

Three differences are accepted: additional methods that are not abstract, additional optional
parameters (`accept_defaults`, `accept_constructor_defaults`), and additional fields with defaults
in the records that an adapter returns.
"""

import functools
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Types of parameters' defaults that are compared by value instead of by identity.
PLAIN = (int, float, str)


@dataclass(frozen=True, slots=True)
class EngineInterface:
    """The interface `part` of `engine` that `module` was written for. `tested`: versions of the
    engine whose sources the tests compare with the package, oldest first.
    """

    module: str
    engine: str
    tested: tuple[str, ...]
    part: str

    def require(self, difference: str, version: str) -> None:
        """Raises ImportError, in one line, if there is a `difference`."""
        if difference:
            raise ImportError(
                f"{self.module} was written for {self.engine} {' and '.join(self.tested)}; the "
                f"{self.part} of {self.engine} {version} differs ({difference}): use one of those "
                "versions, or a newer ritornello"
            )


def abstract_difference(base: Any, expected: frozenset[str]) -> str:
    """Checks that `base` has all `expected` methods, and no abstract methods besides them."""
    unknown = frozenset(base.__abstractmethods__) - expected
    if unknown:
        return f"unknown abstract methods: {', '.join(sorted(unknown))}"
    missing = sorted(name for name in expected if not hasattr(base, name))
    return f"methods are missing: {', '.join(missing)}" if missing else ""


def missing_hooks(base: Any, names: Collection[str]) -> str:
    """Checks that `base` has the methods `names`: an engine without such a method never calls the
    adapter's override, which causes no error.
    """
    missing = sorted(name for name in names if not hasattr(base, name))
    return f"hooks are missing: {', '.join(missing)}" if missing else ""


def method_difference(base: Any, methods: Mapping[str, tuple[str, ...]]) -> str:
    """Checks the parameters of methods, without `self`: the expected parameters first, in their
    order, because engines pass them by position; further parameters only if they are optional.
    """
    for name, expected in methods.items():
        method = getattr(base, name, None)
        if method is None:
            return f"{name} is missing"
        if not _takes(method, expected):
            return f"{name} takes {', '.join(_parameters(method)) or 'nothing'}"
    return ""


def override_difference(adapter: Any, base: Any) -> str:
    """Checks, as `method_difference` does, that the methods of `base` which `adapter` overrides
    take the parameters of the override.
    """
    for name, member in vars(adapter).items():
        ours, theirs = _function(member), _function(inspect.getattr_static(base, name, None))
        if name == "__init__" or ours is None or theirs is None:
            continue
        known = (p.name for p in _parameters(ours).values() if p.kind not in VARIADIC)
        if not _takes(theirs, tuple(known)):
            return f"{name} takes {', '.join(_parameters(theirs)) or 'nothing'}"
    return ""


def constructor_difference(base: Any, expected: tuple[str, ...]) -> str:
    """Checks the parameters of the constructor, without `self`, as `method_difference` does. If the
    engine constructs the adapter, the adapter needs `accept_constructor_defaults`.
    """
    taken = ", ".join(_parameters(base.__init__))
    return "" if _takes(base.__init__, expected) else f"the constructor takes {taken or 'nothing'}"


def record_difference(name: str, record: Any, expected: tuple[str, ...]) -> str:
    """Checks that the class `record`, whose objects the adapter makes, has the `expected` fields,
    in any order, because the adapter names them, and that all further fields have defaults. The
    result begins with `name`.
    """
    fields = inspect.signature(record).parameters
    required = {field.name for field in fields.values() if field.default is field.empty}
    if set(expected) <= set(fields) and required <= set(expected):
        return ""
    return f"{name} has {', '.join(fields)}"


def field_difference(name: str, record: Any, expected: tuple[str, ...]) -> str:
    """Checks that the class `record`, whose objects the engine makes, has exactly the `expected`
    fields. A further field may change which bytes an object names, also if the field has a default.
    The result begins with `name`.
    """
    fields = tuple(inspect.signature(record).parameters)
    return "" if fields == expected else f"{name} has {', '.join(fields)}"


def accept_defaults(adapter: Any, base: Any) -> None:
    """Makes the overrides in `adapter` accept the optional parameters that only `base` declares, if
    the engine passes their defaults. Another value may ask for something that the adapter does not
    do, so the call raises TypeError.
    """
    for name, ours in list(vars(adapter).items()):
        theirs = getattr(base, name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        signature = inspect.signature(theirs)
        known = inspect.signature(ours).parameters
        unknown = {p.name: p.default for p in signature.parameters.values() if p.name not in known}
        if unknown:
            setattr(adapter, name, _without(ours, signature, unknown))


def accept_constructor_defaults(adapter: Any, base: Any) -> None:
    """Makes the constructor of `adapter`, which the engine calls, accept the optional parameters
    that only the constructor of `base` declares, as `accept_defaults` does for methods. The adapter
    calls the constructor of `base` without them. Arguments that only `adapter` takes are passed on.
    """
    ours, signature = adapter.__init__, inspect.signature(base.__init__)
    known = inspect.signature(ours).parameters
    unknown = {p.name: p.default for p in signature.parameters.values() if p.name not in known}
    if not unknown:
        return

    @functools.wraps(ours)
    def construct(self: Any, *args: Any, **named: Any) -> None:
        own = {name: named.pop(name) for name in [*named] if name not in signature.parameters}
        arguments = signature.bind(self, *args, **named).arguments
        _drop_defaults(adapter, arguments, unknown)
        ours(**arguments, **own)

    adapter.__init__ = construct


def _without(method: Any, signature: inspect.Signature, unknown: Mapping[str, Any]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        arguments = signature.bind(*args, **named).arguments
        _drop_defaults(method, arguments, unknown)
        return method(**arguments)

    return call


def _drop_defaults(called: Any, arguments: dict[str, Any], unknown: Mapping[str, Any]) -> None:
    """Removes the `unknown` parameters from the arguments. Raises TypeError if one of them is not
    its default.
    """
    for name, default in unknown.items():
        value = arguments.pop(name, default)
        if value is not default and not (isinstance(value, PLAIN) and value == default):
            raise TypeError(f"ritornello: {called.__name__} does not serve {name}={value!r}")


def _function(member: Any) -> Any:
    """Returns the function of a method or class method; None for other members of a class."""
    member = member.__func__ if isinstance(member, classmethod) else member
    return member if inspect.isfunction(member) else None


def _takes(method: Any, expected: tuple[str, ...]) -> bool:
    parameters = list(_parameters(method).values())
    further = parameters[len(expected) :]
    optional = (p.default is not p.empty or p.kind in VARIADIC for p in further)
    return tuple(p.name for p in parameters[: len(expected)]) == expected and all(optional)


def _parameters(method: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a method, without `self`."""
    return dict(list(inspect.signature(method).parameters.items())[1:])
