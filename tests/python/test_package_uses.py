"""`tests/engines/sources/package_uses.py`, which compares our package with the sources of an
engine, finds what the engine lacks.
"""

from pathlib import Path

import pytest
from expression_types import Hints
from package_uses import PackageUses

ENGINE = {
    "base.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass

class Storage(ABC):
    def __init__(self, config):
        self.pools = {}

    @abstractmethod
    def load(self, keys, hint=None): ...

    @property
    def ready(self): ...

@dataclass
class Config:
    size: int
    parts: "list[Part]"
    rank: int = 0

@dataclass
class Part:
    name: str

def current() -> Config: ...
def bag(): ...
""",
    "__init__.py": "from engine.base import Storage\nfrom . import base\n__version__ = '1'\n",
    "fields.py": "class Fields:\n    device: str\n",
}
OURS = """
import engine
from engine.base import Config, Part, bag, current
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from engine import Storage as Base

def of(config: "Config | None") -> int:
    for part in sorted(config.parts):
        print(part.name)
    names = [found.name for found in config.parts if found.name]
    rank = getattr(config, "rank", 0)
    first = config.parts[0]
    return first.name, current().size, Part("a"), Config(1, parts=[], rank=2), bag().device

class Adapter(Base):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def load(self, keys, hint=None):
        return self.pools, self._config.size

    @property
    def ready(self):
        return engine.__version__
"""


def uses(folder: Path, engine: dict[str, str] = ENGINE, ours: str = OURS) -> PackageUses:
    hints = Hints(results={"bag": ("engine.fields", "Fields")})
    for name, text in engine.items():
        (folder / "theirs/engine").mkdir(parents=True, exist_ok=True)
        (folder / "theirs/engine" / name).write_text(text)
    (folder / "ours/package").mkdir(parents=True, exist_ok=True)
    (folder / "ours/package/__init__.py").write_text(ours)
    return PackageUses(folder / "ours", folder / "theirs", "package", "engine", hints)


def test_an_engine_that_has_everything_is_served(tmp_path: Path) -> None:
    found = uses(tmp_path)
    assert found.problems == []
    assert found.override_problems() == []
    assert found.own_methods() == set()
    assert {"Config.parts", "Config.rank", "Fields.device", "Part.name", "engine.__version__"} < (
        found.found
    )
    assert {"Adapter.pools", "Config(size, parts, rank)", "Part(name)"} < found.found


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def current", "def other", "no engine.base.current"),
        ("from engine.base import Storage\n", "", "no engine.Storage"),
        ("__version__", "version", "no engine.__version__"),
        ("    size: int", "    width: int", "Config has no size"),
        ("    size: int", "    size: int\n    width: int", "Config needs width"),
        ("    name: str", "    title: str", "Part has no name"),
        ("    device: str", "    kind: str", "Fields has no device"),
        ("        self.pools = {}", "        self.memory = {}", "Adapter has no pools"),
        ("    rank: int = 0", "", "Config does not take rank"),
        ("def __init__(self, config)", "def __init__(self, config, role)", "__init__ needs role"),
    ],
)
def test_missing_parts_of_an_engine_are_named(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    changed = {name: text.replace(old, new) for name, text in ENGINE.items()}
    assert changed != ENGINE
    assert any(problem in found for found in uses(tmp_path, changed).problems)


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("def load(self, pages, hint=None)", "takes keys where the engine passes pages"),
        ("def load(self, keys)", ""),
        ("def load(self, keys, hint=None, *, tier=0)", "does not take tier"),
        ("def load(self, keys, hint=None, *, tier)", "does not take tier"),
        (
            "def load(self, keys, **named)",
            "takes no further arguments, but the engine's method does",
        ),
    ],
)
def test_override_must_take_what_the_engine_passes(tmp_path: Path, new: str, problem: str) -> None:
    old = "def load(self, keys, hint=None)"
    changed = {name: text.replace(old, new) for name, text in ENGINE.items()}
    problems = uses(tmp_path, changed).override_problems()
    assert problems == ([f"Adapter.load: {problem}"] if problem else [])


def test_accepted_defaults_need_no_parameter(tmp_path: Path) -> None:
    accepts = f"{OURS}\naccept_defaults(Adapter, Base)\n"
    old = "def load(self, keys, hint=None)"
    for new, problems in (
        (f"{old[:-1]}, *, tier=0)", []),
        (f"{old[:-1]}, *, tier)", ["Adapter.load: does not take tier"]),
    ):
        changed = {name: text.replace(old, new) for name, text in ENGINE.items()}
        assert uses(tmp_path, changed, accepts).override_problems() == problems


def test_methods_that_an_engine_never_calls_are_named(tmp_path: Path) -> None:
    changed = {name: text.replace("def load(", "def fetch(") for name, text in ENGINE.items()}
    assert uses(tmp_path, changed).own_methods() == {"Adapter.load"}
