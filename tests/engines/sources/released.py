"""The sources of the tested versions of an engine: the installed version, and versions that
`engines/sources.sh` has downloaded.
"""

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from expression_types import Hints
from package_uses import PackageUses

from servers.environment import ROOT

_uses: dict[tuple[str, str], PackageUses] = {}


def sources_of(engine: str, version: str) -> Path:
    """Returns the folder that contains the package of this version of an engine."""
    if metadata.version(engine).partition("+")[0] == version:
        spec = find_spec(engine)
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).parents[1]
    folder = ROOT / f"build/env/{engine}-{version}-sources"
    assert (folder / ".stamp").is_file(), f"run engines/sources.sh {engine} {version} first"
    return folder


def uses_of(engine: str, version: str, hints: Hints) -> PackageUses:
    """Returns the names and calls that `ritornello.ENGINE` uses of a version of the engine."""
    if (engine, version) not in _uses:
        theirs = sources_of(engine, version)
        uses = PackageUses(ROOT / "python", theirs, f"ritornello.{engine}", engine, hints)
        _uses[engine, version] = uses
    return _uses[engine, version]


def require_served(uses: PackageUses, names: int, overrides: int) -> None:
    """Checks that the version has everything that our package takes from it. Fails as well if fewer
    than `names` uses or `overrides` overrides were found in our package.
    """
    assert uses.problems == []
    assert uses.override_problems() == []
    assert len(uses.found) >= names
    assert len(list(uses.overrides())) >= overrides


def require_alike(engine: str, versions: Sequence[str], hints: Hints) -> None:
    """Checks that our package uses the same names and parameters of all versions. A use names the
    parameter of each argument, so that arguments that our package passes by position have the same
    meaning in all versions.
    """
    found = [uses_of(engine, version, hints).found for version in versions]
    assert [names ^ found[0] for names in found] == [set() for _ in found]
