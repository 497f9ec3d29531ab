"""The declarations in Python sources, read by `ast`: sources are never imported or run."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Decorators of methods whose result is read as an attribute.
PROPERTIES = ("property", "cached_property")
# Attributes that subclasses inherit from these base classes, whose declarations are not read.
INHERITED = {
    "ABC": ("register",),
    "Enum": ("name", "value"),
    "IntEnum": ("name", "value"),
    "NamedTuple": ("_replace",),
}
# Base classes outside the roots of `Sources` that are treated as known, although their declarations
# are not read: our package uses none of their attributes except `INHERITED`.
PLAIN_BASES = frozenset(
    {"ABC", "BaseModel", "Enum", "Generic", "IntEnum", "NamedTuple", "Protocol", "Struct"}
    | {"int", "object", "str", "type"}
)


class Declared(NamedTuple):
    """A statement in `module` that declares a name. `function`: the method that contains the
    statement, if the statement assigns to an attribute of `self`.
    """

    module: str
    node: ast.AST
    function: Function | None = None


class Parameters(NamedTuple):
    """Parameters of a function, without `self` or `cls`. `required`: parameters without default.
    `variadic`: whether the function may take further arguments.
    """

    positional: list[str]
    keywords: list[str]
    required: set[str]
    variadic: bool = False


class Sources:
    """The modules below the folders `roots`. Each root contains packages."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.names = cache(self._names)
        self.tree = cache(self._tree)
        self.find = cache(self._find)
        self.bases = cache(self._bases)
        self.members = cache(self._members)

    def file(self, module: str) -> Path | None:
        """Returns the file of a module; None if no root has the module."""
        below = module.replace(".", "/")
        files = (f"{below}.py", f"{below}/__init__.py", f"{below}.pyi")
        paths = (root / file for root in self.roots for file in files)
        return next((path for path in paths if path.is_file()), None)

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def text(self, module: str) -> str:
        file = self.file(module)
        assert file is not None, f"there is no module {module}"
        return file.read_text()

    def _names(self, module: str) -> dict[str, ast.AST]:
        """Returns the statement that declares each name at the top level of a module."""
        found: dict[str, ast.AST] = {}
        for node in _statements(self.tree(module).body):
            for name in _declared_names(node):
                # If several branches declare a name, the first declaration is used.
                found.setdefault(name, node)
        return found

    def declares(self, module: str, name: str) -> bool:
        """Returns whether `from module import name` succeeds."""
        if self.file(f"{module}.{name}") is not None:
            return True
        return self.file(module) is not None and (
            name in self.names(module) or self.find(module, name) is not None
        )

    def _find(self, module: str, name: str) -> Declared | None:
        """Returns the declaration of `name`, following `from` imports; None if it is not in a root,
        or if `import` binds the name.
        """
        if self.file(module) is None:
            return None
        node = self.names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            origin = absolute(module, node, self.file(module))
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return self.find(origin, original) if (origin, original) != (module, name) else None
        if node is not None:
            return None if isinstance(node, ast.Import) else Declared(module, node)
        stars = (n for n in self.tree(module).body if isinstance(n, ast.ImportFrom))
        for star in stars:
            if star.names[0].name == "*":
                found = self.find(absolute(module, star, self.file(module)), name)
                if found is not None:
                    return found
        return None

    def class_of(self, module: str, name: str) -> ast.ClassDef:
        found = self.find(module, name)
        node = found and found.node
        assert isinstance(node, ast.ClassDef), f"{module} has no class {name}"
        return node

    def _bases(self, module: str, name: str) -> tuple[list[Declared], bool]:
        """Returns the class and its bases, depth first, and whether all bases are known."""
        found = self.find(module, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return [], False
        chain, known = [found], True
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            text = ast.unparse(base).rpartition(".")[2]
            inner = self.bases(found.module, text) if isinstance(base, ast.Name) else ([], False)
            chain += inner[0]
            known = known and (inner[1] or text in PLAIN_BASES)
        return chain, known

    def base_names(self, module: str, name: str) -> set[str]:
        """Returns the names of the direct and indirect bases of a class, without their modules."""
        nodes = (declared.node for declared in self.bases(module, name)[0])
        bases = (base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases)
        return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in bases}

    def _members(self, module: str, name: str) -> dict[str, Declared]:
        """Returns the statement that declares each attribute of a class and its instances."""
        found: dict[str, Declared] = {}
        for owner, node, _ in self.bases(module, name)[0]:
            assert isinstance(node, ast.ClassDef)
            for statement in _statements(node.body):
                for member in _declared_names(statement):
                    found.setdefault(member, Declared(owner, statement))
            for member, statement, method in _assigned_to_self(node):
                found.setdefault(member, Declared(owner, statement, method))
        return found

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """Returns the methods of a class, including inherited methods."""
        members = self.members(module, name)
        return {n: d.node for n, d in members.items() if isinstance(d.node, FUNCTIONS)}

    def abstract(self, module: str, name: str) -> set[str]:
        methods = self.methods(module, name)
        return {n for n, method in methods.items() if "abstractmethod" in decorators(method)}

    def fields(self, module: str, name: str) -> tuple[str, ...]:
        """Returns the fields of a dataclass in the order of its constructor."""
        found: dict[str, ast.AnnAssign] = {}
        for _, node, _ in reversed(self.bases(module, name)[0]):
            for field in node.body:  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = field
        return tuple(name for name, field in found.items() if _is_field(field))

    def constructor(self, module: str, name: str) -> Parameters | None:
        """Returns the parameters of a class's constructor. Without an `__init__` in a root, they
        are the fields of a dataclass, named tuple or struct; for another class, or a class with an
        unknown base, returns None.
        """
        init = self.methods(module, name).get("__init__")
        if init is not None:
            return parameters(init)
        chain, known = self.bases(module, name)
        named = self.base_names(module, name)
        made = any("dataclass" in d for _, n, _ in chain for d in decorators(n))
        if not known or not (made or named & {"NamedTuple", "Struct"}):
            return None
        members = self.members(module, name)
        fields = self.fields(module, name)
        required = {f for f in fields if members[f].node.value is None}  # type: ignore[attr-defined]
        return Parameters(list(fields), [], required)


def decorators(node: ast.AST) -> list[str]:
    """Returns the last name of each decorator, without its arguments."""
    marks = (m.func if isinstance(m, ast.Call) else m for m in node.decorator_list)  # type: ignore[attr-defined]
    return [ast.unparse(mark).rpartition(".")[2] for mark in marks]


def parameters(function: Function, *, bound: bool = True) -> Parameters:
    """Returns the parameters of a method or, if not `bound`, of a function of a module."""
    arguments = function.args
    first = 1 if bound and "staticmethod" not in decorators(function) else 0
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults = len(arguments.defaults)
    required = set(positional[first : len(positional) - defaults])
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required |= {a.arg for a, default in pairs if default is None}
    return Parameters(
        positional[first:],
        [a.arg for a in arguments.kwonlyargs],
        required,
        arguments.vararg is not None
        or arguments.kwarg is not None
        or "overload" in decorators(function),  # the other overloads take other arguments
    )


def absolute(module: str, node: ast.ImportFrom, file: Path | None) -> str:
    """Returns the full name of the module that an import in `module` names. `file`: the file of
    `module`.
    """
    if not node.level:
        return node.module or ""
    is_package = file is not None and file.name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of `body`, including statements inside `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                for inner in getattr(node, part, ()):
                    yield from _statements(inner.body if part == "handlers" else [inner])


def _declared_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [a.asname or a.name.partition(".")[0] for a in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]


def _assigned_to_self(owner: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, Function]]:
    """Yields the attributes that methods assign: name, assignment and method."""
    methods = (node for node in _statements(owner.body) if isinstance(node, FUNCTIONS))
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for part in (part for target in targets for part in ast.walk(target)):
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        yield part.attr, node, method


def _is_field(field: ast.AnnAssign) -> bool:
    return "ClassVar" not in ast.unparse(field.annotation) and not (
        isinstance(field.value, ast.Call) and "init=False" in ast.unparse(field.value)
    )
