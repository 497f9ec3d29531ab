"""Writes the licenses of the crates in the wheel of `make wheel` to THIRD_PARTY_NOTICES, which the
wheel contains.

    python packaging/notices.py            # writes the file
    python packaging/notices.py --check    # fails if the file is out of date

The crates are those that `ritornello-python` depends on without optional features, on Linux, also
if they only generate code. Fails if a crate can only be used under a license that `ALLOWED` lacks,
or has no file with its license. `packaging/licenses` has a text for crates whose own file is a
broken link; the name of the text is the crates' name up to the first `-`.
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
LICENSES = ROOT / "packaging/licenses"
# Files of these types are not texts of licenses.
SOURCES = (".rs", ".py", ".sh", ".json", ".toml", ".hbs", ".png")
# Minimum bytes of a license's text: a shorter file is a link that was packed as a file.
TEXT_MIN = 64
NAMES = ("license", "licence", "copying", "notice", "unlicense")
RULE = "=" * 80
HEAD = """\
Ritornello is under the Apache License 2.0: see LICENSE. Its compiled module contains, or was
generated with, the following crates and Rust's standard library (MIT OR Apache-2.0). After the
list come the texts of their licenses, each once, with the crates that have this text.
"""


def license_files(crate: dict[str, Any]) -> list[Path]:
    """Returns the license files of a crate that must be delivered. For a crate that may be used
    under the Apache License and has its text, these are this text, which many crates share, the
    file NOTICE, which the license requires, and license files in folders, which concern parts of
    the crate.
    """
    given = LICENSES / crate["name"].split("-")[0]
    if given.exists():
        return [given]
    folder = Path(crate["manifest_path"]).parent
    found = (path for path in folder.rglob("*") if path.name.lower().startswith(NAMES))
    files = sorted(path for path in found if path.is_file() and path.suffix not in SOURCES)
    is_choice = " AND " not in crate["license"]
    choice = re.split(r" OR | ?/ ?", crate["license"])
    apache = [path for path in files if "apache" in path.name.lower()]
    if not is_choice or "Apache-2.0" not in choice or not apache:
        return files
    own = [path for path in files if path.parent == folder and path not in apache]
    return [path for path in files if path not in own or path.name.lower().startswith("notice")]


def crates() -> list[dict[str, Any]]:
    """Returns the crates of other authors in the wheel, by name and version."""
    found = {}
    tree = ["cargo", "tree", "--locked", "--package", "ritornello-python", "--edges", "normal"]
    metadata = ["cargo", "metadata", "--locked", "--format-version", "1"]
    for platform in PLATFORMS:
        listed = output([*tree, "--prefix", "none", "--format", "{p}", "--target", platform])
        names = {tuple(line.split()[:2]) for line in listed.splitlines()}
        # With a filter, cargo does not download crates of other platforms.
        told = json.loads(output([*metadata, "--filter-platform", platform]))
        for package in told["packages"]:
            name = (package["name"], f"v{package['version']}")
            if package["source"] and name in names:
                found[name] = package
    return [package for _, package in sorted(found.items())]


def output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


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
        if not crate["license"] or not is_allowed(crate["license"]):
            problems.append(f"{name} has the license {crate['license']}: remove it, or allow this")
            continue
        lines.append(f"  {name}: {crate['license']}")
        files = license_files(crate)
        if not files or any(path.stat().st_size < TEXT_MIN for path in files):
            problems.append(f"{name} has no text of its license: add it to packaging/licenses")
        for path in files:
            text = path.read_text(errors="replace")
            # Compare texts without white space, because crates break the lines differently.
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
