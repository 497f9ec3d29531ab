"""The set-ups as data: the engines' configurations, their order, and the scale."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.vllm import connector, offloading

# Rates of the lowest tier, in multiples of break-even (`Setup.rate_x`), the most informative first.
RATES = (2.0, 0.5, 10.0, 1.0)
ALONE, HOST = "engine alone", "host"
HOST_DISK, HOST_S3 = "host + disk", "host + s3"
# vLLM's own offloading, as on GPUs: alone, and with `RitornelloTier` below its host memory.
OFFLOADING, OFFLOADING_DISK = "offloading", "offloading + disk"
# The lowest tier of the set-ups that have a tier below the host tier, in the syntax of `tiers`,
# with placeholders that `extra_config` replaces.
DISK = "disk {folder}/disk {capacity}"
LOWER = {HOST_DISK: DISK, HOST_S3: "{s3}", OFFLOADING_DISK: DISK}
# The tier from which a set-up must have hits, unless the set-up never loads, or its gate decides
# and the tier's rate is limited. A set-up with only a host tier is not listed, because the tier may
# be too small for hits.
EXPECTED = {HOST_DISK: "disk", HOST_S3: "remote", OFFLOADING_DISK: "disk"}
# The set-ups of vLLM's own offloading, by name, and for each the set-up without lower tiers with
# which it is compared. All other set-ups are compared with `HOST`.
HOST_OF = {OFFLOADING: OFFLOADING, OFFLOADING_DISK: OFFLOADING}


@dataclass(frozen=True)
class Scale:
    """Scale of the load. Lengths are in tokens. `block`: tokens of a KV block. `device`: tokens
    that fit into an engine's KV memory. `host_mib`: MiB of an engine's host tier, if keys and
    values are in bfloat16. `load`: share of the time for which engines without tiers would be busy;
    it determines the questions per second, at most `most_qps`.
    """

    model: str
    histories: tuple[int, ...]
    users: int
    rounds: int
    system: int = 128
    question: int = 32
    answer: int = 16
    block: int = 64
    device: int = 6144
    host_mib: int = 24
    load: float = 0.6
    most_qps: float | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.system + max(self.histories) + self.rounds * (self.question + self.answer)

    def working_set(self, history: int) -> int:
        """Returns the number of tokens in the conversations of all users after the last round, if
        each begins with `history` tokens. The system prompt, which all users share, counts once.
        """
        return self.system + self.users * (history + self.rounds * (self.question + self.answer))


# Bytes of one element, by dtype.
WIDTHS = {"bfloat16": 2, "float32": 4}
# Blocks of a chunk of vLLM's offloading: 256 tokens, as `RitornelloConnector` chooses for this
# model on a GPU.
OFFLOADED_BLOCKS = 4

OFFLOADED = Scale(
    model="demo", histories=(1152,), users=8, rounds=3, device=3072, host_mib=16, load=0.65
)
FULL = Scale(model="demo", histories=(1152, 1664), users=10, rounds=3, host_mib=40, load=0.65)
# This scale suffices for checks of hits by tier and of equal answers, not for times. The second
# round goes to the other engine, whose host tier cannot have the pages of the first round.
# `most_qps` leaves at least ten seconds between the rounds of a user, in which the pages of the
# first round are stored.
SHORT = Scale(
    model="tiny", histories=(704,), users=4, rounds=2, device=2048, host_mib=16, most_qps=0.4
)


@dataclass(frozen=True)
class Setup:
    """A measured configuration of the engines. `tiers`: in the connector's syntax, with
    placeholders. `rate_x`: bandwidth of the lowest tier in multiples of break-even, None if
    unlimited. `gate`: how the connector decides between loading and computing. `history`: the
    length measured, if not the longest; break-even is taken at this length.
    """

    name: str
    tiers: tuple[str, ...] = ()
    rate_x: float | None = None
    gate: str = "auto"
    history: int | None = None

    def histories(self, scale: Scale) -> tuple[int, ...]:
        """Returns the measured lengths: all lengths if other set-ups are compared with this set-up,
        otherwise `history`, or the longest length if `history` is None.
        """
        if self.name in (ALONE, HOST, OFFLOADING):
            return scale.histories
        return (self.history or max(scale.histories),)

    @property
    def has_answers(self) -> bool:
        """Whether the answers of this set-up are compared with the answers of the engine alone.
        Set-ups that never load, or whose lowest tier is slower than the largest of `RATES`, are not
        compared: they load too few pages.
        """
        return self.gate != "never" and self.rate_x in (None, max(RATES))

    @property
    def title(self) -> str:
        rate = f" at {self.rate_x:g}x" if self.rate_x else ""
        gate = f", {self.gate} load" if self.gate != "auto" else ""
        history = f", {self.history:,} tokens" if self.history else ""
        return self.name + rate + gate + history


@dataclass(frozen=True)
class Place:
    """Locations of a set-up's tiers. `memory`: a folder in memory, for host tiers. `s3`: the
    address of an empty prefix. `break_even`: the rate, in bytes per second, at which one engine
    loads a prompt of the measured length of history in the time that it takes to compute it.
    """

    folder: Path
    memory: Path
    s3: str
    host_mib: int
    break_even: float
    capacity: str = "2GiB"


def extra_config(setup: Setup, place: Place, engine: int = 0) -> dict[str, Any] | None:
    """Returns the settings of the connector, or of `RitornelloTier`, in one engine; None for an
    engine that has neither. Each engine has its own host tier, as on separate machines; the engines
    share the tiers below.
    """
    if setup.name in (ALONE, OFFLOADING):
        return None
    host = f"host {place.host_mib}MiB {place.memory}/host-{engine}"
    told = {"folder": place.folder, "s3": place.s3, "capacity": place.capacity}
    tiers = [tier.format(host=host, **told) for tier in setup.tiers]
    if setup.rate_x is not None:
        tiers[-1] += f" rate={round(setup.rate_x * place.break_even / 1024)}KiB"
    return {"tiers": tiers, "gate": setup.gate}


def transfer_config(setup: Setup, place: Place, engine: int = 0) -> dict[str, Any] | None:
    """Returns `kv_transfer_config` of one engine; None without a connector."""
    settings = extra_config(setup, place, engine)
    if setup.name in HOST_OF:
        return offloading(place.host_mib << 20, OFFLOADED_BLOCKS, settings)
    return None if settings is None else connector(**settings)


def full_plan() -> list[Setup]:
    """Returns the set-ups of a run without `--offloading` and `--short`, the most informative
    first: the last set-ups are left out if time runs out.
    """
    lower = [(name, ("{host}", LOWER[name])) for name in (HOST_DISK, HOST_S3)]
    auto = [Setup(name, tiers, rate) for rate in RATES for name, tiers in lower]
    told = [
        Setup(name, tiers, rate, gate)
        for name, tiers in lower
        for rate, gate in [(None, "never"), *((rate, "always") for rate in RATES)]
    ]
    shorter = [
        Setup(name, tiers, RATES[0], history=history)
        for history in FULL.histories[:-1]
        for name, tiers in lower
    ]
    return [Setup(ALONE), Setup(HOST, ("{host}",)), *auto, *shorter, *told]


def offloading_plan() -> list[Setup]:
    """Returns the set-ups of vLLM's own offloading."""
    tiers = (LOWER[OFFLOADING_DISK],)
    limited = [
        Setup(OFFLOADING_DISK, tiers, rate, gate) for gate in ("auto", "always") for rate in RATES
    ]
    return [
        Setup(ALONE),
        Setup(OFFLOADING),
        *limited[: len(RATES)],
        Setup(OFFLOADING_DISK, tiers, None, "never"),
        *limited[len(RATES) :],
    ]


def short_plan() -> list[Setup]:
    """Returns the engine alone, and set-ups whose gate is "always", so that every hit is loaded."""
    lower = [Setup(name, ("{host}", LOWER[name]), None, "always") for name in (HOST_DISK, HOST_S3)]
    return [Setup(ALONE), *lower]


def fixed_gate_setups(setup: Setup, among: Iterable[Setup]) -> list[Setup]:
    """Returns the set-up that always loads at the rate of `setup`, and the set-up that never loads,
    both with the tiers and the length of history of `setup`; no set-up if `among` lacks one of the
    two. The set-up that never loads has no rate limit, because a limit would not affect it.
    """
    found = {
        other.gate: other
        for other in among
        if (other.name, other.history) == (setup.name, setup.history)
        and (other.gate, other.rate_x) in (("always", setup.rate_x), ("never", None))
    }
    return [found["always"], found["never"]] if len(found) == 2 else []


def bytes_per_token(config: Path, dtype: str) -> int:
    """Returns the bytes of keys and values of a token in all layers. `config` is the path of the
    model's config.json.
    """
    told = json.loads(config.read_text())
    return int(
        2
        * WIDTHS[dtype]
        * told["num_hidden_layers"]
        * told["num_key_value_heads"]
        * told["head_dim"]
    )


def host_mib(scale: Scale, dtype: str) -> int:
    """Returns the size of a host tier in MiB. The tier holds the same number of tokens in `dtype`
    as a tier of `scale.host_mib` MiB in bfloat16.
    """
    return scale.host_mib * WIDTHS[dtype] // WIDTHS["bfloat16"]


# This program runs in the engines' environment, with the package that the engines will load.
ASK = """
import json, sys
from ritornello.vllm.settings import Settings
from ritornello.vllm.tier.settings import TierSettings
told = []
for is_tier, extra in json.load(sys.stdin):
    try:
        (TierSettings if is_tier else Settings).parse(extra)
        told.append(None)
    except Exception as error:
        told.append(str(error))
print(json.dumps(told))
"""


def refusals(configs: Sequence[tuple[bool, dict[str, Any]]], python: Path) -> list[str | None]:
    """Returns, for each configuration, the error with which `RitornelloTier` (if the flag is set)
    or the connector refuses it; None if it is accepted.
    """
    done = subprocess.run(
        [str(python), "-c", ASK],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{python} cannot import the connector: {done.stderr.strip()[-300:]}")
    told: list[str | None] = json.loads(done.stdout)
    return told
