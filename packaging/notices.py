"""Writes the licenses of the crates in the wheel to THIRD_PARTY_NOTICES, which the wheel contains.

    python packaging/notices.py            # writes the file
    python packaging/notices.py --check    # fails if the file is out of date

The crates are those that `ritornello-python` depends on when it is compiled, on Linux, also if they
only generate code. Fails if a crate can only be used under a license that `ALLOWED` lacks, or has
no file with its license.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTICES = ROOT / "THIRD_PARTY_NOTICES"
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
# Licenses that permit distribution under any terms if their text is delivered too.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
NAMES = ("license", "licence", "copying", "notice", "unlicense")
RULE = "=" * 80
HEAD = """\
Ritornello is under the Apache License 2.0: see LICENSE. Its compiled module contains, or was
generated with, the following crates and Rust's standard library (MIT OR Apache-2.0). After the
list come the texts of their licenses, each once, with the crates that have this text.
"""


def is_compiled_in(dependency: dict[str, Any]) -> bool:
    """Whether a dependency is ordinary: not only of a build script or of tests."""
    return any(kind["kind"] is None for kind in dependency["dep_kinds"])


def license_files(crate: dict[str, Any]) -> list[Path]:
    """Returns the files of a crate that must be delivered. Of a crate with a choice of licenses,
    these are the Apache License, if it is one of them, because all such crates share its text, and
    the file NOTICE, which this license requires.
    """
    folder = Path(crate["manifest_path"]).parent
    found = (path for path in folder.iterdir() if path.name.lower().startswith(NAMES))
    files = sorted(path for path in found if path.is_file())
    choice = re.split(r" OR | ?/ ?", crate["license"] or "")
    apache = [path for path in files if "apache" in path.name.lower()]
    if "Apache-2.0" not in choice or not apache:
        return files
    return apache + [path for path in files if path.name.lower().startswith("notice")]


def crates() -> list[dict[str, Any]]:
    """Returns the crates of other authors in the wheel, by name and version."""
    found: dict[str, dict[str, Any]] = {}
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    for platform in PLATFORMS:
        told = subprocess.run(
            [*command, "--filter-platform", platform], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        metadata = json.loads(told.stdout)
        packages = {package["id"]: package for package in metadata["packages"]}
        nodes = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
        left = [name for name in packages if packages[name]["name"] == "ritornello-python"]
        seen: set[str] = set()
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += [on["pkg"] for on in nodes[name] if is_compiled_in(on)]
        found |= {name: packages[name] for name in seen if packages[name]["source"]}
    return sorted(found.values(), key=lambda crate: (crate["name"], crate["version"]))


def is_allowed(expression: str) -> bool:
    """Whether a license expression in SPDX's grammar can be met with the licenses in `ALLOWED`. An
    exception (`WITH`) only adds permissions. `/` is the `OR` of old crates.
    """
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def choice() -> bool:
        met = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = both() or met
        return met

    def both() -> bool:
        met = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = one() and met
        return met

    def one() -> bool:
        token = tokens.pop(0)
        if token == "(":
            met = choice()
            assert tokens.pop(0) == ")", expression
            return met
        if tokens and tokens[0] == "WITH":
            del tokens[:2]
        return token in ALLOWED

    met = choice()
    assert not tokens, expression
    return met


def notices() -> str:
    """Returns the contents of the file."""
    texts: dict[str, str] = {}
    users: dict[str, list[str]] = defaultdict(list)
    lines, problems = [HEAD], []
    for crate in crates():
        name = f"{crate['name']} {crate['version']}"
        lines.append(f"  {name}: {crate['license']}")
        if not is_allowed(crate["license"] or "none"):
            problems.append(f"{name} has the license {crate['license']}: remove it, or allow this")
        files = license_files(crate)
        if not files:
            problems.append(f"{name} has no file with its license: remove it, or add its text here")
        for path in files:
            text = path.read_text(errors="replace")
            # Crates break the lines of the same text differently.
            first = texts.setdefault("".join(text.split()), text.strip("\n"))
            users[first].append(name)
    if problems:
        sys.exit("\n".join(problems))
    for text, names in sorted(users.items(), key=lambda item: item[1]):
        lines += ["", RULE, ", ".join(sorted(set(names))), RULE, "", text]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = notices()
    if "--check" not in sys.argv[1:]:
        NOTICES.write_text(text)
    elif not NOTICES.exists() or NOTICES.read_text() != text:
        sys.exit("THIRD_PARTY_NOTICES is out of date: run `python packaging/notices.py`")


if __name__ == "__main__":
    main()
