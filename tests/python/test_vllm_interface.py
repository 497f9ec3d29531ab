"""vLLM's connector interface, tested with stand-ins for vLLM's classes: calls of members that the
connector does not know reach the data path, and interfaces that it cannot serve are refused.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from ritornello.vllm import interface
from ritornello.vllm.interface import delegation, interface_difference


class Older:
    def inherited(self) -> Any:
        """A method of a base class of the connector's base class, overridden by `Path`."""
        return "default"


class Base(Older):
    limit: Any = "default"
    role = "of the connector"

    def __init__(self) -> None:
        self.first = self.start("early")

    def start(self, *args: Any, **named: Any) -> Any:
        return "default"

    @classmethod
    def layout(cls, config: Any) -> Any:
        return "default"

    @staticmethod
    def version() -> Any:
        return "default"

    @property
    def waits(self) -> Any:
        return "default"

    def _private(self) -> str:
        return "default"


class Mixin:
    def start(self) -> str:
        return "default of the mixin"

    def finish_all(self, request: str) -> Any:
        return "default"


class Path(Base, Mixin):
    """A data path that overrides all public members of the base classes, as vLLM's offloading
    connector may.
    """

    limit = 7
    role = "of the data path"

    def __init__(self) -> None:
        """Has no state."""

    def inherited(self) -> Any:
        return "inherited"

    def start(self, *args: Any, **named: Any) -> Any:
        return "start", args, named

    @classmethod
    def layout(cls, config: Any) -> Any:
        return cls.__name__, config

    @staticmethod
    def version() -> Any:
        return "version"

    @property
    def waits(self) -> Any:
        return "waits"

    def finish_all(self, request: str) -> Any:
        return "finish_all", request


Delegation: Any = delegation((Base, Mixin), lambda: Path)


class Connector(Delegation, Base, Mixin):  # type: ignore[misc]
    def __init__(self) -> None:
        self.data_path = Path()
        super().__init__()


def test_calls_of_unknown_members_reach_data_path() -> None:
    connector = Connector()
    assert connector.first == ("start", ("early",), {})
    assert connector.start(1, second=2) == ("start", (1,), {"second": 2})
    assert connector.finish_all("r") == ("finish_all", "r")
    assert connector.inherited() == "inherited"
    assert connector.waits == "waits"
    assert connector._private() == "default"
    assert connector.role == "of the connector"
    assert Connector.inherited.__doc__ == Older.inherited.__doc__


@pytest.mark.parametrize("owner", [Connector, Connector()], ids=["class", "instance"])
def test_members_of_class_reach_class_of_data_path(owner: Any) -> None:
    assert owner.layout("config") == ("Path", "config")
    assert owner.version() == "version"
    assert owner.limit == 7


def base(**changes: Any) -> Any:
    """Returns a stand-in for vLLM's connector class that has the interface in
    `ritornello.vllm.interface`; `changes` adds or replaces members, and `"gone"` removes a member.
    """

    def made(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...

    fields: dict[str, Any] = dict.fromkeys(interface.HOOKS | interface.ABSTRACT)
    fields |= {"__abstractmethods__": interface.ABSTRACT, "__init__": made} | changes
    return SimpleNamespace(**{name: value for name, value in fields.items() if value != "gone"})


def test_further_optional_method_is_accepted() -> None:
    assert interface_difference(base()) == ""
    assert interface_difference(base(bind_block_mover=lambda self, mover: None)) == ""


def test_further_optional_parameter_of_constructor_is_accepted() -> None:
    def made(
        self: Any, vllm_config: Any, role: Any, kv_cache_config: Any, mover: Any = None
    ) -> None: ...

    assert interface_difference(base(__init__=made)) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"__abstractmethods__": interface.ABSTRACT | {"move_blocks"}},
            "unknown abstract methods: move_blocks",
        ),
        ({"start_load_kv": "gone"}, "methods are missing: start_load_kv"),
        ({"request_finished": "gone"}, "hooks are missing: request_finished"),
        ({"__init__": lambda self, config: None}, "the constructor takes config"),
        (
            {"__init__": lambda self, vllm_config, role, kv_cache_config, mover: None},
            "the constructor takes vllm_config, role, kv_cache_config, mover",
        ),
        (
            {"__init__": lambda self, vllm_config, kv_cache_config, role: None},
            "the constructor takes vllm_config, kv_cache_config, role",
        ),
    ],
)
def test_unknown_interface_fails_in_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ImportError, match=problem) as refused:
        interface.INTERFACE.require(interface_difference(base(**changes)), "0.34.0")
    assert "the connector interface of vLLM 0.34.0 differs" in str(refused.value)
    assert "\n" not in str(refused.value)
