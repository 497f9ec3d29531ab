"""Every engine's document lists the settings that the engine's connector accepts, and the shared
settings read the same in all documents.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ritornello as rt
from ritornello.connector.settings import SHARED, StoreSettings
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.vllm.offloading_settings import OffloadingSettings
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.tier.settings import TierSettings

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs/engines"
# The documents with the parsers of the settings that they list.
PARSERS: dict[str, tuple[Callable[[Any], object], ...]] = {
    "vllm": (VllmSettings.parse_on_cpus, OffloadingSettings.parse),
    "vllm-tier": (TierSettings.parse,),
    "sglang": (SGLangSettings.parse,),
    "lmcache": (LMCacheSettings.parse,),
}
KEYS_MAX = 10
Row = tuple[str, str]


def rows_of(document: str) -> dict[str, Row]:
    """Returns the default and the meaning of each key in the first table of a document's section
    "Settings".
    """
    text = (DOCUMENTS / f"{document}.md").read_text()
    (section,) = re.findall(r"^## Settings\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    _, table = section.split("| key | default | meaning |\n|---|---|---|\n")[:2]
    found: dict[str, Row] = {}
    for line in table.partition("\n\n")[0].splitlines():
        names, defaults, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
        keys = re.findall(r"`(\w+)`", names)
        # A row of several keys lists their defaults in the same order.
        each = defaults.split(", ") if len(keys) > 1 else [defaults]
        found |= {key: (given, meaning) for key, given in zip(keys, each, strict=True)}
    return found


def known_keys(parse: Callable[[Any], object]) -> tuple[str, ...]:
    """Returns the keys that a parser's error for an unknown key lists."""
    with pytest.raises(ValueError, match="unknown key 'x'") as raised:
        parse({"path": "/kv", "x": 1})
    return tuple(str(raised.value).partition("ritornello knows ")[2].split(", "))


@pytest.mark.parametrize("document", PARSERS)
def test_document_lists_the_accepted_keys_in_their_order(document: str) -> None:
    listed = tuple(rows_of(document))
    assert len(listed) <= KEYS_MAX
    for parse in PARSERS[document]:
        assert known_keys(parse) == listed


@pytest.mark.parametrize("key", SHARED)
def test_shared_setting_reads_the_same_in_all_documents(key: str) -> None:
    defaults = {rows_of(document)[key][0] for document in PARSERS}
    meanings = {rows_of(document)[key][1] for document in PARSERS}
    assert len(defaults) == 1
    if key == "tiers":
        # Each document names the tiers that its engine manages itself, so only the beginning of the
        # meaning and a link are the same in all documents.
        assert all(meaning.startswith("instead of all keys above: ") for meaning in meanings)
        assert all("([tiers](#several-tiers))" in meaning for meaning in meanings)
    else:
        assert len(meanings) == 1


def test_nine_documented_defaults_match_the_code() -> None:
    rows = rows_of("vllm")
    settings = StoreSettings()
    assert rows["prefetch"][0] == f'`"{settings.prefetch}"`'
    assert rows["gate"][0] == f'`"{settings.gate}"`'
    store = inspect.signature(rt.Store.open).parameters
    for key in ("eviction", "codec", "admission"):
        assert rows[key][0] == f'`"{store[key].default}"`'
    assert store["write_budget"].default is None
    assert (rows["write_budget"][0], rows["tiers"][0]) == ("none", "none")
    assert VllmSettings.parse({"path": "/kv"}).read_only is False
    assert rows["read_only"][0] == rows_of("vllm-tier")["read_only"][0] == "`false`"
    assert rows_of("lmcache")["namespace"][0] == f'`"{LMCacheSettings().namespace}"`'


@pytest.mark.parametrize("document", ["sglang", "lmcache"])
def test_document_says_why_read_only_is_missing(document: str) -> None:
    assert "read_only" not in rows_of(document)
    assert "There is no `read_only` here: " in (DOCUMENTS / f"{document}.md").read_text()
