"""Checks the setting `tiers`, the list of a connector's tiers. Engines manage the memory of GPUs,
and some engines also host memory: the list must not name memory that the engine manages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ritornello._core import shown_tier

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
                if names_user(kind):
                    raise self.refusal_of(
                        tier,
                        "an address must have no user and no password: credentials come from the "
                        "environment, or from a profile",
                    )
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
        """Returns an error that shows `tier`, without what may be a secret in an address, and says
        what to write instead (`instead`).
        """
        return ValueError(f'{self.place}: "tiers": {shown_tier(tier)!r}: {instead}')


def directories_of(tier: str) -> tuple[str, ...]:
    """Returns the directories of a disk, () for another tier."""
    kind, *words = tier.split()
    if kind != "disk":
        return ()
    return tuple(word for word in words if "/" in word and "=" not in word.partition("/")[0])


def names_user(address: str) -> bool:
    """Whether `address` has a user or a password. A password may contain `/` and `?`, and the name
    of a bucket contains no colon.
    """
    _, _, rest = address.partition("?")[0].partition("://")
    return not {"@", ":"}.isdisjoint(rest.partition("/")[0])


def never_written(tier: str) -> str:
    """Returns `tier` with its write policy replaced by "none"."""
    kept = [word for word in tier.split() if not word.startswith("write=")]
    return " ".join((*kept, "write=none"))
