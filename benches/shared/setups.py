"""The set-ups as data: what the engines are given, in which order, and at which scale."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATES = (2.0, 0.5, 10.0, 1.0)
ALONE, HOST, STORE = "engine alone", "host", "disk, one tier"
HOST_DISK, HOST_S3 = "host + disk", "host + s3"
LOWER = {HOST_DISK: "disk {folder}/disk {capacity}", HOST_S3: "{s3}"}
# The tiers that set-ups are there for. Of a host tier that is too small nothing can be promised.
EXPECTED = {STORE: "disk", HOST_DISK: "disk", HOST_S3: "remote"}


@dataclass(frozen=True)
class Scale:
    """How much is asked of this machine. Tokens, but for `host_mib`; `load`: share of the time that
    the engines alone would be computing, which sets the rate of questions, up to `most_qps`.
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
        """Of all prompts and their answers."""
        return self.system + max(self.histories) + self.rounds * (self.question + self.answer)

    def working_set(self, history: int) -> int:
        """Tokens that all users of a history length have in the end; the system prompt once."""
        return self.system + self.users * (history + self.rounds * (self.question + self.answer))


FULL = Scale(model="demo", histories=(1152, 1664), users=10, rounds=3, host_mib=40, load=0.65)
# Facts only: hits by tier, equal answers. A second round goes to the other engine, whose host tier
# does not have it however large it is; it comes so late that a busy machine has stored the first.
SHORT = Scale(
    model="tiny", histories=(704,), users=4, rounds=2, device=2048, host_mib=16, most_qps=0.4
)


@dataclass(frozen=True)
class Setup:
    """`tiers` as the connector reads them, with places to fill in. `rate_x`: the bandwidth of the
    lowest tier in multiples of break-even, None where it is not limited. `gate`: how the connector
    decides between loading and computing. `history`: the length it is measured at, if not the
    longest; break-even is that of the length.
    """

    name: str
    tiers: tuple[str, ...] = ()
    rate_x: float | None = None
    gate: str = "auto"
    history: int | None = None

    def histories(self, scale: Scale) -> tuple[int, ...]:
        """What it is measured at: all lengths where others are compared with it."""
        if self.name in (ALONE, HOST):
            return scale.histories
        return (self.history or max(scale.histories),)

    @property
    def has_answers(self) -> bool:
        """Whether its answers are compared with those of the engine alone: not again under the same
        tiers, and where all that is there comes.
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
    """Where a set-up finds its tiers. `memory` is a folder in memory, for host tiers; `s3` the
    address of an empty prefix; `break_even` is in bytes a second of one engine, at the length of
    history that is measured.
    """

    folder: Path
    memory: Path
    s3: str
    host_mib: int
    break_even: float
    capacity: str = "2GiB"


def extra_config(setup: Setup, place: Place, engine: int = 0) -> dict[str, Any] | None:
    """`kv_connector_extra_config` of one engine; None where there is no connector. Each engine has
    a host tier of its own, as on machines of their own; what is below it they share.
    """
    if setup.name == ALONE:
        return None
    if setup.name == STORE:
        return {"path": str(place.folder / "store"), "capacity": place.capacity}
    host = f"host {place.host_mib}MiB {place.memory}/host-{engine}"
    told = {"folder": place.folder, "s3": place.s3, "capacity": place.capacity}
    tiers = [tier.format(host=host, **told) for tier in setup.tiers]
    if setup.rate_x is not None:
        tiers[-1] += f" rate={round(setup.rate_x * place.break_even / 1024)}KiB"
    return {"tiers": tiers, "gate": setup.gate}


def full_plan() -> list[Setup]:
    """All set-ups, those first that say most: where time runs out the rest is left out."""
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


def short_plan() -> list[Setup]:
    """One of each kind; the gate stays out of it, so that every hit is loaded."""
    lower = [Setup(name, ("{host}", LOWER[name]), None, "always") for name in LOWER]
    return [Setup(ALONE), Setup(STORE), *lower]


def fixed_gate_setups(setup: Setup, among: Iterable[Setup]) -> list[Setup]:
    """Always and never loading under the same tiers, if both are among them. What never loads does
    not know a rate.
    """
    found = {
        other.gate: other
        for other in among
        if (other.name, other.history) == (setup.name, setup.history)
        and (other.gate, other.rate_x) in (("always", setup.rate_x), ("never", None))
    }
    return [found["always"], found["never"]] if len(found) == 2 else []


def bytes_per_token(config: Path) -> int:
    """Of keys and values in all layers, in bfloat16; `config` is the model's config.json."""
    told = json.loads(config.read_text())
    return int(2 * 2 * told["num_hidden_layers"] * told["num_key_value_heads"] * told["head_dim"])


# Asked in the engines' environment, of the package that they will load.
ASK = """
import json, sys
from ritornello.vllm.settings import Settings
told = []
for extra in json.load(sys.stdin):
    try:
        Settings.parse(extra)
        told.append(None)
    except Exception as error:
        told.append(str(error))
print(json.dumps(told))
"""


def refusals(configs: Sequence[dict[str, Any]], python: Path) -> list[str | None]:
    """What the connector says against each configuration; None where it takes it."""
    done = subprocess.run(
        [str(python), "-c", ASK],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{python} does not know the connector: {done.stderr.strip()[-300:]}")
    told: list[str | None] = json.loads(done.stdout)
    return told
