"""Overrides under an engine whose methods have more optional parameters than the tested ones."""

from typing import Any

import pytest

from ritornello.connector.interface import accept_defaults


class Engine:
    def load(self, keys: Any, hint: Any = None, /, tier: str = "any", *, limit: float = 1.5) -> Any:
        raise NotImplementedError

    def save(self, keys: Any, **options: Any) -> Any:
        raise NotImplementedError

    def drop(self, keys: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def adapter() -> Any:
    class Adapter(Engine):
        def load(self, keys: Any) -> Any:  # type: ignore[override]
            """Loads."""
            return ("load", keys)

        def save(self, keys: Any) -> Any:  # type: ignore[override]
            return ("save", keys)

        def drop(self, keys: Any) -> Any:
            return ("drop", keys)

    untouched = Adapter.drop
    accept_defaults(Adapter, Engine)
    assert Adapter.drop is untouched
    return Adapter()


def test_defaults_of_unknown_parameters_are_accepted(adapter: Any) -> None:
    assert adapter.load([1]) == ("load", [1])
    assert adapter.load([1], None, "".join(["a", "ny"]), limit=float("1.5")) == ("load", [1])
    assert adapter.save(keys=[2]) == ("save", [2])
    assert adapter.load.__doc__ == "Loads."


def test_other_values_of_unknown_parameters_are_refused(adapter: Any) -> None:
    with pytest.raises(TypeError, match="load does not serve tier='disk'"):
        adapter.load([1], tier="disk")
    with pytest.raises(TypeError, match="load does not serve hint=3"):
        adapter.load([1], 3)
    with pytest.raises(TypeError, match="save does not serve options"):
        adapter.save([1], option=None)
