"""Documents, environments and downloads name the same tested versions of the engines."""

import re
from pathlib import Path

import pytest

from ritornello.lmcache.interface import INTERFACE as LMCACHE
from ritornello.sglang.interface import INTERFACE as SGLANG
from ritornello.vllm import engine_config
from ritornello.vllm.interface import INTERFACE as VLLM
from ritornello.vllm.tier.interface import INTERFACE as TIER

ROOT = Path(__file__).resolve().parents[2]
INTERFACES = {"lmcache": LMCACHE, "sglang": SGLANG, "vllm": VLLM}
DOCUMENTS = sorted((ROOT / "docs/engines").glob("*.md"))


@pytest.mark.parametrize("engine", INTERFACES)
def test_installed_and_downloaded_versions_are_tested(engine: str) -> None:
    requirements = (ROOT / f"engines/{engine}/requirements.txt").read_text()
    installed = re.findall(rf"^{engine}(?:-cpu)?==(\S+)", requirements, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    downloaded = re.findall(rf"engines/sources\.sh {engine} (\S+)", makefile)
    assert len(INTERFACES[engine].tested) == 2
    assert sorted(installed + downloaded) == sorted(INTERFACES[engine].tested)


@pytest.mark.parametrize("engine", INTERFACES)
def test_document_names_tested_versions_once(engine: str) -> None:
    name, tested = INTERFACES[engine].engine, " and ".join(INTERFACES[engine].tested)
    assert (ROOT / f"docs/engines/{engine}.md").read_text().count(f"with {name} {tested}") == 1
    assert f"*{name}* ({', '.join(INTERFACES[engine].tested)})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "README.md"], ids=lambda path: path.name)
def test_documents_mention_only_tested_versions(document: Path) -> None:
    text = document.read_text()
    for interface in INTERFACES.values():
        mentioned = re.findall(rf"{interface.engine} (\d+\.\d+(?:\.\d+)?)", text)
        assert [v for v in mentioned if not any(t.startswith(v) for t in interface.tested)] == []


def test_tier_is_tested_with_the_connectors_versions() -> None:
    assert TIER.tested == VLLM.tested


def test_engine_config_docstring_names_tested_versions() -> None:
    said = f"vLLM {' and '.join(VLLM.tested)}"
    assert said in " ".join((engine_config.__doc__ or "").split())


def test_error_for_unknown_interface_names_tested_versions() -> None:
    with pytest.raises(ImportError, match=r"for SGLang 0\.5\.22 and 0\.5\.23; .* 9\.9 differs"):
        SGLANG.require("gone", "9.9")
