"""Settings of the tier, besides `type` and `module_path`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ritornello.vllm.settings import PLACE, Settings

LOCALITIES = ("LOCAL", "REMOTE")
DEVICE_WORDS = ("device", "gpu", "cuda", "hbm", "vram")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`store`: the settings that tier and connector share; its `tiers` are one disk, and at most
    one remote below it, because vLLM's host memory is the host tier. `enable_kv_events`: vLLM's
    event publisher is told which chunks were stored, and which could not be loaded. `locality`:
    where the store is, as seen from vLLM, for these events and for requests that choose tiers; None
    leaves it open.
    """

    store: Settings
    enable_kv_events: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "TierSettings":
        """Parses the tier's configuration. ValueError says what to write instead."""
        rest = dict(config)
        events = rest.pop("enable_kv_events", False)
        if not isinstance(events, bool):
            raise ValueError(f'"enable_kv_events" is true or false, not {events!r}')
        locality = rest.pop("locality", None)
        if locality is not None and locality not in LOCALITIES:
            raise ValueError(f'"locality" is one of {", ".join(LOCALITIES)}, not {locality!r}')
        store = Settings.parse(rest)
        host = next((tier for tier in store.tiers if tier.split()[0] == "host"), None)
        if host is not None:
            raise refused(
                host,
                'vLLM\'s own host memory is the host tier: its size is "cpu_bytes_to_use", next '
                'to "secondary_tiers"',
            )
        check_tiers(store.tiers)
        return cls(store, events, locality)


def check_tiers(tiers: Sequence[str]) -> None:
    """Raises ValueError unless `tiers`, if there are any, are one disk, or a disk and a remote."""
    has_disk = has_remote = False
    for tier in tiers:
        kind, *words = tier.split()
        if kind in DEVICE_WORDS:
            raise refused(
                tier,
                "vLLM sizes its device memory itself: --gpu-memory-utilization or "
                "--kv-cache-memory-bytes",
            )
        if kind == "disk":
            if has_disk or has_remote or not any("/" in word for word in words):
                raise refused(
                    tier, 'one disk tier is used, before a remote, as "disk /nvme/kv 200GiB"'
                )
            has_disk = True
        elif ":" not in kind:
            raise refused(tier, 'a tier is a disk, as "disk /nvme/kv 200GiB", or a remote')
        elif has_remote:
            raise refused(kind, "one remote is used")
        else:
            has_remote = True
    if tiers and not has_disk:
        raise ValueError(
            f'{PLACE}: "tiers" needs a disk, as "disk /nvme/kv 200GiB": the pages of a remote are '
            "loaded from it"
        )


def refused(tier: str, instead: str) -> ValueError:
    """Returns an error that shows `tier` without the options of an address, which may be
    secrets.
    """
    shown = " ".join(word.partition("?")[0] for word in tier.split())
    return ValueError(f'{PLACE}: "tiers": {shown!r}: {instead}')
