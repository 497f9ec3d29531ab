"""The report of the demonstration: a row for each length, broken claims, JSON and a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table


@dataclass(frozen=True)
class Sample:
    """One prompt in the three processes of `demo.__main__`: the first (cold), the second (warm),
    and the third, without Ritornello, which gets the prompt twice (off, then local). `cold`,
    `warm`, `local`: the number of the prompt's tokens by the source of their KV. `same_split`:
    `warm` and `local` have equally many computed tokens. `identical`: the answers of `warm` and of
    `local` are equal.
    """

    length: int
    ttft_cold_s: float
    ttft_warm_s: float
    ttft_off_s: float
    cold: dict[str, int]
    warm: dict[str, int]
    local: dict[str, int]
    same_split: bool
    identical: bool


@dataclass(frozen=True)
class Row:
    """Medians over the documents of one length; cold, warm and off name processes, as in `Sample`.
    `local_hit_tokens_warm`, `external_hit_tokens_warm`: tokens whose KV came from vLLM's own prefix
    cache, and from the store. `warm_over_cold`: `ttft_warm_s` divided by `ttft_cold_s`.
    `answers_identical`: whether `Sample.identical` holds for each document.
    """

    prompt_tokens: int
    documents: int
    prefilled_tokens_cold: int
    prefilled_tokens_warm: int
    local_hit_tokens_warm: int
    external_hit_tokens_warm: int
    ttft_cold_s: float
    ttft_warm_s: float
    ttft_off_s: float
    warm_over_cold: float
    answers_identical: bool


def row(samples: Sequence[Sample]) -> Row:
    cold = median(s.ttft_cold_s for s in samples)
    warm = median(s.ttft_warm_s for s in samples)
    return Row(
        prompt_tokens=samples[0].length,
        documents=len(samples),
        prefilled_tokens_cold=int(median(s.cold["computed"] for s in samples)),
        prefilled_tokens_warm=int(median(s.warm["computed"] for s in samples)),
        local_hit_tokens_warm=int(median(s.warm["local"] for s in samples)),
        external_hit_tokens_warm=int(median(s.warm["external"] for s in samples)),
        ttft_cold_s=round(cold, 4),
        ttft_warm_s=round(warm, 4),
        ttft_off_s=round(median(s.ttft_off_s for s in samples), 4),
        warm_over_cold=round(warm / cold, 4),
        answers_identical=all(s.identical for s in samples),
    )


def rows(samples: Sequence[Sample]) -> list[Row]:
    lengths = sorted({s.length for s in samples})
    return [row([s for s in samples if s.length == length]) for length in lengths]


def broken_claims(samples: Sequence[Sample]) -> list[str]:
    """Returns the claims of the demonstration that did not hold."""
    broken = []
    for sample in samples:
        where = f"{sample.length} tokens"
        if sample.cold["external"] or sample.cold["local"]:
            broken.append(f"{where}: the process with an empty store had hits ({sample.cold})")
        if not sample.warm["external"]:
            broken.append(f"{where}: the new process had no hits in the store")
        if sample.warm["local"]:
            broken.append(f"{where}: the new process had hits in vLLM's own prefix cache")
        if not sample.same_split:
            broken.append(
                f"{where}: with the store the new process computed a different number of tokens "
                "than vLLM did with its own prefix cache"
            )
        elif not sample.identical:
            broken.append(
                f"{where}: answers from the store differ from answers from vLLM's prefix cache"
            )
    return list(dict.fromkeys(broken))


def write_report(path: Path, found: Sequence[Row], hook_share: float, versions: str) -> None:
    """Writes times and tokens of the longest documents, figures of the whole demonstration, and in
    `rows` the figures of each length.
    """
    longest = found[-1]
    path.write_text(
        json.dumps(
            {
                "prompt_tokens": longest.prompt_tokens,
                "prefilled_tokens_warm": longest.prefilled_tokens_warm,
                "ttft_cold_s": longest.ttft_cold_s,
                "ttft_warm_s": longest.ttft_warm_s,
                "ttft_off_s": longest.ttft_off_s,
                "answers_identical": all(r.answers_identical for r in found),
                "hook_share_of_step": round(hook_share, 5),
                "rows": [asdict(r) for r in found],
                "versions": versions,
            },
            indent=2,
        )
        + "\n"
    )


def table(found: Sequence[Row]) -> Table:
    """Returns a table of at most 80 columns."""
    made = Table(title="First question of a long document: median time to first token")
    made.add_column("prompt\ntokens", justify="right")
    made.add_column("with-\nout", justify="right")
    made.add_column("cold,\nsaving", justify="right")
    made.add_column("new\nprocess", justify="right", style="bold green")
    made.add_column("warm\n/cold", justify="right")
    made.add_column("pre-\nfilled", justify="right")
    made.add_column("hits: own\n/ store", justify="right", no_wrap=True)
    made.add_column("same\nanswer", justify="center")
    for r in found:
        made.add_row(
            f"{r.prompt_tokens:,}",
            f"{r.ttft_off_s:.3f} s",
            f"{r.ttft_cold_s:.3f} s",
            f"{r.ttft_warm_s:.3f} s",
            f"{r.warm_over_cold:.3f}",
            f"{r.prefilled_tokens_warm:,}",
            f"{r.local_hit_tokens_warm} / {r.external_hit_tokens_warm:,}",
            "yes" if r.answers_identical else "NO",
        )
    return made
