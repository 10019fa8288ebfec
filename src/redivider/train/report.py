"""Report of training runs: one HTML page without scripts, other files or network.

Plots whose rows are missing in the logs are left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite, nan
from os.path import commonpath
from pathlib import Path
from statistics import fmean, median

from redivider.pipeline.schedule import Action
from redivider.train import plots
from redivider.train.plots import Series
from redivider.train.run_folder import write_whole
from redivider.train.runs import Row, Run, numbers, read_run

_NONE = "\N{EN DASH}"
_COLUMNS = "run,method,model,data,stages,end,best,seconds,samples / s,activations in MiB".split(",")
_CURVES = (
    ("Training loss", "train", "loss", "loss"),
    ("Accuracy", "evaluate", "accuracy", "accuracy, %"),
    ("Evaluation loss", "evaluate", "loss", "loss"),
)
_FACTS = {
    "date": "",
    "machine": "",
    "device": "on ",
    "version": "redivider ",
    "torch": "torch ",
    "python": "Python ",
}
_HELD = {"activations": "activations", "weights": "copies of weights"}
_QUALITIES = {
    "cosine": "cosine to end-to-end",
    "ratio": "ratio of norms",
    "rebuilt_error": "rebuilt output, relative error",
}
_NOTES = {
    "depth": """Activations held for the backward, in networks that are alike but for their depth;
without a pipeline between forward and backward, else by all stages between two ticks.""",
    "table": """End and best are evaluations: accuracy, or loss where there is none. Seconds are
training time, samples per second a median. Activations are held by all stages between two ticks, or
without a pipeline between forward and backward; copies of weights are not counted.""",
    "memory": """Held by all stages together, between two ticks of a full pipeline; without a
pipeline, between forward and backward.""",
    "stages": """Held by the stages of a pipeline, between two ticks.""",
    "quality": """Gradients of a pipeline, compared with those of plain backprop with the weights of
the same time: means, with the range of all samples. A cosine and a ratio of 1 are best.""",
    "ticks": """Forwards (F, pale) and backwards (B, strong) as measured, each with the number and
colour of its micro-batch. Stages in one process share its processor and take turns: their boxes lie
one after another. On devices of their own they run at the same time.""",
}
_TEMPLATE = Path(__file__).with_name("report.html")


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write one HTML page about the runs in these folders.

    Raises:
        TrainError: A ValueError, if `read_run` cannot read a run.
        ImportError: If there is something to plot and matplotlib is missing.
    """
    page = _Page([read_run(Path(folder)) for folder in runs]).html()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(out), page)


class _Page:
    """Sections of the page; a run has the same label and colour in all of them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(enumerate(runs))
        self._labels = _make_labels(runs)
        self._num_plots = 0

    def html(self) -> str:
        memory = "".join((self._depths(), self._totals(), self._stages()))
        parts = [self._facts(), f'<div class="plots">{memory}</div>' if memory else ""]
        parts += [self._table(), *self._curves(), self._quality(), self._rates()]
        parts += [self._ticks(), self._recipes()]
        page = _TEMPLATE.read_text().replace("{title}", escape(self._title()))
        return page.replace("{body}", "\n".join(part for part in parts if part))

    def _title(self) -> str:
        folders = [str(run.folder) for _, run in self._runs]
        return f"Training report: {commonpath(folders)}" if folders else "Training report"

    def _facts(self) -> str:
        """Return a line with dates, machines and versions, as far as the logs have them."""
        starts = [run.start[-1] for _, run in self._runs if run.start]
        facts = []
        for key, name in _FACTS.items():
            values = dict.fromkeys(_text(row[key]) for row in starts if row.get(key) is not None)
            if key == "date":  # of the first run and of the last one
                values = dict.fromkeys(day[:10] for day in sorted(values))
            facts += [name + ", ".join(values)] if values else []
        return f"<p>{escape('; '.join(facts))}</p>" if facts else ""

    def _depths(self) -> str:
        held = {i: run.held_by_depth() for i, run in self._runs}
        depths = sorted({depth for sizes in held.values() for depth in sizes})
        series = [
            Series(i, [*depths], [sizes.get(depth, nan) / 2**20 for depth in depths])
            for i, sizes in held.items()
            if sizes
        ]
        if not series:
            return ""
        svg = plots.lines(series, "depth", "MiB", may_be_log=True, xticks=depths)
        return _section("Memory against depth", [self._figure("activations", svg, series)], "depth")

    def _table(self) -> str:
        if not self._runs:
            return "<p>There are no runs.</p>"
        head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
        rows = "\n".join(
            f'<tr><th scope="row">{_swatch(i)}{escape(self._labels[i])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(run))
            + "</tr>"
            for i, run in self._runs
        )
        table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
        return f'<div class="wide">{table}</div>\n<p>{_NOTES["table"]}</p>'

    def _curves(self) -> Iterator[str]:
        for title, kind, field, ylabel in _CURVES:
            by_step = self._series(kind, "step", field)
            by_time, unit = _in_units(self._series(kind, "seconds", field))
            figures = []
            for name, xlabel, series in (("by step", "step", by_step), ("by time", unit, by_time)):
                if series:
                    svg = plots.lines(series, xlabel, ylabel, may_be_log=field == "loss")
                    figures.append(self._figure(name, svg, series))
            yield _section(title, figures)

    def _series(self, kind: str, x: str, y: str) -> list[Series]:
        """Return the points of all runs that have any, with accuracies in percent."""
        series = []
        for i, run in self._runs:
            if kind == "evaluate" and run.metric != y:
                continue
            rows: list[Row] = getattr(run, kind)
            factor = 100.0 if y == "accuracy" else 1.0
            pairs = zip(numbers(rows, x), numbers(rows, y), strict=True)
            points = [(a, factor * b) if isfinite(a) else (nan, nan) for a, b in pairs]
            if any(isfinite(b) for _, b in points):
                series.append(Series(i, [a for a, _ in points], [b for _, b in points]))
        return series

    def _totals(self) -> str:
        figures = []
        for field, title in _HELD.items():
            held = {i: sum(run.held(field)) / 2**20 for i, run in self._runs}
            series = [Series(i, [0], [size]) for i, size in held.items() if size > 0]
            if series:
                notes = {i: f": {_format(size)} MiB" for i, size in held.items()}
                figures.append(self._figure(title, plots.totals(series, "MiB"), series, notes))
        return _section("Total memory", figures, "memory")

    def _stages(self) -> str:
        figures = []
        for field, title in _HELD.items():
            held = {i: [size / 2**20 for size in run.held(field)] for i, run in self._runs}
            series = [
                Series(i, [*range(len(y))], y)
                for i, y in held.items()
                if len(y) > 1 and any(size > 0 for size in y)
            ]
            if series:
                figures.append(self._figure(title, plots.bars(series, "MiB"), series))
        return _section("Memory by stage", figures, "stages")

    def _quality(self) -> str:
        figures = []
        for field, title in _QUALITIES.items():
            by_run = (_by_stage(i, run, field) for i, run in self._runs)
            series = [line for line in by_run if line.x]
            if series:
                svg = plots.ranges(series, title, is_error=field == "rebuilt_error")
                figures.append(self._figure(title, svg, series))
        return _section("Gradient quality by stage", figures, "quality")

    def _rates(self) -> str:
        series = self._series("train", "step", "lr")
        svg = plots.lines(series, "step", "learning rate") if series else ""
        return _section("Learning rate", [self._figure("by step", svg, series)] if series else [])

    def _ticks(self) -> str:
        figures = []
        for i, run in self._runs:
            rows = [fields for row in run.timeline[-1:] for fields in row.get("spans") or []]
            spans = {
                Action(*key): (start, end)
                for *key, start, end in rows
                if None not in (*key, start, end)
            }
            if spans:
                figures.append(self._figure("", plots.ticks(spans), [Series(i, [], [])]))
        return _section("Ticks", figures, "ticks")

    def _recipes(self) -> str:
        parts = []
        for i, run in self._runs:
            row = (run.start or [{}])[-1]
            start = {key: value for key, value in row.items() if key != "kind"}
            facts = _definitions(run.recipe) + (_definitions(start) if start else "")
            summary = f"<summary>{_swatch(i)}{escape(self._labels[i])}</summary>"
            parts.append(f"<details>{summary}{facts}</details>")
        return "<h2>Recipes</h2>\n" + "\n".join(parts) if parts else ""

    def _figure(
        self, title: str, svg: str, series: Sequence[Series], notes: dict[int, str] | None = None
    ) -> str:
        self._num_plots += 1
        named = [(line.run, self._labels[line.run]) for line in series]
        legend = "".join(
            f"<li>{_swatch(i)}{escape(label + (notes or {}).get(i, ''))}</li>" for i, label in named
        )
        svg = plots.inline(svg, self._num_plots, title or "ticks")
        caption = f"<figcaption>{title}<ul>{legend}</ul></figcaption>"
        return f'<figure>{caption}<div class="wide">{svg}</div></figure>'


def _make_labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of runs; where several are the same, add the method, then the folder."""
    labels = [run.name for run in runs]
    for suffixes in ([run.recipe.get("method") for run in runs], [run.folder for run in runs]):
        count = Counter(labels)
        labels = [
            f"{label}, {suffix}" if count[label] > 1 else label
            for label, suffix in zip(labels, suffixes, strict=True)
        ]
    return labels


def _cells(run: Run) -> list[str]:
    """Return the table cells of a run, without its name."""
    recipe = run.recipe
    cut = run.start[-1].get("cut") if run.start else recipe.get("stages")
    evaluations = [*run.evaluate, *run.end[-1:]]
    # A run that was extended after its end has later evaluations than the end row.
    last = sorted(evaluations, key=lambda row: numbers([row], "seconds"))[-1:]
    scores = [*filter(isfinite, numbers(evaluations, run.metric))]
    best = max if run.metric == "accuracy" else min
    times = [*filter(isfinite, numbers([*run.train, *evaluations], "seconds"))]
    speeds = [*filter(isfinite, numbers(run.train, "samples_per_second"))]
    held = run.held("activations")
    return [
        *(_text(recipe.get(field)) for field in ("method", "model", "data")),
        str(len(cut)) if isinstance(cut, list) else _text(cut),
        _format_metric(run.metric, numbers(last, run.metric)[0]) if last else _NONE,
        _format_metric(run.metric, best(scores)) if scores else _NONE,
        _format(max(times)) if times else _NONE,
        _format(median(speeds)) if speeds else _NONE,
        _format(sum(held) / 2**20) if held else _NONE,
    ]


def _format_metric(metric: str, value: float) -> str:
    if not isfinite(value):
        return _NONE
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"loss {_format(value)}"


def _format(value: float) -> str:
    """Format a number with four digits."""
    if not isfinite(value):
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: object) -> str:
    if value is None:
        return _NONE
    return value if isinstance(value, str) else json.dumps(value)


def _in_units(series: list[Series]) -> tuple[list[Series], str]:
    """Convert seconds to the unit that suits the longest run, and return its name."""
    longest = max((x for line in series for x in line.x), default=0.0)
    unit, length = "seconds", 1
    if longest > 300:
        unit, length = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60)
    return [Series(line.run, [x / length for x in line.x], line.y) for line in series], unit


def _by_stage(i: int, run: Run, field: str) -> Series:
    """Return mean, minimum and maximum over the samples of a stage; NaN where it has none."""
    values: dict[int, list[float]] = {}
    stages = numbers(run.quality, "stage")
    for stage, value in zip(stages, numbers(run.quality, field), strict=True):
        if isfinite(stage) and isfinite(value):
            values.setdefault(int(stage), []).append(value)
    places = [*range(1 + max(values, default=-1))]
    rows = [values.get(stage) or [nan] for stage in places]
    return Series(i, [*places], [*map(fmean, rows)], [*map(min, rows)], [*map(max, rows)])


def _section(title: str, figures: Sequence[str], note: str = "") -> str:
    if not figures:
        return ""
    intro = f"<p>{_NOTES[note]}</p>\n" if note else ""
    body = "\n".join(figures)
    return f'<section><h2>{title}</h2>\n{intro}<div class="plots {note}">{body}</div></section>'


def _swatch(run: int) -> str:
    colour, dash = plots.line_style(run)
    return f'<i style="border-top-style:{dash};border-top-color:{colour}"></i>'


def _definitions(fields: Row) -> str:
    """Return fields and their values as an HTML list of definitions."""
    rows = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd></div>"
        for name, value in fields.items()
    )
    return f"<dl>{rows}</dl>"
