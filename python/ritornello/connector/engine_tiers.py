"""Checks the setting `tiers`, the list of a connector's tiers. Engines manage the memory of GPUs,
and some engines also host memory: the list must not name memory that the engine manages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Names of a GPU's memory, which every engine sizes itself.
DEVICE_WORDS = ("device", "gpu", "cuda", "hbm", "vram")
DISK = '"disk /nvme/kv 200GiB"'


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """The rules for the list of tiers of one engine. `place`: the part of the engine's
    configuration that holds the list. `device`, `host`: why an entry for GPU memory or host memory
    is refused, with the engine's setting for the size of this memory. `host` is "" if the list may
    have a host tier.
    """

    place: str
    device: str
    host: str = ""

    def check(self, tiers: Sequence[str]) -> None:
        """Raises ValueError unless `tiers` is empty, a disk, or a disk and then a remote. If `host`
        is "", a host tier may come first, or replace the disk.
        """
        above: set[str] = set()
        for tier in tiers:
            kind = tier.split()[0]
            if kind in DEVICE_WORDS:
                raise self.refusal_of(tier, f"{self.device}; leave it out of the list")
            if kind == "host":
                if self.host or above:
                    first = 'write only one host tier, first in the list, as "host 8GiB"'
                    raise self.refusal_of(tier, self.host or first)
            elif kind == "disk":
                if above - {"host"} or not directories_of(tier):
                    raise self.refusal_of(
                        tier, f"write only one disk tier, before a remote, as {DISK}"
                    )
            elif ":" not in kind:
                ours = "" if self.host else 'host memory, as "host 8GiB", '
                raise self.refusal_of(tier, f"a tier is {ours}a disk, as {DISK}, or a remote")
            else:
                if "remote" in above:
                    raise self.refusal_of(tier, "write only one remote")
                kind = "remote"
            above.add(kind)
        if tiers and above == {"remote"}:
            raise ValueError(
                f'{self.place}: "tiers" needs a disk, as {DISK}: pages of a remote are copied to '
                "the disk, and loaded from there"
            )

    def refusal_of(self, tier: str, instead: str) -> ValueError:
        """Returns an error that shows `tier`, without the options of an address, and says what to
        write instead (`instead`).
        """
        return ValueError(f'{self.place}: "tiers": {without_options(tier)!r}: {instead}')


def directories_of(tier: str) -> tuple[str, ...]:
    """Returns the directories of a disk, () for another tier."""
    kind, *words = tier.split()
    if kind != "disk":
        return ()
    return tuple(word for word in words if "/" in word and "=" not in word.partition("/")[0])


def without_options(tier: str) -> str:
    """Returns `tier` without the options of an address, which may be secrets."""
    return " ".join(word.partition("?")[0] for word in tier.split())


def never_written(tier: str) -> str:
    """Returns `tier` with its write policy replaced by "none"."""
    kept = [word for word in tier.split() if not word.startswith("write=")]
    return " ".join((*kept, "write=none"))
