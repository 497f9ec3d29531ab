"""Lists of tiers that an engine cannot use are refused by its settings, in one line that says what
to write.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ritornello.connector.engine_tiers import DEVICE_WORDS
from ritornello.connector.settings import StoreSettings
from ritornello.lmcache.settings import Settings as LMCacheSettings
from ritornello.sglang.settings import Settings as SGLangSettings
from ritornello.vllm.offloading_settings import OffloadingSettings
from ritornello.vllm.settings import Settings as VllmSettings
from ritornello.vllm.tier.settings import TierSettings

DISK = "disk /nvme/kv 200GiB"
REMOTE = "s3://bucket/prefix?secret=hunter2"

# For each engine: the function that parses its settings; its setting for device memory; and the
# advice in the refusal of a host tier, which names the engine's setting for host memory or, for
# `vllm`, the entry of its host tier ("" if our store serves as the host tier).
PARSERS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "vllm": (OffloadingSettings.parse, "--gpu-memory-utilization", 'as "host 8GiB"'),
    "vllm_on_cpus": (VllmSettings.parse_on_cpus, "VLLM_CPU_KVCACHE_SPACE", ""),
    "vllm_tier": (TierSettings.parse, "--gpu-memory-utilization", '"cpu_bytes_to_use"'),
    "sglang": (SGLangSettings.parse, "--mem-fraction-static", "--hicache-size"),
    "lmcache": (LMCacheSettings.parse, "--gpu-memory-utilization", "--l1-size-gb"),
}


def refusal(engine: str, tiers: list[str]) -> str:
    """Returns the text of the error that the engine's settings raise for a list of tiers. Asserts
    that the text is one line, names the setting, and shows no secret.
    """
    with pytest.raises(ValueError) as raised:
        PARSERS[engine][0]({"tiers": tiers})
    text = str(raised.value)
    assert '"tiers"' in text
    assert "\n" not in text
    assert "hunter2" not in text
    return text


@pytest.mark.parametrize("engine", PARSERS)
@pytest.mark.parametrize("tiers", [[DISK], [DISK, REMOTE], ["disk /a /b 4TiB rate=1MiB", REMOTE]])
def test_disk_and_remote_are_accepted(engine: str, tiers: list[str]) -> None:
    PARSERS[engine][0]({"tiers": tiers})


@pytest.mark.parametrize("engine", PARSERS)
@pytest.mark.parametrize("word", DEVICE_WORDS)
def test_refusal_of_device_tier_names_the_engines_setting(engine: str, word: str) -> None:
    _, setting, _ = PARSERS[engine]
    for tiers in ([f"{word} 8GiB", DISK, REMOTE], [f"{word} 8GiB"]):
        text = refusal(engine, tiers)
        assert f"'{word} 8GiB'" in text
        assert setting in text


@pytest.mark.parametrize("engine", PARSERS)
def test_refusal_of_host_tier_below_disk_names_the_setting(engine: str) -> None:
    _, _, setting = PARSERS[engine]
    assert (setting or "first in the list") in refusal(engine, [DISK, "host 8GiB"])


@pytest.mark.parametrize("engine", ["vllm_tier", "sglang", "lmcache"])
def test_host_tier_that_the_engine_manages_is_refused(engine: str) -> None:
    _, _, setting = PARSERS[engine]
    assert setting in refusal(engine, ["host 8GiB", DISK, REMOTE])


@pytest.mark.parametrize("tiers", [["host 8GiB"], ["host 8GiB", REMOTE], ["host 8GiB", DISK]])
def test_host_tier_on_cpus_is_accepted(tiers: list[str]) -> None:
    assert VllmSettings.parse_on_cpus({"tiers": tiers}).tiers == tuple(tiers)


@pytest.mark.parametrize("engine", PARSERS)
@pytest.mark.parametrize(
    ("tiers", "advice"),
    [
        ([REMOTE], "needs a disk"),
        ([DISK, REMOTE, "s3://b?secret=hunter2"], "'s3://b?…': write only one remote"),
        ([DISK, "disk /b"], "'disk /b': write only one disk tier"),
        ([REMOTE, DISK], "before a remote"),
        (["disk"], '"disk /nvme/kv 200GiB"'),
        (["disk 8GiB rate=1GiB/s"], "write only one disk tier"),
        (["disc /kv 1GiB"], "or a remote"),
    ],
)
def test_unusable_lists_are_refused_with_advice(engine: str, tiers: list[str], advice: str) -> None:
    assert advice in refusal(engine, tiers)


WITH_PASSWORD = ["s3://me:hunter2@b", "s3://me:hun?ter2@b", "s3://me:hun/ter2@b", "s3://hunter2@b"]


@pytest.mark.parametrize("engine", PARSERS)
@pytest.mark.parametrize("address", WITH_PASSWORD)
def test_address_with_a_user_is_refused_without_showing_it(engine: str, address: str) -> None:
    text = refusal(engine, [DISK, address])
    assert "no user and no password" in text
    assert "ter2" not in text
    assert "ter2" not in refusal(engine, [DISK, REMOTE, address])


@pytest.mark.parametrize("address", [*WITH_PASSWORD, "s3://b?secret=hunter2"])
def test_log_and_metrics_show_no_secret_of_an_address(address: str) -> None:
    tiers = [DISK, address]
    shown = [
        *StoreSettings(tiers=tuple(tiers)).shown_tiers,
        OffloadingSettings(None, {"tiers": tiers}).places,
    ]
    assert shown[0] == DISK
    assert not [text for text in shown if "ter2" in text or "hun" in text]
