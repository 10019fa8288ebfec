"""Plots as inline SVG: lines, bars, ranges over stages, and ticks.

Nothing that a user has written enters a picture, so names need neither fonts nor escapes here: the
page says in words what a colour means. Pictures have no background, and their ink is the page's, so
that they follow its light or dark mode.
"""

import re
from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from itertools import pairwise
from math import ceil, floor, inf, isfinite, log10, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from redivider.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each has a contrast of at least 3 to white and to the page's dark.
COLOURS = (
    "#2f80cf",
    "#d5682b",
    "#2a9a6e",
    "#b263c8",
    "#c9527b",
    "#8b8a2e",
    "#1f97a8",
    "#96795c",
)
DASHES = ("solid", "dashed", "dotted")
WIDEST = 400
"""Points in a line; more are averaged, for a page that opens at once."""
_INK = "#0a0b0c"
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "redivider",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": _INK,
    "lines.linewidth": 1.5,
    **{f"{each}.color": _INK for each in ("text", "xtick", "ytick")},
    **{f"axes.{each}": _INK for each in ("edgecolor", "labelcolor")},
}


@dataclass(frozen=True)
class Series:
    """What one run has to show; the number of the run is its colour."""

    run: int
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """A forward ("F") or backward ("B") of a micro-batch in a stage, in seconds."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


def look(run: int) -> tuple[str, str]:
    """Colour and dash of a run."""
    return COLOURS[run % len(COLOURS)], DASHES[run // len(COLOURS) % len(DASHES)]


def lines(series: Sequence[Series], xlabel: str, ylabel: str, *, is_loss: bool = False) -> str:
    """Draw a line for each run; a loss that falls far has a logarithmic axis."""

    def paint(axis: "Axes") -> None:
        for each in series:
            colour, dash = look(each.run)
            x, y = thin(each.x, each.y)
            marker = "o" if len(x) <= 30 else ""
            axis.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3)
        found = [y for each in series for y in each.y if isfinite(y)]
        if is_loss and 0 < 30 * min(found) < max(found):
            axis.set_yscale("log")
        _name(axis, xlabel, ylabel)

    return _draw((5.0, 3.0), paint)


def bars(series: Sequence[Series], ylabel: str) -> str:
    """Draw a group of bars for each stage, or outlines where there would be too many."""
    stages = max(len(each.x) for each in series)

    def paint(axis: "Axes") -> None:
        width = 0.8 / len(series)
        for place, each in enumerate(series):
            colour, dash = look(each.run)
            if stages * len(series) > 60:
                edges = [x - 0.5 for x in [*each.x, each.x[-1] + 1]]
                axis.stairs(each.y, edges, color=colour, linestyle=dash, linewidth=1.5)
            else:
                middle = [x - 0.4 + (place + 0.5) * width for x in each.x]
                axis.bar(middle, each.y, width * 0.92, color=colour)
        axis.set_ylim(bottom=0)
        _name(axis, "stage", ylabel)
        _number_stages(axis, stages)

    return _draw((5.0, 3.0), paint)


def ranges(series: Sequence[Series], ylabel: str, *, is_error: bool = False) -> str:
    """Draw means over stages and, shaded, from the least to the most; errors by orders."""

    def paint(axis: "Axes") -> None:
        for each in series:
            colour, dash = look(each.run)
            axis.fill_between(each.x, each.low, each.high, color=colour, alpha=0.15, linewidth=0)
            if len(each.x) == 1:  # which has no width to shade
                axis.vlines(each.x, each.low, each.high, color=colour, alpha=0.6)
            axis.plot(each.x, each.y, color=colour, linestyle=dash, marker="o", markersize=3)
        positive = [y for each in series for y in (*each.low, *each.y) if y > 0]
        if is_error and positive:
            # Linear below the least of them: an exact stage has an error of zero.
            axis.set_yscale("symlog", linthresh=10.0 ** floor(log10(min(positive))))
            axis.set_ylim(bottom=0)
        _name(axis, "stage", ylabel)
        _number_stages(axis, 1 + int(max(x for each in series for x in each.x)))

    return _draw((5.0, 3.0), paint)


def ticks(spans: Sequence[Span], most: int = 12) -> str:
    """Draw stages down and time across: forwards pale, backwards strong."""
    stages = 1 + max(each.stage for each in spans)
    # In one process stages take turns, so that many stages have room for fewer ticks.
    spans = first_ticks(spans, max(2, min(most, 120 // (2 * stages))))
    begin, end = min(each.start for each in spans), max(each.end for each in spans)
    scale, unit = (1e3, "ms") if end - begin < 1 else (1.0, "s")
    wide, high = 12.0, min(0.7 + 0.42 * stages, 14.0)

    def paint(axis: "Axes") -> None:
        for each in spans:
            x, width = scale * (each.start - begin), scale * (each.end - each.start)
            axis.barh(
                each.stage,
                width,
                0.84,
                left=x,
                color=_tint(each),
                edgecolor="white",
                linewidth=0.3,
            )
            points = 72 * (wide - 0.8) * (each.end - each.start) / ((end - begin) or 1)
            text = f"{each.kind}{each.microbatch}"
            upright = points < 5.5 * len(text)
            if points >= 7 and 72 * (high - 0.7) / stages > (4.5 * len(text) if upright else 9):
                place = (x + width / 2, each.stage)
                axis.annotate(
                    text,
                    place,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#111111",
                    rotation=90 if upright else 0,
                )
        axis.set_ylim(stages - 0.5, -0.5)
        axis.set_xlim(0, scale * (end - begin) or 1)
        axis.set_yticks(range(0, stages, ceil(stages / 24)))
        axis.grid(axis="y", visible=False)
        _name(axis, unit, "stage")

    return _draw((wide, high), paint)


def first_ticks(spans: Sequence[Span], most: int) -> list[Span]:
    """What begins before some stage goes forward, or backward, once more than `most` times."""
    starts: dict[tuple[str, int], list[float]] = {}
    for each in sorted(spans, key=lambda each: each.start):
        starts.setdefault((each.kind, each.stage), []).append(each.start)
    stop = min(lane[most] if len(lane) > most else inf for lane in starts.values())
    return [each for each in spans if each.start < stop]


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average neighbours until `WIDEST` points are left; NaN counts where there is nothing else."""
    num = min(len(x), WIDEST)
    edges = [i * len(x) // num for i in range(num + 1)]
    finite = [[each for each in y[i:j] if isfinite(each)] for i, j in pairwise(edges)]
    means = [fmean(each) if each else nan for each in finite]
    return [fmean(x[i:j]) for i, j in pairwise(edges)], means


def inline(svg: str, number: int, label: str) -> str:
    """Make an SVG part of a page: with ids of its own there, and words for those who cannot see."""
    svg = re.sub(r'\bid="', f'id="plot{number}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#plot{number}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _draw(size: tuple[float, float], paint: Callable[["Axes"], None]) -> str:
    matplotlib = require("matplotlib", "a report")
    figures = require("matplotlib.figure", "a report")
    text = StringIO()
    with matplotlib.rc_context(_SETTINGS):
        # Not pyplot's, so that nobody must close it.
        figure = figures.Figure(size, layout="constrained")
        paint(figure.subplots())
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _tidy(text.getvalue())


def _tidy(svg: str) -> str:
    """Leave what a page needs: no document type, name spaces, metadata, or rules for all of it."""
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    for what in ("metadata", "style"):
        body = re.sub(rf"<{what}\b.*?</{what}>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*|<defs>\s*</defs>\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href").replace(_INK, "currentColor")
    return f"<svg {box[0]}>{body}"


def _name(axis: "Axes", xlabel: str, ylabel: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.xaxis.set_major_formatter(_short)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _short(value: float, _: float | None = None) -> str:
    """10000 as 10k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _number_stages(axis: "Axes", stages: int) -> None:
    axis.set_xlim(-0.6, stages - 0.4)
    axis.set_xticks(range(0, stages, ceil(stages / 12)))
    axis.grid(axis="x", visible=False)


def _tint(span: Span) -> tuple[float, float, float]:
    # Steps of the golden ratio keep neighbours apart, however many there are.
    hue = span.microbatch * 0.618034 % 1
    return hls_to_rgb(hue, 0.86 if span.kind == "F" else 0.68, 0.65)
