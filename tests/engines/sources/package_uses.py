"""Finds what our package uses of an engine, and checks that the sources of a version of the engine
have it: imported names, attributes of objects, arguments of calls, parameters of overrides.

Uses of objects whose type does not follow from an annotation, a constructor or a hint are not
found; nor are uses in the decorators, annotations and defaults of a function.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from declarations import (
    FUNCTIONS,
    INHERITED,
    PROPERTIES,
    Declared,
    Function,
    Parameters,
    Sources,
    absolute,
    decorators,
    parameters,
)
from expression_types import Hints, Scope, Type, Types


class PackageUses:
    """Uses of `engine` by our `package`, such as `ritornello.vllm`. `theirs` is the folder with the
    sources of the engine, `ours` the folder with our sources. `found`: all uses. `problems`: one
    line for each use that would fail with the engine's sources.
    """

    def __init__(self, ours: Path, theirs: Path, package: str, engine: str, hints: Hints) -> None:
        self.sources = Sources(ours, theirs)
        self.types = Types(self.sources, hints)
        self.engine, self.hints = engine, hints
        self.problems: list[str] = []
        self.found: set[str] = set()
        files = sorted((ours / package.replace(".", "/")).rglob("*.py"))
        modules = (".".join(file.relative_to(ours).with_suffix("").parts) for file in files)
        self.modules = [module.removesuffix(".__init__") for module in modules]
        for module in self.modules:
            _Visitor(self, Scope(self.types, module)).visit(self.sources.tree(module))

    def is_theirs(self, module: str) -> bool:
        return module.partition(".")[0] == self.engine

    def record(self, use: str, problem: str, place: str) -> None:
        """Records a use and, if `problem` is not "", the problem. `place`: the module and line of
        the use.
        """
        self.found.add(use)
        if problem:
            self.problems.append(f"{place}: {problem}")

    def record_name(self, module: str, name: str, place: str) -> None:
        """Records the use of a name of a module."""
        if self.is_theirs(module):
            use = f"{module}.{name}"
            self.record(use, "" if self.sources.declares(module, name) else f"no {use}", place)

    def record_attribute(self, owner: Type, name: str, place: str, *, optional: bool) -> None:
        if owner.kind == "module":
            self.record_name(owner.module, name, place)
        if not owner.has_members:
            return
        declared = self.types.member(owner, name)
        chain, known = self.sources.bases(owner.module, owner.name)
        bases = any(self.is_theirs(base.module) for base in chain)
        if bases and (declared is None or self.is_theirs(declared.module)):
            lacks = declared is None and known and not optional and not self._hinted(owner, name)
            use = f"{owner.name}.{name}"
            self.record(use, f"{owner.name} has no {name}" if lacks else "", place)

    def record_call(self, function: Type, node: ast.Call, place: str) -> None:
        """Records a call of the engine, and whether the engine takes its arguments."""
        if not self.is_theirs(function.module):
            return
        if function.kind == "class":
            taken = self.sources.constructor(function.module, function.name)
            self._check_call(function.name, taken, node, place)
        elif function.kind == "function":
            taken = parameters(function.inner, bound=isinstance(node.func, ast.Attribute))
            self._check_call(function.inner.name, taken, node, place)

    def adapters(self) -> Iterator[tuple[str, ast.ClassDef, dict[str, Declared]]]:
        """Yields our classes that derive from classes of the engine: module, class, and the members
        that the class inherits from the engine's classes.
        """
        for module in self.modules:
            for node in self.sources.tree(module).body:
                if isinstance(node, ast.ClassDef):
                    theirs: dict[str, Declared] = {}
                    for base in self.sources.bases(module, node.name)[0]:
                        if self.is_theirs(base.module) and isinstance(base.node, ast.ClassDef):
                            theirs = self.sources.members(base.module, base.node.name) | theirs
                    if theirs:
                        yield module, node, theirs

    def overrides(self) -> Iterator[tuple[str, Function, Function, bool]]:
        """Yields our overrides of the engine's methods, except constructors: name, override, the
        engine's method, and whether `ritornello.connector.interface.accept_defaults` lets the
        override take further optional parameters.
        """
        for module, node, theirs in self.adapters():
            lenient = f"accept_defaults({node.name}, " in self.sources.text(module)
            for ours in _methods(node):
                base = theirs.get(ours.name)
                if base and isinstance(base.node, FUNCTIONS) and ours.name != "__init__":
                    yield f"{node.name}.{ours.name}", ours, base.node, lenient

    def override_problems(self) -> list[str]:
        """Returns, for each override that cannot take the arguments that the engine passes, its
        name and the reason.
        """
        found = (
            (name, _override_problem(ours, base, lenient))
            for name, ours, base, lenient in self.overrides()
        )
        return [f"{name}: {problem}" for name, problem in found if problem]

    def own_methods(self) -> set[str]:
        """Returns public methods of our adapters that the engine's base classes lack."""
        return {
            f"{node.name}.{ours.name}"
            for _, node, theirs in self.adapters()
            for ours in _methods(node)
            if ours.name not in theirs and not ours.name.startswith("_")
        }

    def _hinted(self, owner: Type, name: str) -> bool:
        """Returns whether an object of this class has an attribute that the class does not declare:
        by `hints`, or from a base class of another package.
        """
        parts, kinds = self.hints.parts.get(owner.name, ()), self.hints.kinds.get(owner.name, ())
        in_parts = any(name in self.sources.members(*part) for part in parts)
        in_kinds = [name in self.sources.members(*kind) for kind in kinds]
        bases = self.sources.base_names(owner.module, owner.name)
        inherited = any(name in INHERITED.get(base, ()) for base in bases)
        return in_parts or (bool(in_kinds) and all(in_kinds)) or inherited

    def _check_call(self, name: str, taken: Parameters | None, node: ast.Call, place: str) -> None:
        if taken is None:
            return
        given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        unpacked = len(given) < len(node.keywords) or any(
            isinstance(argument, ast.Starred) for argument in node.args
        )
        by_position = taken.positional[: len(node.args)]
        unknown = sorted(set(given) - {*taken.positional, *taken.keywords})
        missing = sorted(taken.required - {*by_position, *given})
        problem = ""
        if not taken.variadic and (unknown or len(node.args) > len(taken.positional)):
            problem = f"{name} does not take {', '.join(unknown) or f'{len(node.args)} arguments'}"
        elif missing and not unpacked:
            problem = f"{name} needs {', '.join(missing)}"
        self.record(f"{name}({', '.join([*by_position, *given])})", problem, place)


class _Visitor(ast.NodeVisitor):
    """Records in `uses` the uses of the engine below a node of a syntax tree, in source order."""

    def __init__(self, uses: PackageUses, scope: Scope) -> None:
        self.uses, self.scope = uses, scope

    def place(self, node: ast.AST) -> str:
        return f"{self.scope.module}:{getattr(node, 'lineno', 0)}"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        sources, module = self.uses.sources, self.scope.module
        origin = absolute(module, node, sources.file(module))
        for name in node.names:
            self.uses.record_name(origin, name.name, self.place(node))
            found = self.uses.types.of_declared(sources.find(origin, name.name))
            self.scope.names[name.asname or name.name] = found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = Scope(self.scope.types, self.scope.module, node.name, self.scope.names)
        _Visitor(self.uses, inner).generic_visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        scope = self.scope
        inner = Scope(scope.types, scope.module, scope.owner, scope.names)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            inner.names[argument.arg] = scope.types.of_annotation(scope.module, argument.annotation)
        first = arguments[0].arg if arguments else ""
        if scope.owner and first in ("self", "cls"):
            kind = "object" if first == "self" else "class"
            inner.names[first] = Type(kind, scope.module, scope.owner)
        for statement in node.body:
            _Visitor(self.uses, inner).visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        inner = Scope(self.scope.types, self.scope.module, self.scope.owner, self.scope.names)
        for argument in node.args.args:
            inner.names[argument.arg] = None
        for default in node.args.defaults:
            self.visit(default)
        _Visitor(self.uses, inner).visit(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts, strict=False):
                    self.scope.assign(part, self.scope.type_of(value))
            else:
                self.scope.assign(target, self.scope.type_of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        kind = self.scope.types.of_annotation(self.scope.module, node.annotation)
        self.scope.assign(node.target, kind)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self.scope.assign(node.target, self.scope.type_of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        container = self.scope.type_of(node.iter)
        self.scope.assign(node.target, container and container.element)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _visit_comprehension(self, node: Any) -> None:
        inner = _Visitor(self.uses, self.scope.inside(node.generators))
        for generator in node.generators:
            for part in (generator.iter, *generator.ifs):
                inner.visit(part)
        for part in (getattr(node, name, None) for name in ("key", "value", "elt")):
            if part is not None:
                inner.visit(part)

    visit_ListComp = visit_SetComp = _visit_comprehension  # noqa: N815
    visit_DictComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        owner = self.scope.type_of(node.value)
        if owner is not None:
            self.uses.record_attribute(owner, node.attr, self.place(node), optional=False)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = self.scope.type_of(node.args[0]), node.args[1]
            optional = len(node.args) > 2 or ast.unparse(node.func) == "hasattr"
            if owner is not None and isinstance(name, ast.Constant):
                place = self.place(node)
                self.uses.record_attribute(owner, str(name.value), place, optional=optional)
        function = self.scope.type_of(node.func)
        if function is not None:
            self.uses.record_call(function, node, self.place(node))


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    return (statement for statement in node.body if isinstance(statement, FUNCTIONS))


def _override_problem(ours: Function, base: Function, lenient: bool) -> str:
    """Returns why `ours` does not take what the engine passes to `base`; "" if it does. With
    `lenient`, an override that is not a class method takes further optional parameters of `base`.
    """
    are_properties = [bool(set(PROPERTIES) & set(decorators(method))) for method in (ours, base)]
    if any(are_properties):
        if all(are_properties):
            return ""
        return "is a property in our class only" if are_properties[0] else "must be a property"
    taken, passed = parameters(ours), parameters(base)
    for mine, theirs in zip(taken.positional, passed.positional, strict=False):
        if mine != theirs:
            return f"takes {mine} where the engine passes {theirs}"
    unserved = {*passed.positional, *passed.keywords} - {*taken.positional, *taken.keywords}
    if lenient and "classmethod" not in decorators(ours):
        unserved &= passed.required
    if unserved and not taken.variadic:
        return f"does not take {', '.join(sorted(unserved))}"
    further = sorted(taken.required - {*passed.positional, *passed.keywords})
    if further:
        return f"requires {', '.join(further)}"
    if passed.variadic > taken.variadic:
        return "takes no further arguments, but the engine's method does"
    return ""
