"""The lint of imports, `imports.py`, finds import cycles, and follows names to the files that
define them.
"""

from pathlib import Path

import pytest
from imports import cycles, graph, python, rust


def found(folder: Path, files: dict[str, str], ancestors: bool = False) -> list[list[str]]:
    """Returns the import cycles of a crate or package with these files."""
    for name, text in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    modules = rust(folder) if "lib.rs" in files else python(folder / "src")
    groups = cycles(graph(modules, ancestors))
    return [[str(file.relative_to(folder / "src")) for file in group] for group in groups]


LIB = "mod a;\nmod b;\npub use a::A;\npub use b::B;\n"
A_USES_B = "use crate::B;\npub struct A(B);\n"


@pytest.mark.parametrize(
    "b",
    [
        "use crate::A;\npub struct B(Box<A>);\n",
        "use super::{a::A, *};\npub struct B(Box<A>);\n",
        "pub struct B(Box<crate::a::A>);\n",
        "use crate::a;\npub struct B(Box<a::A>);\n",
        "use crate::*;\npub struct B(Box<A>);\n",
        "use crate::a::A as Other;\n#[cfg(test)]\nmod tests {}\npub struct B(Box<Other>);\n",
    ],
)
def test_cycle_of_two_files_is_found(tmp_path: Path, b: str) -> None:
    files = {"lib.rs": LIB, "a.rs": A_USES_B, "b.rs": b}
    assert found(tmp_path, files) == [["a.rs", "b.rs"]]


@pytest.mark.parametrize(
    "b",
    [
        "pub struct B; // crate::a::A\n",
        'pub struct B;\nconst NAME: &str = "crate::a::A";\n',
        "pub struct B;\n#[cfg(test)]\nuse crate::A;\n#[cfg(test)]\nmod tests { fn f(_: A) {} }\n",
        "pub struct B;\npub use crate::a::A;\n",
        "use std::fmt;\npub struct B(fmt::Error);\n",
    ],
)
def test_comments_tests_and_unused_exports_are_no_imports(tmp_path: Path, b: str) -> None:
    assert found(tmp_path, {"lib.rs": LIB, "a.rs": A_USES_B, "b.rs": b}) == []


def test_cycle_of_three_files_across_folders_is_found(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\n",
        "a.rs": "mod inner;\npub use inner::f;\n",
        "a/inner.rs": "pub fn f() { crate::b::g() }\n",
        "b/mod.rs": "mod c;\npub use c::*;\n",
        "b/c.rs": "mod d { pub fn h() { crate::a::f() } }\npub fn g() { d::h() }\n",
    }
    assert found(tmp_path, files) == [["a/inner.rs", "b/c.rs"]]


def test_imports_of_ancestors_count_only_on_request(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\n",
        "a.rs": "mod inner;\nstruct A;\nfn f() { inner::g(A) }\n",
        "a/inner.rs": "use super::A;\npub fn g(_: A) {}\n",
    }
    assert found(tmp_path, files) == []
    assert found(tmp_path, files, ancestors=True) == [["a/inner.rs", "a.rs"]]


def test_name_that_nothing_defines_fails(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="crate::C is defined nowhere"):
        found(tmp_path, {"lib.rs": LIB, "a.rs": A_USES_B, "b.rs": "use crate::C;\nstruct B;\n"})


def test_cycle_of_python_modules_is_found(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from .a import A\n",
        "a.py": "def A():\n    from src.b import B\n    return B\n",
        "b.py": "from src import A\n\nB = A\n",
    }
    assert found(tmp_path, files) == [["a.py", "b.py"]]
