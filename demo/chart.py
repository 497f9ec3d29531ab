"""The chart of the demonstration: times to first token, by length of the prompt."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from demo.report import Row
from ritornello.bench.chart import COLOURS, GRID, INK, MUTED, subplots

OFF, COLD, WARM, *_ = COLOURS
BAR, GAP = 0.24, 0.035
LEGEND = (
    (OFF, "vLLM without Ritornello"),
    (COLD, "with Ritornello, first time (saving)"),
    (WARM, "with Ritornello, new process, same store"),
)
FOOTNOTE = (
    "Time to first token, median; vLLM on the CPU, 36.5 M-parameter Llama, 2 threads. "
    "vLLM's own prefix cache starts empty in every process."
)
TIMES = "\N{MULTIPLICATION SIGN}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def bar(axes: Axes, left: float, height: float, top: float, colour: str, strong: bool) -> None:
    """Draws a bar, with rounded corners if it is higher than `top` / 20, and its value above it.
    `strong`: the value is bold, larger, and in the colour of the warm process's bars.
    """
    if height > top / 20:
        axes.add_patch(
            FancyBboxPatch(
                (left, 0),
                BAR,
                height,
                boxstyle="round,pad=0,rounding_size=0.02",
                mutation_aspect=top / 2.2,
                facecolor=colour,
                edgecolor="none",
            )
        )
    else:
        axes.bar(left, height, width=BAR, align="edge", color=colour)
    axes.text(
        left + BAR / 2,
        height + top * 0.015,
        seconds(height),
        ha="center",
        va="bottom",
        fontsize=13 if strong else 11.5,
        fontweight="bold" if strong else "normal",
        color=WARM if strong else MUTED,
    )


def legend(figure: Figure) -> None:
    left = 0.06
    for colour, told in LEGEND:
        square = Rectangle((left, 0.798), 0.0125, 0.022, transform=figure.transFigure, color=colour)
        figure.patches.append(square)
        figure.text(left + 0.019, 0.8, told, fontsize=12.5, color=INK)
        left += 0.045 + 0.0074 * len(told)


def draw(found: Sequence[Row], targets: Sequence[Path]) -> None:
    figure, axes = subplots(12.8, 7.2, dpi=150)
    figure.subplots_adjust(left=0.06, right=0.97, top=0.765, bottom=0.13)
    longest = found[-1]
    top = max(max(r.ttft_off_s, r.ttft_cold_s) for r in found) * 1.14
    for place, r in enumerate(found):
        start = place - 1.5 * BAR - GAP
        values = ((r.ttft_off_s, OFF), (r.ttft_cold_s, COLD), (r.ttft_warm_s, WARM))
        for slot, (value, colour) in enumerate(values):
            left = start + slot * (BAR + GAP)
            bar(axes, left, value, top, colour, strong=colour == WARM)
        axes.text(
            start + 2.5 * BAR + 2 * GAP,
            r.ttft_warm_s + top * 0.075,
            f"{r.ttft_off_s / r.ttft_warm_s:.0f}{TIMES} sooner",
            ha="center",
            va="bottom",
            fontsize=11.5,
            color=INK,
        )
    axes.set_xlim(-0.55, len(found) - 0.45)
    axes.set_ylim(0, top)
    axes.set_xticks(range(len(found)), [f"{r.prompt_tokens:,} tokens" for r in found])
    axes.tick_params(axis="x", length=0, pad=10, labelsize=14, labelcolor=INK)
    axes.tick_params(axis="y", length=0, labelsize=11, labelcolor=MUTED)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)

    longest_told = (
        f"First token about a {longest.prompt_tokens:,}-token document from a new vLLM process: "
        f"{seconds(longest.ttft_warm_s)} instead of {seconds(longest.ttft_off_s)}, "
        f"{longest.prefilled_tokens_warm} tokens prefilled."
    )
    title = "The prompt comes back. The prefill does not."
    figure.text(0.06, 0.925, title, fontsize=25, fontweight="bold", color=INK)
    figure.text(0.06, 0.872, longest_told, fontsize=13, color=MUTED)
    legend(figure)
    figure.text(0.06, 0.025, FOOTNOTE, fontsize=10.5, color=MUTED)
    for target in targets:
        figure.savefig(target, facecolor="white")
    plt.close(figure)
