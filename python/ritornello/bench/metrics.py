"""An engine's metrics on `/metrics`, and its counts of prompt tokens by source."""

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
CONNECTOR_PREFIX = "vllm:ritornello_"
# vLLM counts tokens from tiers that it does not know as `external_unspecified`. Among the tiers of
# Ritornello's connector, vLLM does not know the remote.
TIERS = {"external_unspecified": "remote"}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metrics:
    """The values of Prometheus samples at one moment, or their growth between two moments, by name
    and labels.
    """

    samples: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Parses Prometheus' text format."""
        found: dict[tuple[str, Labels], float] = {}
        for sample in SAMPLE.finditer(text):
            labels = tuple(sorted(LABEL.findall(sample["labels"] or "")))
            key = (sample["name"], labels)
            found[key] = found.get(key, 0.0) + float(sample["value"])
        return cls(found)

    @classmethod
    def sum_of(cls, several: Iterable["Metrics"]) -> "Metrics":
        """Returns the sum over several servers."""
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
        """Returns the totals of the samples of `name`, by the value of their label `label`."""
        found: dict[str, float] = {}
        for (of, has), value in self.samples.items():
            values = dict(has).get(label)
            if of == name and values is not None:
                found[values] = found.get(values, 0.0) + value
        return found

    def hit_tokens(self) -> dict[str, int]:
        """Returns cached prompt tokens by tier, without tiers that supplied no tokens."""
        values = self.by(CACHED_BY_SOURCE, "source")
        return {TIERS.get(tier, tier): int(tokens) for tier, tokens in values.items() if tokens}

    def prompt_tokens(self) -> int:
        """Returns the number of prompt tokens that the engine counted."""
        return int(self.total(PROMPT_TOKENS))

    def connector_counters(self) -> dict[str, float]:
        """Returns the connector's nonzero counters by name and labels, without the engine's
        labels.
        """
        found: dict[str, float] = {}
        for (name, has), value in sorted(self.samples.items()):
            if not name.startswith(CONNECTOR_PREFIX) or name.endswith("_created") or not value:
                continue
            other_labels = ",".join(v for k, v in has if k not in ("engine", "model_name"))
            short = name.removeprefix(CONNECTOR_PREFIX).removesuffix("_total")
            key = f"{short}:{other_labels}" if other_labels else short
            found[key] = round(found.get(key, 0.0) + value, 6)
        return found
