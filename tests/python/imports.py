#!/usr/bin/env python3
"""Finds import cycles: files that import each other, within each crate and the Python package.

A file imports the files that define the names in its code. Names are followed through re-exports:
neither `mod child;` nor a re-export that its file does not use is an import. Code of tests does not
count. Rust lets a module use the items of its ancestors: without `--ancestors` such imports do not
count either.

    python3 tests/python/imports.py                # cycles between siblings and across folders
    python3 tests/python/imports.py --ancestors    # cycles of a module with its ancestors as well
    python3 tests/python/imports.py --list FILE    # the imports of a file as well
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

Name = tuple[str, ...]
Graph = dict[Path, set[Path]]

NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:[^'\\\n]|\\[^\n']+|\\')'""",
    re.DOTALL,
)
OF_TESTS = re.compile(r"#!?\[cfg\((?:test|all\(test\b[^\]]*)\)\]")
ATTRIBUTES = re.compile(r"\s*(?:#\[[^\]]*\]\s*)*")
KEYWORD = re.compile(
    r"(?:pub(?:\([^)]*\))?\s+)?(?:(use|const (?!fn)|static|type|let)|"
    r"(?:const|unsafe|async|fn|struct|enum|union|trait|impl|mod|extern|macro_rules!)\b)?"
)
DEFINITION = re.compile(
    r"\b(?:struct|enum|union|trait|type|fn|const(?!\s+fn)|static|macro_rules!)\s+(?:mut\s+)?(\w+)"
)
MODULE = re.compile(r"\bmod\s+(\w+)\s*([;{])")
USE = re.compile(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);")
PATH = re.compile(r"(?<![\w:.$])[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)+")


class Module:
    """A module: the names that it defines and imports, and the paths that its code mentions."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.defined: set[str] = set()
        # Names that are defined anywhere in the module, also inside blocks, as in a macro. `step`
        # looks a name up here only if no other rule finds it.
        self.nested: set[str] = set()
        self.aliases: dict[str, Name] = {}
        self.globs: set[Name] = set()
        self.paths: set[Name] = set()


# The modules of a crate or package by name. The first part of a name is "crate" in a crate, and the
# package's name in a package.
Modules = dict[Name, Module]


def block_end(code: str, start: int, stops: str) -> int:
    """Returns the position after the item that begins at `start`. The item ends with the first
    character of `stops` outside brackets, where "}" stands for the end of a block, or before the
    bracket that closes the code around it.
    """
    depth = 0
    for at in range(start, len(code)):
        if code[at] in "([{":
            depth += 1
        elif code[at] in ")]}":
            depth -= 1
            if depth < 0:
                return at
            if depth == 0 and code[at] == "}" and "}" in stops:
                return at + 1
        elif depth == 0 and code[at] in stops:
            return at + 1
    return len(code)


def without_tests(source: str) -> str:
    """Returns Rust code without comments, literals, and items under `cfg(test)`."""
    code = NO_CODE.sub(lambda found: '""' if '"' in found[0] else " ", source)
    while found := OF_TESTS.search(code):
        if found[0].startswith("#!"):
            return ""
        after = ATTRIBUTES.match(code, found.end())
        start = after.end() if after else found.end()
        keyword = KEYWORD.match(code, start)
        stops = "," if not keyword or not keyword[0].strip() else ";" if keyword[1] else ";}"
        code = code[: found.start()] + code[block_end(code, start, stops) :]
    return code


def top_level(code: str) -> str:
    """Returns code without the contents of its blocks."""
    while (shorter := re.sub(r"\{[^{}]*\}", ";", code)) != code:
        code = shorter
    return code


def use_tree(tree: str) -> Iterator[tuple[Name, str]]:
    """Yields the paths of a `use` with the name that each gets; `*` for a glob."""
    tree = tree.strip()
    head, brace, inner = tree.partition("{")
    if not brace:
        path, _, alias = tree.partition(" as ")
        parts = tuple(part.strip() for part in path.split("::") if part.strip())
        parts = parts[:-1] if len(parts) > 1 and parts[-1] == "self" else parts
        yield parts, alias.strip() or parts[-1]
        return
    depth, start = 0, 0
    inner = inner.rpartition("}")[0] + ","
    for at, sign in enumerate(inner):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            if inner[start:at].strip():
                yield from use_tree(head + inner[start:at].strip())
            start = at + 1


def absolute(path: Name, module: Name) -> Name:
    """Returns a Rust path in `module` as a path from the crate's root if it begins with `self` or
    `super`; otherwise returns the path unchanged.
    """
    if path[0] in ("self", "super"):
        while path and path[0] in ("self", "super"):
            module = module[:-1] if path[0] == "super" else module
            path = path[1:]
        return module + path
    return path


def add_rust(code: str, file: Path, name: Name, modules: Modules) -> None:
    """Adds the module `name` with the code `code`, and all modules below it, to `modules`."""
    module = modules[name] = Module(file)
    while inline := re.search(r"\bmod\s+(\w+)\s*\{", code):
        end = block_end(code, inline.end() - 1, "}")
        add_rust(code[inline.end() : end - 1], file, (*name, inline[1]), modules)
        code = code[: inline.start()] + code[end:]
    folder = file.parent if file.stem in ("mod", "lib", "main") else file.with_suffix("")
    for child, _ in MODULE.findall(code):
        files = (folder / f"{child}.rs", folder / child / "mod.rs")
        found = next(path for path in files if path.exists())
        add_rust(without_tests(found.read_text()), found, (*name, child), modules)
    module.defined = set(DEFINITION.findall(top_level(code)))
    module.nested = set(DEFINITION.findall(code))
    rest = USE.sub(" ", code)
    words = set(re.findall(r"\w+", rest))
    for public, tree in USE.findall(code):
        for path, alias in use_tree(tree):
            target = absolute(path, name)
            if alias == "*":
                module.globs.add(target[:-1])
                module.paths |= {(word,) for word in words} if not public else set()
                continue
            module.aliases[alias] = target
            if not public or alias in words:
                module.paths.add(target)
    for found_path in PATH.findall(rest):
        module.paths.add(absolute(tuple(re.split(r"\s*::\s*", found_path)), name))


def rust(crate: Path) -> Modules:
    modules: Modules = {}
    file = crate / "src" / "lib.rs"
    add_rust(without_tests(file.read_text()), file, ("crate",), modules)
    return modules


def python(package: Path) -> Modules:
    modules: Modules = {}
    for file in sorted(package.rglob("*.py*")):
        if file.suffix not in (".py", ".pyi"):
            continue
        name = file.relative_to(package.parent).with_suffix("").parts
        is_package = name[-1] == "__init__"
        name = name[:-1] if is_package else name
        module = modules[name] = Module(file)
        tree = ast.parse(file.read_text())
        nodes = list(ast.walk(tree))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                module.nested.add(node.id)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                module.nested.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                up = node.level - is_package
                base = name[: len(name) - up] if node.level else ()
                base += tuple((node.module or "").split(".")) if node.module else ()
                for item in node.names:
                    alias = item.asname or item.name
                    module.aliases[alias] = (*base, item.name)
                    if not is_package or alias in words:
                        module.paths.add((*base, item.name))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module.paths.add((node.value.id, node.attr))
    return modules


class Found(NamedTuple):
    """The target of a path: a module, or an item in it."""

    module: Name
    item: str | None


# The target of paths that leave the crate or package.
OUTSIDE = Found((), "")


def step(modules: Modules, at: Name, part: str, last: bool, seen: set[Name]) -> Found | None:
    """Finds the name `part` in the module `at`. If an item and a module have this name, returns the
    item if `part` is the last name of its path (`last`), otherwise the module. `seen`: names that
    are being looked up, which end circular re-exports.
    """
    module, child = modules[at], (*at, part)
    if child in seen:
        return None
    seen = seen | {child}
    is_module = child in modules
    if part in module.defined and (last or not is_module):
        return Found(at, part)
    if part in module.aliases and (last or not is_module):
        return find(modules, at, module.aliases[part], seen)
    if is_module:
        return Found(child, None)
    leaves = False
    for glob in sorted(module.globs):
        through = find(modules, at, glob, seen)
        leaves = leaves or through == OUTSIDE
        if through and through.item is None and through.module != at:
            found = step(modules, through.module, part, last, seen)
            if found:
                return found
    if part in module.nested:
        return Found(at, part)
    return OUTSIDE if leaves else None


def find(modules: Modules, at: Name, path: Name, seen: set[Name]) -> Found | None:
    """Follows a path from the module `at`. Returns `OUTSIDE` if the path leaves the crate or
    package, and None if a module on the path lacks the next name.
    """
    found: Found | None = Found(at, None)
    for number, part in enumerate(path):
        if number == 0 and (part,) in modules:
            found = Found((part,), None)
        elif found:
            found = step(modules, found.module, part, number == len(path) - 1, seen)
            found = found or (OUTSIDE if number == 0 else None)
        if found is None or found.item is not None:
            return found
    return found


def graph(modules: Modules, ancestors: bool) -> Graph:
    """Returns the files that each file imports."""
    edges: Graph = {module.file: set() for module in modules.values()}
    for name, module in modules.items():
        for path in module.paths:
            found = find(modules, name, path, set())
            if found is None and (path[0],) in modules:
                sys.exit(f"{module.file}: {'::'.join(path)} is defined nowhere")
            if found is None or found == OUTSIDE or found.item is None:
                continue
            above = name[: len(found.module)] == found.module
            if (ancestors or not above) and modules[found.module].file != module.file:
                edges[module.file].add(modules[found.module].file)
    return edges


def cycles(edges: Graph) -> list[list[Path]]:
    """Returns the cycles: groups of files in which every file imports every other file, directly or
    through files of the group.
    """
    reached: Graph = {}
    for start in edges:
        reached[start] = set()
        left = [start]
        while left:
            new = edges[left.pop()] - reached[start]
            reached[start] |= new
            left += new
    groups = {
        tuple(sorted(other for other in reached[file] if file in reached[other]))
        for file in edges
        if file in reached[file]
    }
    return [list(group) for group in sorted(groups)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ancestors", action="store_true", help="count imports of a module's ancestors as well"
    )
    parser.add_argument(
        "--list",
        metavar="FILE",
        type=Path,
        help="print the files that FILE, a path from the root of the repository, imports",
    )
    given = parser.parse_args()
    parts = {path.parent.name: rust(path.parent) for path in sorted(ROOT.glob("crates/*/src"))}
    parts["ritornello"] = python(ROOT / "python" / "ritornello")
    failed = 0
    for part, modules in parts.items():
        edges = graph(modules, given.ancestors)
        found = cycles(edges)
        print(f"{part:12} {len(edges):4} files {len(found):4} cycles")
        for group in found:
            failed += 1
            for file in group:
                uses = [str(other.relative_to(ROOT)) for other in sorted(edges[file] & {*group})]
                print(f"    {file.relative_to(ROOT)} imports {', '.join(uses)}")
        for other in sorted(edges.get(ROOT / given.list, set()) if given.list else ()):
            print(f"    imports {other.relative_to(ROOT)}")
    if failed:
        sys.exit(
            f"{failed} import cycles: move code that two files need to a file that imports neither"
        )


if __name__ == "__main__":
    main()
