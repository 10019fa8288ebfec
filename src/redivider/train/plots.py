"""Plots as inline SVG: lines, bars, ranges over stages, and ticks.

No text of a user enters a plot, so that names need neither fonts nor escapes here: the page has the
legend. Plots have no background and use the text colour of the page, so that they follow its light
or dark mode.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import StringIO
from itertools import pairwise
from math import ceil, floor, isfinite, log10, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from redivider.errors import require
from redivider.pipeline.diagnostics.timeline import Spans, paint_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each has a contrast of at least 3 to the white and to the dark background of the page.
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
SIZE = 4.2, 2.8
"""Size of most plots in inches: small, so that the text is large enough on a telephone."""
LINE_WIDTH = 1.5
MAX_POINTS = 400
"""Points per line; more are averaged, so that the page stays small."""
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
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": _INK for part in ("edgecolor", "labelcolor")},
}


@dataclass(frozen=True)
class Series:
    """Points of one run, with optional ranges; the index of the run sets the colour."""

    run: int
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def line_style(run: int) -> tuple[str, str]:
    """Return the colour and dash of a run."""
    return COLOURS[run % len(COLOURS)], DASHES[run // len(COLOURS) % len(DASHES)]


def lines(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    *,
    may_be_log: bool = False,
    xticks: Sequence[float] | None = None,
) -> str:
    """Draw a line per run, with gaps where points are missing.

    Args:
        series: Points of the runs.
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        may_be_log: Make the y axis logarithmic if positive values differ by more than 30 times.
        xticks: Numbers on the x axis; chosen by their range by default.
    """
    values = [y for line in series for y in line.y if isfinite(y)]
    is_log = may_be_log and 0 < 30 * min(values) < max(values)

    def paint(axis: "Axes") -> None:
        thinned = [replace(line, x=x, y=y) for line in series for x, y in [thin(line.x, line.y)]]
        for line, width in zip(thinned, line_widths(thinned, is_log=is_log), strict=True):
            _plot(axis, line, width)
        if is_log:
            axis.set_yscale("log")
        _set_labels(axis, xlabel, ylabel)
        if xticks is not None:
            axis.set_xticks(xticks)

    return _draw(SIZE, paint)


def line_widths(series: Sequence[Series], *, is_log: bool = False) -> list[float]:
    """Return line widths: a line is wider than those that later cover it, so that both show."""
    values = [_scaled(y, is_log) for line in series for y in line.y if isfinite(y)]
    near = 0.01 * (max(values) - min(values)) if values else 0.0

    def covers(upper: Series, lower: Series) -> bool:
        points = dict(zip(upper.x, upper.y, strict=True))
        pairs = [(y, points.get(x, nan)) for x, y in zip(lower.x, lower.y, strict=True)]
        gaps = [
            abs(_scaled(y, is_log) - _scaled(z, is_log))
            for y, z in pairs
            if isfinite(y) and isfinite(z)
        ]
        return 3 * sum(gap <= near for gap in gaps) >= len(gaps) > 0

    return [
        LINE_WIDTH + 2 * sum(covers(upper, lower) for upper in series[number + 1 :])
        for number, lower in enumerate(series)
    ]


def _scaled(value: float, is_log: bool) -> float:
    return log10(value) if is_log else value


def _plot(axis: "Axes", line: Series, width: float) -> None:
    """Draw a line, with dots where it has few points, and where a point has no neighbour."""
    colour, dash = line_style(line.run)
    has_all, size = len(line.x) <= 30, width + 1.5
    marker = "o" if has_all else ""
    axis.plot(line.x, line.y, color=colour, linestyle=dash, lw=width, marker=marker, ms=size)
    is_there = [False, *map(isfinite, line.y), False]
    alone = [i for i in range(len(line.y)) if is_there[i : i + 3] == [False, True, False]]
    if not has_all and alone:
        x, y = [line.x[i] for i in alone], [line.y[i] for i in alone]
        axis.plot(x, y, color=colour, linestyle="", marker="o", ms=size)


def totals(series: Sequence[Series], ylabel: str) -> str:
    """Draw a bar per run, with its value above."""

    def paint(axis: "Axes") -> None:
        for position, bar in enumerate(series):
            drawn = axis.bar(position, bar.y[0], 0.7, color=line_style(bar.run)[0])
            if len(series) <= 8:
                axis.bar_label(drawn, [f"{bar.y[0]:.3g}"], padding=1)
        axis.set_xlim(-0.6, max(len(series), 3) - 0.4)
        axis.margins(y=0.12)  # room for the values
        _set_labels(axis, "", ylabel)
        axis.set_xticks([])

    return _draw(SIZE, paint)


def bars(series: Sequence[Series], ylabel: str) -> str:
    """Draw a group of bars per stage, or outlines where there would be too many bars."""
    stages = max(len(bar.x) for bar in series)

    def paint(axis: "Axes") -> None:
        width = 0.8 / len(series)
        for position, bar in enumerate(series):
            colour, dash = line_style(bar.run)
            if stages * len(series) > 60:
                edges = [x - 0.5 for x in [*bar.x, bar.x[-1] + 1]]
                axis.stairs(bar.y, edges, color=colour, linestyle=dash, linewidth=LINE_WIDTH)
            else:
                middle = [x - 0.4 + (position + 0.5) * width for x in bar.x]
                axis.bar(middle, bar.y, width * 0.92, color=colour)
        axis.set_ylim(bottom=0)
        _set_labels(axis, "stage", ylabel)
        _number_stages(axis, stages)

    return _draw(SIZE, paint)


def ranges(series: Sequence[Series], ylabel: str, *, is_error: bool = False) -> str:
    """Draw means by stage, with the range from minimum to maximum shaded.

    Errors get a logarithmic axis.
    """

    def paint(axis: "Axes") -> None:
        for line, width in zip(series, line_widths(series), strict=True):
            colour = line_style(line.run)[0]
            axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
            if len(line.x) == 1:  # a single stage has no width to shade
                axis.vlines(line.x, line.low, line.high, color=colour, alpha=0.6)
            _plot(axis, line, width)
        positive = [y for line in series for y in (*line.low, *line.y) if y > 0]
        if is_error and positive:
            # Linear below the smallest error: a stage that is exact has an error of zero.
            axis.set_yscale("symlog", linthresh=10.0 ** floor(log10(min(positive))))
            axis.set_ylim(bottom=0)
        _set_labels(axis, "stage", ylabel)
        _number_stages(axis, 1 + int(max(x for line in series for x in line.x)))

    return _draw(SIZE, paint)


def ticks(spans: Spans) -> str:
    """Draw stages down and time across: forwards pale, backwards strong."""
    first, last = min(start for start, _ in spans.values()), max(end for _, end in spans.values())
    scale, unit = (1e3, "ms") if last - first < 1 else (1.0, "s")
    scaled = {action: (scale * start, scale * end) for action, (start, end) in spans.items()}
    stages = 1 + max(action.stage for action in spans)

    def paint(axis: "Axes") -> None:
        paint_spans(axis, scaled)
        axis.grid(axis="y", visible=False)
        _set_labels(axis, unit, "stage")

    return _draw((12.0, min(0.7 + 0.42 * stages, 14.0)), paint)


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average neighbours until `MAX_POINTS` are left; a mean skips NaN if it has other points."""
    num = min(len(x), MAX_POINTS)
    edges = [i * len(x) // num for i in range(num + 1)]

    def means(values: Sequence[float]) -> list[float]:
        finite = [[*filter(isfinite, values[i:j])] for i, j in pairwise(edges)]
        return [fmean(part) if part else nan for part in finite]

    return means(x), means(y)


def inline(svg: str, number: int, label: str) -> str:
    """Prepare an SVG for a page: make its ids unique, and add a label for screen readers."""
    svg = re.sub(r'\bid="', f'id="plot{number}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#plot{number}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _draw(size: tuple[float, float], paint: Callable[["Axes"], None]) -> str:
    matplotlib = require("matplotlib", "a report")
    figures = require("matplotlib.figure", "a report")
    text = StringIO()
    with matplotlib.rc_context(_SETTINGS):
        # Not a figure of pyplot, which would have to be closed.
        figure = figures.Figure(size, layout="constrained")
        paint(figure.subplots())
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _tidy(text.getvalue())


def _tidy(svg: str) -> str:
    """Remove the document type, name spaces, metadata and style rules, for use in a page."""
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    for tag in ("metadata", "style"):
        body = re.sub(rf"<{tag}\b.*?</{tag}>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*|<defs>\s*</defs>\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href").replace(_INK, "currentColor")
    return f"<svg {box[0]}>{body}"


def _set_labels(axis: "Axes", xlabel: str, ylabel: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.xaxis.set_major_formatter(_abbreviate)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _abbreviate(value: float, _: float | None = None) -> str:
    """Format a number with a suffix: 10000 as 10k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _number_stages(axis: "Axes", stages: int) -> None:
    axis.set_xlim(-0.6, stages - 0.4)
    axis.set_xticks(range(0, stages, ceil(stages / 12)))
    axis.grid(axis="x", visible=False)
