"""The sources of every supported vLLM, and what they declare."""

import ast
from pathlib import Path

import pytest

from servers.environment import ROOT

NEXT = "0.33.0"


def installed() -> Path:
    import vllm

    return Path(vllm.__file__).parent.parent


def downloaded() -> Path:
    folder = ROOT / f"build/env/vllm-{NEXT}-sources"
    if not folder.is_dir():
        pytest.skip(f"engines/vllm/sources.sh {NEXT} has not been run")
    return folder


def class_of(sources: Path, file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((sources / file).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{file} has no class {name}")


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def is_abstract(method: ast.FunctionDef) -> bool:
    return any(getattr(mark, "id", "") == "abstractmethod" for mark in method.decorator_list)
