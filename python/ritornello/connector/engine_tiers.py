"""Checks `tiers` against the memory that an engine manages itself."""

from collections.abc import Sequence
from dataclasses import dataclass

# Names of a GPU's memory, which every engine sizes itself.
DEVICE_WORDS = ("device", "gpu", "cuda", "hbm", "vram")
DISK = '"disk /nvme/kv 200GiB"'


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """The tiers of an engine. `place`: the part of its configuration that holds the list.
    `device`, `host`: what an error says about an entry for the engine's own memory, with the
    engine's setting for its size. `host` is "" if the host tier is a store.
    """

    place: str
    device: str
    host: str = ""

    def check(self, tiers: Sequence[str]) -> None:
        """Raises ValueError unless `tiers`, if there are any, are a disk, or a disk and a remote
        below it. If the host tier is a store, it may be listed before them, or in place of the
        disk.
        """
        above: set[str] = set()
        for tier in tiers:
            kind = tier.split()[0]
            if kind in DEVICE_WORDS:
                raise self.refusal_of(tier, f"{self.device}; leave it out of the list")
            if kind == "host":
                if self.host or above:
                    first = 'one host tier is used, first in the list, as "host 8GiB"'
                    raise self.refusal_of(tier, self.host or first)
            elif kind == "disk":
                if above - {"host"} or not directories_of(tier):
                    raise self.refusal_of(
                        tier, f"one disk tier is used, before a remote, as {DISK}"
                    )
            elif ":" not in kind:
                ours = "" if self.host else 'host memory, as "host 8GiB", '
                raise self.refusal_of(tier, f"a tier is {ours}a disk, as {DISK}, or a remote")
            else:
                if "remote" in above:
                    raise self.refusal_of(tier, "one remote is used")
                kind = "remote"
            above.add(kind)
        if tiers and above == {"remote"}:
            raise ValueError(
                f'{self.place}: "tiers" needs a disk, as {DISK}: the pages of a remote are loaded '
                "from it"
            )

    def refusal_of(self, tier: str, instead: str) -> ValueError:
        """Returns an error that shows `tier` without the options of an address."""
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
    """Returns `tier` with the write policy "none" instead of its own."""
    kept = [word for word in tier.split() if not word.startswith("write=")]
    return " ".join((*kept, "write=none"))
