"""The types of expressions in our package, as far as annotations determine them: the annotations of
our parameters and fields, and of an engine's fields and methods.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from declarations import FUNCTIONS, PROPERTIES, Declared, Function, Sources, decorators

WRAPPERS = frozenset(("Annotated", "ClassVar", "Final", "Optional"))
MAPPINGS = frozenset(("Dict", "Mapping", "defaultdict", "dict"))
# Calls whose result has the type of their first argument.
COPIES = frozenset(("copy.copy", "list", "reversed", "sorted", "tuple"))
# Methods of containers, with the kind of their result: an element ("one"), or a container of the
# same elements ("each").
CONTAINER_METHODS = {"get": "one", "pop": "one", "values": "each"}


class Type(NamedTuple):
    """The type of an expression. `kind`: "object" (an instance of the class `name` in `module`),
    "class" (the class), "super" (the bases of the class), "module", "function" (`inner` is its
    declaration), or "each" (a container; `inner` is the type of its elements).
    """

    kind: str
    module: str = ""
    name: str = ""
    inner: Any = None

    @property
    def has_members(self) -> bool:
        return self.kind in ("class", "object", "super")

    @property
    def element(self) -> "Type | None":
        return self.inner if self.kind == "each" else None


class Hints(NamedTuple):
    """Types that annotations omit. A class is given as its module and name. `results`: the class of
    a function's result, by the function's name. For attributes that a class does not declare, by
    the name of the class: `parts`, further classes whose attributes its objects have (one of these
    classes must have the attribute); `kinds`, the subclasses that our package uses (all of them
    must have it).
    """

    results: Mapping[str, tuple[str, str]] = {}
    parts: Mapping[str, Sequence[tuple[str, str]]] = {}
    kinds: Mapping[str, Sequence[tuple[str, str]]] = {}


class Types:
    """The types of expressions in the modules of `sources`. Methods return None for an unknown
    type.
    """

    def __init__(self, sources: Sources, hints: Hints) -> None:
        self.sources, self.hints = sources, hints

    def of_annotation(self, module: str, node: ast.expr | None) -> Type | None:
        """Returns the type that an annotation in `module` names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.of_annotation(module, ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Name):
            declared = self.sources.find(module, node.id)
            if declared is None:
                return None
            if isinstance(declared.node, ast.ClassDef):
                return Type("object", declared.module, declared.node.name)
            return self.of_annotation(declared.module, getattr(declared.node, "value", None))
        if isinstance(node, ast.BinOp):
            return self.of_annotation(module, node.left) or self.of_annotation(module, node.right)
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rpartition(".")[2]
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name in WRAPPERS:
                return self.of_annotation(module, parts[0])
            inner = self.of_annotation(module, parts[-1 if name in MAPPINGS else 0])
            if inner is None or name == "type":
                return inner and inner._replace(kind="class")
            return Type("each", inner=inner)
        return None

    def of_declared(self, declared: Declared | None) -> Type | None:
        """Returns the type of what a statement declares."""
        if declared is None:
            return None
        module, node, function = declared
        if isinstance(node, ast.ClassDef):
            return Type("class", module, node.name)
        if isinstance(node, FUNCTIONS):
            if set(PROPERTIES) & set(decorators(node)):
                return self.of_annotation(module, node.returns)
            return Type("function", module, inner=node)
        if isinstance(node, ast.AnnAssign):
            return self.of_annotation(module, node.annotation)
        value = getattr(node, "value", None)
        if function is not None and isinstance(value, ast.Name):
            return self.of_annotation(module, _annotation_of(function, value.id))
        return None

    def member(self, owner: Type, name: str) -> Declared | None:
        """Returns the declaration of an attribute of an object, a class or its bases."""
        if owner.kind != "super":
            return self.sources.members(owner.module, owner.name).get(name)
        bases = self.sources.class_of(owner.module, owner.name).bases
        members = (self.sources.members(owner.module, ast.unparse(base)) for base in bases)
        return next((found[name] for found in members if name in found), None)

    def of_attribute(self, owner: Type, name: str) -> Type | None:
        if owner.kind == "module":
            return self.of_declared(self.sources.find(owner.module, name))
        if not owner.has_members:
            return None
        declared = self.member(owner, name)
        if owner.kind == "class" and declared and isinstance(declared.node, ast.Assign):
            return Type("object", owner.module, owner.name)  # an enum's member
        return self.of_declared(declared)

    def of_call(self, function: Type) -> Type | None:
        if function.kind == "class":
            return function._replace(kind="object")
        if function.kind != "function":
            return None
        hint = self.hints.results.get(function.inner.name)
        returned = function.inner.returns
        return Type("object", *hint) if hint else self.of_annotation(function.module, returned)


class Scope:
    """The scope of a piece of code in `module`, inside the class `owner` unless that is "".
    `names`: the types of local names.
    """

    def __init__(
        self,
        types: Types,
        module: str,
        owner: str = "",
        names: dict[str, Type | None] | None = None,
    ) -> None:
        self.types, self.module, self.owner = types, module, owner
        self.names = dict(names or {})

    def assign(self, target: ast.expr, kind: Type | None) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = kind
        elif isinstance(target, (ast.List, ast.Tuple)):
            for part in target.elts:
                self.assign(part, None)

    def inside(self, generators: Sequence[ast.comprehension]) -> "Scope":
        """Returns the scope inside a comprehension, which knows the loop variables of `generators`,
        the comprehension's `for` clauses.
        """
        inner = Scope(self.types, self.module, self.owner, self.names)
        for generator in generators:
            container = inner.type_of(generator.iter)
            inner.assign(generator.target, container and container.element)
        return inner

    def type_of(self, node: ast.expr | None) -> Type | None:
        if isinstance(node, ast.Name):
            if node.id in self.names:
                return self.names[node.id]
            sources = self.types.sources
            if isinstance(sources.names(self.module).get(node.id), ast.Import):
                return Type("module", node.id)
            return self.types.of_declared(sources.find(self.module, node.id))
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            return owner and self.types.of_attribute(owner, node.attr)
        if isinstance(node, ast.Call):
            return self._type_of_call(node)
        if isinstance(node, ast.Subscript):
            owner = self.type_of(node.value)
            return owner and owner.element
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.type_of, node.values)), None)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body) or self.type_of(node.orelse)
        if isinstance(node, ast.NamedExpr):
            return self.type_of(node.value)
        if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            inner = self.inside(node.generators).type_of(node.elt)
            return inner and Type("each", inner=inner)
        return None

    def _type_of_call(self, node: ast.Call) -> Type | None:
        name = ast.unparse(node.func)
        if name == "super":
            return Type("super", self.module, self.owner)
        if name in COPIES and node.args:
            return self.type_of(node.args[0])
        if isinstance(node.func, ast.Attribute):
            container = self.type_of(node.func.value)
            if container is not None and container.kind == "each":
                result = CONTAINER_METHODS.get(node.func.attr)
                return {"each": container, "one": container.element}.get(result or "")
        function = self.type_of(node.func)
        return function and self.types.of_call(function)


def _annotation_of(function: Function, name: str) -> ast.expr | None:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return next((a.annotation for a in arguments if a.arg == name), None)
