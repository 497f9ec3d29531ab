"""Charts of the mean time to first token, one for each length of history. The horizontal axis is
the rate of the lowest tier, in multiples of the rate at which loading takes as long as computing.
The engine alone, the host tier and vLLM's own offloading without a tier below it do not depend on
this rate, and are drawn as horizontal lines.
"""

from collections.abc import Sequence
from pathlib import Path

from benches.shared.report import Row
from benches.shared.setups import (
    ALONE,
    HOST,
    HOST_DISK,
    HOST_S3,
    OFFLOADING,
    OFFLOADING_DISK,
)
from ritornello.bench.chart import INK, MUTED, save, subplots

LEVELS = {ALONE: "#8b93a5", HOST: "#8fa3c9", OFFLOADING: "#8fa3c9"}
LINES = {HOST_DISK: "#e2572b", HOST_S3: "#2f7f6f", OFFLOADING_DISK: "#e2572b"}
DASHES = {"auto": "-", "always": ":"}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws one SVG for each length of history; returns their paths."""
    paths = []
    for history in sorted({r.history_tokens for r in rows}):
        target = folder / f"ttft-{history}.svg"
        _one([r for r in rows if r.history_tokens == history], target, history)
        paths.append(target)
    return paths


def _one(rows: Sequence[Row], target: Path, history: int) -> None:
    figure, axes = subplots(8.4, 5)
    for r in rows:
        if r.setup in LEVELS:
            axes.axhline(r.ttft_mean_s, color=LEVELS[r.setup], label=r.setup, linewidth=2)
    for name, colour in LINES.items():
        for gate, dash in DASHES.items():
            line = sorted(
                (r.tier_rate_x, r.ttft_mean_s)
                for r in rows
                if r.setup == name and r.gate == gate and r.tier_rate_x is not None
            )
            if line:
                label = name if gate == "auto" else f"{name}, {gate} load"
                axes.plot(*zip(*line, strict=True), dash, color=colour, marker="o", label=label)
                axes.set_xscale("log")
                rates = [rate for rate, _ in line]
                axes.set_xticks(rates, [f"{rate:g}x" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("rate of the lowest tier, in multiples of break-even", color=MUTED)
    axes.set_ylabel("mean time to first token, s", color=MUTED)
    axes.set_title(f"{history:,} tokens of history", color=INK, loc="left")
    save(figure, axes, target)
