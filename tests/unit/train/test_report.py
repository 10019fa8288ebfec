"""Reports are sound pages of what the files hold; damaged files are not taken for new runs."""

import json
import math
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest

from redivider.pipeline.schedule import Action, Schedule
from redivider.train import plots
from redivider.train.report import write_report
from redivider.train.runs import read_run

pytestmark = pytest.mark.slow

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Parser that collects tags and text, and checks that tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str | None] = []
        self.values: list[tuple[str, Any]] = []
        self.cells: list[list[str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id"]
        self.values += [(name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data
        if "style" not in self.open:
            self.text.append(data)


def rows_of(scale, stages, *, has_accuracy=True):
    """Yield a log with rows of every kind; its numbers depend on `scale`."""
    yield dict(
        kind="start",
        date="2026-01-02 03:04+00:00",
        machine="Linux aarch64, 2 cores",
        version="0.1",
        torch="2.13.0",
        device="cpu",
        num_parameters=123,
    )
    for step in range(1, 6):
        yield dict(
            kind="train",
            step=100 * step,
            loss=scale / step,
            lr=0.1 / step,
            accuracy=None,
            samples_per_second=scale * 100.0 + step,
            seconds=scale * step,
        )
        accuracy = (0.5 + step / 100 + scale / 1000) if has_accuracy else None
        yield dict(
            kind="evaluate",
            step=100 * step,
            loss=scale * (6 - step),
            accuracy=accuracy,
            seconds=scale * step,
        )
    held = [dict(stage=j, activations=scale * (j + 1) * 2**20, weights=0) for j in range(stages)]
    yield dict(kind="memory", stages=held)
    for depth in (4, 8, 16):
        yield dict(kind="depth", depth=depth, activations=scale * depth * 2**20)
    for step in (200, 400):
        for j in range(stages):
            quality = dict(cosine=1 - step / 1e4 - j / 1e3, ratio=1.1, rebuilt_error=j * 1e-6)
            yield dict(kind="quality", step=step, stage=j, **quality)
    yield dict(kind="timeline", spans=spans_of(stages, ticks=range(20, 24)))
    yield dict(
        kind="end",
        seconds=scale * 5 + 0.5,
        loss=scale * 1.5,
        accuracy=0.5 + scale / 1000 if has_accuracy else None,
    )


def spans_of(stages, ticks):
    """Return spans of actions one after another, as in a pipeline in one process."""
    actions = [action for t in ticks for action in Schedule(stages).actions(t)]
    return [[*action, 0.001 * i, 0.001 * (i + 0.9)] for i, action in enumerate(actions)]


def write_run(folder, rows, **recipe):
    folder.mkdir()
    defaults = dict(name=folder.name, model="revnet18", data="digits", method="petra", stages=3)
    (folder / "recipe.json").write_text(json.dumps(defaults | recipe))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def report(tmp_path, *runs):
    out = tmp_path / "made" / "report.html"
    write_report(runs, out)
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))
    refs = re.findall(r"url\(([^)]*)\)", text) + [v for n, v in page.values if "href" in n]
    assert all(ref.startswith("#") and ref[1:] in page.ids for ref in refs)
    assert page.tags["figure"] == page.tags["svg"]
    return page


@pytest.mark.parametrize("num_runs", [1, 3])
def test_all_plots_and_the_table(num_runs, tmp_path):
    folders = [
        write_run(tmp_path / f"run{i}", rows_of(i + 2, 3), lr=0.25 * (i + 1), odd={"a": [i]})
        for i in range(num_runs)
    ]
    page = report(tmp_path, *folders)
    # Memory by depth, in total and by stage; loss and accuracy by step and time; three qualities;
    # the rate; a timeline each.
    assert page.tags["svg"] == 11 + num_runs
    assert page.tags["details"] == num_runs and len(page.cells) == num_runs + 1
    for i, cells in enumerate(page.cells[1:]):
        scale = i + 2
        assert cells == [
            f"run{i}",
            *("petra", "revnet18", "digits", "\N{EN DASH}"),
            f"{50 + scale / 10:.2f} %",
            f"{55 + scale / 10:.2f} %",
            f"{scale * 5 + 0.5:g}",
            f"{scale * 100 + 3}",
            f"{scale * 6}",
        ]
        assert f"{0.25 * (i + 1)}" in page.text and json.dumps({"a": [i]}) in page.text


def test_loss_where_there_is_no_accuracy(tmp_path):
    text = write_run(tmp_path / "text", rows_of(3, 2, has_accuracy=False))
    page = report(tmp_path, text)
    assert "Evaluation loss" in page.text and "Accuracy" not in page.text
    assert page.cells[1][5:7] == ["loss 4.5", "loss 3"]
    page = report(tmp_path, text, write_run(tmp_path / "images", rows_of(4, 2)))
    assert "Evaluation loss" in page.text and "Accuracy" in page.text
    assert page.tags["svg"] == 13 + 2


def test_what_files_say_is_escaped(tmp_path):
    nasty = "<b>&\"x'</b><script>"
    start = dict(kind="start", device=nasty, cut=[1, 2, 1])
    rows = [start, *rows_of(2, 3)][:4]
    folder = write_run(tmp_path / "run", rows, name=nasty, method=nasty, **{nasty: nasty})
    out = tmp_path / "report.html"
    write_report([folder], out)
    page = Page(out.read_text(encoding="utf-8"))
    assert page.tags["b"] == 0 and page.tags["script"] == 0
    assert page.cells[1][:2] == [nasty, nasty] and page.text.count(nasty) >= 4


def test_names_that_are_the_same_are_told_apart(tmp_path):
    folders = [
        write_run(tmp_path / folder, [], name="same", method=method)
        for folder, method in (("a", "petra"), ("b", "store"), ("c", "store"))
    ]
    page = report(tmp_path, *folders)
    assert [cells[0] for cells in page.cells[1:]] == [
        "same, petra",
        f"same, store, {tmp_path / 'b'}",
        f"same, store, {tmp_path / 'c'}",
    ]


def test_colours_are_those_of_the_run_everywhere(tmp_path):
    """Also where an earlier run has nothing to show."""
    empty = write_run(tmp_path / "empty", [])
    page = report(tmp_path, empty, write_run(tmp_path / "full", rows_of(2, 3)))
    swatches = [value for name, value in page.values if name == "style" and "border-top" in value]
    first, second = (plots.line_style(i)[0] for i in range(2))
    assert [second in swatch for swatch in swatches].count(True) == 12 + 2
    assert [first in swatch for swatch in swatches].count(True) == 2
    lines = [
        value for name, value in page.values if name == "style" and "stroke: " in (value or "")
    ]
    assert any(second in line for line in lines) and not any(first in line for line in lines)
    assert len({plots.line_style(i) for i in range(24)}) == 24


@pytest.mark.parametrize("num_runs", [0, 1, 2])
def test_runs_just_begun(num_runs, tmp_path):
    folders = [write_run(tmp_path / f"run{i}", []) for i in range(num_runs)]
    page = report(tmp_path, *folders)
    assert page.tags["svg"] == 0 and page.tags["details"] == num_runs
    assert ("There are no runs." in page.text) == (num_runs == 0)
    for cells in page.cells[1:]:
        assert cells[4:] == ["3", *["\N{EN DASH}"] * 5]


def test_nulls_and_unknown_kinds(tmp_path):
    rows = list(rows_of(2, 3))
    for row in rows:
        for name in set(row) - {"kind", "step", "stage", "stages", "spans"}:
            row[name] = None
        for stage in row.get("stages", []):
            stage["activations"] = stage["weights"] = None
    rows += [
        {"kind": "weather", "loss": 1},
        {},
        {"kind": "timeline", "spans": [["F", 0, 1, 0, None]]},
    ]
    page = report(tmp_path, write_run(tmp_path / "run", rows))
    assert page.cells[1][4:] == ["\N{EN DASH}"] * 6
    assert page.tags["svg"] == 0
    some = [dict(kind="train", step=i, loss=None if i % 3 else 1.0 + i) for i in range(9)]
    some += [dict(kind="train", step=None, loss=1.0), dict(kind="train", loss=math.inf, step=10)]
    assert report(tmp_path, write_run(tmp_path / "some", some)).tags["svg"] == 1


@pytest.mark.parametrize("num_stages", [1, 2, 60])
def test_any_number_of_stages(num_stages, tmp_path):
    start = dict(kind="start", cut=[1] * num_stages)
    runs = [
        write_run(tmp_path / "a", [*rows_of(2, num_stages), start], stages="auto"),
        write_run(tmp_path / "b", rows_of(3, 1), method="store"),
    ]
    page = report(tmp_path, *runs)
    assert page.tags["svg"] == 11 + 2 - (num_stages == 1)
    assert page.cells[1][4] == str(num_stages)
    total = 2 * num_stages * (num_stages + 1) / 2
    assert page.cells[1][-1] == (f"{total:,.0f}" if total >= 1000 else f"{total:g}")


def test_copies_of_weights_have_a_plot_of_their_own(tmp_path):
    stages = [dict(stage=j, activations=2**20, weights=j * 2**21) for j in range(3)]
    page = report(tmp_path, write_run(tmp_path / "run", [dict(kind="memory", stages=stages)]))
    assert page.tags["svg"] == 4  # in total, and by stage
    assert "run: 3 MiB" in page.text and "run: 6 MiB" in page.text


def test_a_run_that_went_on_after_its_end(tmp_path):
    rows = list(rows_of(2, 3))
    rows.append(dict(kind="evaluate", step=900, seconds=99.0, loss=1.0, accuracy=0.875))
    page = report(tmp_path, write_run(tmp_path / "run", rows))
    assert page.cells[1][5:8] == ["87.50 %", "87.50 %", "99"]


@pytest.mark.parametrize("tail", ['{"kind": "tra', '{"kind": "train", "note": "\u00e9'])
def test_half_a_line_at_the_end(tail, tmp_path):
    folder = write_run(tmp_path / "run", rows_of(2, 3))
    whole = read_run(folder)
    with (folder / "log.jsonl").open("ab") as file:
        file.write(tail.encode()[:-1])
    assert read_run(folder) == whole
    assert len(whole.train) == 5 and whole.train[4]["loss"] == 0.4 and whole.recipe["stages"] == 3


@pytest.mark.parametrize("broken", ['{"kind": "tra', "[1]", "7", ""])
def test_a_broken_line_elsewhere(broken, tmp_path):
    folder = write_run(tmp_path / "run", rows_of(2, 3))
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], broken, *lines[2:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl: line 3 .*repair or delete") as caught:
        write_report([folder], tmp_path / "report.html")
    assert str(log) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["recipe.json", "log.jsonl"])
def test_a_missing_file(name, tmp_path):
    folder = write_run(tmp_path / "run", [])
    (folder / name).unlink()
    with pytest.raises(ValueError, match="give the folder of a run") as caught:
        read_run(folder)
    assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_broken_recipe(text, tmp_path):
    folder = write_run(tmp_path / "run", [])
    (folder / "recipe.json").write_text(text)
    with pytest.raises(ValueError, match=r"recipe\.json is no JSON object; restore it"):
        read_run(folder)


def test_ticks_have_a_box_and_a_number_each():
    spans = {Action(*key): (start, end) for *key, start, end in spans_of(2, ticks=range(7, 10))}
    labels = re.findall(r">([FB]\d+)<", plots.ticks(spans))
    assert sorted(labels) == sorted(f"{span.kind}{span.microbatch}" for span in spans)


def test_long_lines_are_averaged():
    x, y = plots.thin([*range(1000)], [math.nan if i % 2 else float(i) for i in range(1000)])
    assert len(x) == len(y) == plots.MAX_POINTS and x == sorted(x)
    assert y[0] == 0.0 and sum(map(math.isfinite, y)) > 300
    assert plots.thin([1, 2], [3.0, math.nan])[0] == [1, 2]


def test_the_page_begins_with_where_and_when_and_with_memory_against_depth(tmp_path):
    folders = [write_run(tmp_path / name, rows_of(2, 3), method=name) for name in ("a", "b")]
    page = report(tmp_path, *folders)
    text = " ".join(word for word in page.text if word.strip())
    assert text.count(f"Training report: {tmp_path}") == 2  # title and headline
    facts = "2026-01-02; Linux aarch64, 2 cores; on cpu; redivider 0.1; torch 2.13.0"
    titles = (facts, "Memory against depth", "Total memory", "Memory by stage", "Training loss")
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "Stages in one process share its processor and take turns" in " ".join(text.split())
    alone = report(tmp_path, folders[0])
    assert any(f"Training report: {folders[0]}" in text for text in alone.text)


def num_strokes(svg, run):
    """Return how many connected lines of a run are in a plot."""
    colour = plots.line_style(run)[0]
    paths = re.findall(rf'<path d="([^"]*)"[^>]*stroke: {colour}', svg)
    return sum(path.count("M") for path in paths if "L" in path)


def test_lines_have_gaps_where_points_are_missing(tmp_path):
    nan = math.nan
    whole = plots.Series(0, [1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5])
    broken = plots.Series(1, [1.0, 2, 3, 4, 5], [2.0, 2, nan, 4, 9])
    svg = plots.lines([whole, broken], "step", "loss")
    assert (num_strokes(svg, 0), num_strokes(svg, 1)) == (1, 2)
    rows = [
        dict(kind="quality", step=1, stage=stage, cosine=0.5, ratio=None, rebuilt_error=None)
        for stage in (0, 1, 3, 4)
    ]
    rows += [dict(kind="train", step=step, loss=1.0) for step in (1, 2, None, 4, 5)]
    write_report([write_run(tmp_path / "run", rows)], tmp_path / "page.html")
    loss, cosine = re.findall(r"<svg.*?</svg>", (tmp_path / "page.html").read_text(), re.DOTALL)
    assert num_strokes(loss, 0) == 2 and num_strokes(cosine, 0) == 2


def test_a_point_without_neighbours_is_a_dot():
    y = [math.nan if i in (49, 51) else 1.0 for i in range(100)]
    svg = plots.lines([plots.Series(0, [*map(float, range(100))], y)], "step", "loss")
    assert svg.count("<use") == 1 + plots.lines(
        [plots.Series(0, [*map(float, range(100))], [1.0] * 100)], "step", "loss"
    ).count("<use")


@pytest.mark.parametrize("is_log", [False, True])
def test_lines_that_coincide_are_wider_below(is_log):
    x = [*map(float, range(10))]
    series = [plots.Series(i, x, [1.0 + v for v in x]) for i in range(3)]
    series.append(plots.Series(3, x, [40.0 - v for v in x]))
    widths = plots.line_widths(series, is_log=is_log)
    assert widths[0] > widths[1] > widths[2] == widths[3]
    assert plots.line_widths([series[3], plots.Series(4, x, [math.nan] * 10)])[0] == widths[3]


def test_a_method_that_was_not_measured_at_a_depth_has_a_gap_there(tmp_path):
    sizes = {"a": (4, 8, 16, 32), "b": (4, 8, 32)}
    folders = [
        write_run(
            tmp_path / name,
            [dict(kind="depth", depth=depth, activations=depth * 2**20) for depth in depths],
        )
        for name, depths in sizes.items()
    ]
    write_report(folders, tmp_path / "page.html")
    (svg,) = re.findall(r"<svg.*?</svg>", (tmp_path / "page.html").read_text(), re.DOTALL)
    assert [num_strokes(svg, run) for run in (0, 1)] == [1, 2]


def test_the_same_files_give_the_same_page(tmp_path):
    folder = write_run(tmp_path / "run", rows_of(2, 3))
    for name in ("a", "b"):
        write_report([folder], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write_run(tmp_path / "run", rows_of(2, 3))
    assert read_run(folder).name == "run"
    with pytest.raises(ImportError, match=r'pip install "redivider\[train\]"'):
        write_report([folder], tmp_path / "report.html")
