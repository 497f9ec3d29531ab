"""What an engine says of itself on `/metrics`, and where it says that prompt tokens came from."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>[-+.\w]+)(?: \d+)?$", re.M
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# vLLM's counter of cached tokens by the tier that supplied them.
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
OURS = "vllm:ritornello_"
# vLLM's word for what no tier of its list fits: of our connector, what is behind the disk.
TIERS = {"external_unspecified": "remote"}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metrics:
    """Samples at one moment, or what they grew by between two."""

    samples: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """From Prometheus' text format."""
        found: dict[tuple[str, Labels], float] = {}
        for sample in SAMPLE.finditer(text):
            labels = tuple(sorted(LABEL.findall(sample["labels"] or "")))
            key = (sample["name"], labels)
            found[key] = found.get(key, 0.0) + float(sample["value"])
        return cls(found)

    @classmethod
    def together(cls, several: Iterable["Metrics"]) -> "Metrics":
        """The sum over several servers."""
        found: dict[tuple[str, Labels], float] = {}
        for one in several:
            for key, value in one.samples.items():
                found[key] = found.get(key, 0.0) + value
        return cls(found)

    def since(self, before: "Metrics") -> "Metrics":
        return Metrics({k: v - before.samples.get(k, 0.0) for k, v in self.samples.items()})

    def total(self, name: str, **labels: str) -> float:
        return sum(
            value
            for (of, has), value in self.samples.items()
            if of == name and labels.items() <= dict(has).items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Totals by the values of a label."""
        found: dict[str, float] = {}
        for (of, has), value in self.samples.items():
            told = dict(has).get(label)
            if of == name and told is not None:
                found[told] = found.get(told, 0.0) + value
        return found

    def hit_tokens(self) -> dict[str, int]:
        """Cached prompt tokens by tier; tiers that gave none are left out."""
        told = self.by(CACHED_BY_SOURCE, "source")
        return {TIERS.get(tier, tier): int(tokens) for tier, tokens in told.items() if tokens}

    def prompt_tokens(self) -> int:
        """All prompt tokens the engine accounts for."""
        return int(self.total(PROMPT_TOKENS))

    def ours(self) -> dict[str, float]:
        """Counters of our connector that moved, by name, with their labels but the engine's."""
        found: dict[str, float] = {}
        for (name, has), value in sorted(self.samples.items()):
            if not name.startswith(OURS) or name.endswith("_created") or not value:
                continue
            said = ",".join(v for k, v in has if k not in ("engine", "model_name"))
            short = name.removeprefix(OURS).removesuffix("_total")
            key = f"{short}:{said}" if said else short
            found[key] = round(found.get(key, 0.0) + value, 6)
        return found
