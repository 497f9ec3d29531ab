"""An adapter's overrides of methods of an engine, its constructor, and records of the engine, if
their parameters and fields differ from the tested releases of the engine.
"""

from typing import Any

import pytest

from ritornello.connector.interface import (
    accept_constructor_defaults,
    accept_defaults,
    override_difference,
)


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


class Tier:
    def __init__(
        self, spec: Any, view: Any, detector: Any = None, depth: Any = None, *, limit: float = 1.5
    ) -> None:
        self.passed = (spec, view, detector, depth, limit)


@pytest.fixture
def tier() -> Any:
    """Returns an adapter class that knows neither `depth` nor `limit`, and has settings."""

    class OurTier(Tier):
        def __init__(
            self, spec: Any, view: Any, detector: Any = None, engine: Any = None, **settings: Any
        ) -> None:
            super().__init__(spec, view, detector)
            self.own = (engine, settings)

    accept_constructor_defaults(OurTier, Tier)
    return OurTier


def test_constructor_accepts_defaults_of_unknown_parameters(tier: Any) -> None:
    for made in (
        tier(1, 2, engine="e", path="/kv"),
        tier(1, 2, None, None, limit=float("1.5"), engine="e", path="/kv"),
        tier(spec=1, view=2, depth=None, engine="e", path="/kv"),
    ):
        assert made.passed == (1, 2, None, None, 1.5)
        assert made.own == ("e", {"path": "/kv"})


def test_constructor_refuses_other_values_of_unknown_parameters(tier: Any) -> None:
    with pytest.raises(TypeError, match="OurTier does not serve depth=3"):
        tier(1, 2, None, 3)
    with pytest.raises(TypeError, match=r"OurTier does not serve limit=2\.5"):
        tier(1, 2, limit=2.5)


def test_constructor_without_unknown_parameters_is_kept() -> None:
    class Same(Tier):
        def __init__(
            self, spec: Any, view: Any, detector: Any, depth: Any, *, limit: float, ours: Any
        ) -> None: ...

    untouched = Same.__init__
    accept_constructor_defaults(Same, Tier)
    assert Same.__init__ is untouched


class Adapter:
    def __init__(self, ours: Any) -> None: ...
    def load(self, keys: Any, **options: Any) -> None: ...
    @classmethod
    def build(cls, config: Any) -> None: ...
    @property
    def tier(self) -> str:
        return "disk"

    def own(self, anything: Any) -> None: ...


def engine(load: Any = None, build: Any = None) -> type:
    return type(
        "Engine",
        (),
        {
            "load": load or (lambda self, keys: None),
            "build": classmethod(build or (lambda cls, config: None)),
            "tier": property(lambda self: ""),
        },
    )


def test_overrides_that_take_what_the_engine_passes_are_accepted() -> None:
    assert override_difference(Adapter, engine()) == ""
    assert override_difference(Adapter, engine(load=lambda self, keys, hint=None: None)) == ""
    assert override_difference(Adapter, object) == ""


@pytest.mark.parametrize(
    ("base", "difference"),
    [
        (engine(load=lambda self, keys, hint: None), "load takes keys, hint"),
        (engine(load=lambda self, pages: None), "load takes pages"),
        (engine(load=lambda self: None), "load takes nothing"),
        (engine(build=lambda cls, config, role: None), "build takes config, role"),
    ],
)
def test_other_parameters_of_an_overridden_method_are_named(base: type, difference: str) -> None:
    assert override_difference(Adapter, base) == difference
