"""A chart of the time to first token (TTFT) by the tokens of a prompt's history, one line for each
run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ritornello.bench.summary import Row

INK, MUTED, GRID = "#1d2433", "#6b7489", "#e6e9f0"
COLOURS = ("#c3cad8", "#8fa3c9", "#e2572b", "#2f7f6f", "#8a5fb0", "#c9a227", "#3b6fb6", "#b04a6f")


def subplots(width: float, height: float, dpi: float | None = None) -> tuple[Figure, Axes]:
    """Returns an empty figure of this size in inches, and its axes."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.fonttype": "path"})
    return plt.subplots(figsize=(width, height), dpi=dpi)


def plot_by_history(runs: Mapping[str, Sequence[Row]], target: Path) -> None:
    """Writes a chart of the mean TTFT of each `Row`, with its 95 % interval, to `target`. `runs`:
    the rows of each run, by the name that the legend shows.
    """
    figure, axes = subplots(9, 5.2)
    for colour, (name, found) in zip(COLOURS * len(runs), runs.items(), strict=False):
        ranked = sorted(found, key=lambda r: r.history_tokens)
        means = [r.ttft_mean_s for r in ranked]
        below = [r.ttft_mean_s - r.ttft_low_s for r in ranked]
        above = [r.ttft_high_s - r.ttft_mean_s for r in ranked]
        positions = [r.history_tokens for r in ranked]
        axes.errorbar(
            positions, means, [below, above], label=name, color=colour, marker="o", capsize=3
        )
    axes.set_xlabel("tokens of history", color=MUTED)
    axes.set_ylabel("time to first token, s", color=MUTED)
    save(figure, axes, target)


def save(figure: Figure, axes: Axes, target: Path) -> None:
    """Draws the vertical axis from zero, with a grid and a legend, and writes the figure."""
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    figure.savefig(target, facecolor="white", bbox_inches="tight")
    plt.close(figure)
