"""Draw the pictures of the documents: `python docs/pictures/draw.py`, beside this file.

They are SVG, legible on light and dark pages. Bytes are counted on the CPU, ticks are those of the
schedule that pipelines execute.
"""

import json
from pathlib import Path

import torch

import redivider as rd
from redivider.pipeline.schedule import Schedule

HERE = Path(__file__).parent
STYLE = """.page{fill:#fff}
text{font:13px system-ui,sans-serif;fill:#24292f}.big{font-size:15px;font-weight:600}
.dim{fill:#57606a}.mid{text-anchor:middle}.end{text-anchor:end}.F{fill:#cfe3f7}.B{fill:#2f6fb2}
.on{fill:#fff}.line{fill:none;stroke:#57606a;stroke-width:1}.thick{stroke-width:2.5}.box{fill:#f6f8fa;
stroke:#57606a}.kept{fill:#e8a33d;stroke:#b87a1e}.empty{fill:none;stroke:#8c959f;
stroke-dasharray:3 3}.s0{stroke:#c0392b}.s1{stroke:#d98a00}.s2{stroke:#1a7f37}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9da7b1}.F{fill:#1f3b57}.B{fill:#4a90d9}
.box{fill:#21262d}.line{stroke:#9da7b1}.s0{stroke:#ff7b72}.s1{stroke:#e3b341}.s2{stroke:#56d364}.page{fill:#0d1117}}"""
DEPTHS = (4, 8, 16, 32, 48)
BACKWARDS = ("store", "checkpoint", "reverse")


def text(x: float, y: float, string: str, kind: str = "") -> str:
    """Return a text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{string}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a box."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="2" class="{kind}"/>'


def line(points: list[tuple[float, float]], kind: str = "line", *, arrow: bool = False) -> str:
    """Return a line through points."""
    end = ' marker-end="url(#to)"' if arrow else ""
    return f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="{kind}"{end}/>'


def write(name: str, width: int, height: int, title: str, shapes: list[str]) -> None:
    """Write a picture."""
    arrow = (
        '<defs><marker id="to" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L6,3L0,6z" fill="#57606a"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect width="{width}" height="{height}" class="page"/>'  # on any page it is legible
    style = f"<style>{STYLE}</style>"
    parts = [head, f"<title>{title}</title>", style, arrow, page, *shapes, "</svg>"]
    (HERE / name).write_text("\n".join(parts) + "\n")


def ticks(x: float, y: float, stages: int, microbatches: int, latency: float = 1) -> list[str]:
    """Draw the ticks of a pipeline: forwards above, backwards below."""
    schedule, cell, row = Schedule(stages, (latency,) * (stages - 1)), 34, 44
    num = int(microbatches + schedule.num_in_flight)
    shapes = [text(x + 66 + cell * t, y - 8, str(t), "dim mid") for t in range(num)]
    shapes.append(text(x, y - 8, "tick", "dim"))
    for j in range(stages):
        shapes.append(text(x, y + row * j + 24, f"stage {j}"))
    for t in range(num):
        for actions in schedule.groups(t, min(t + 1, microbatches)):
            for action in actions:
                if action.microbatch >= microbatches:
                    continue
                left, top = x + 50 + cell * t, y + row * action.stage
                is_forward = action.kind == "F"
                top += 0 if is_forward else 19
                shapes.append(rect(left, top, cell - 3, 18, action.kind))
                label = f"{action.kind}{action.microbatch}"
                shapes.append(
                    text(left + 15.5, top + 13.5, label, "mid" if is_forward else "mid on")
                )
    return shapes


def count() -> dict[str, list[float]]:
    """Return MiB held for one image by a Rev-ViT-S, by backward and depth."""
    held: dict[str, list[float]] = {backward: [] for backward in BACKWARDS}
    x = torch.randn(2, 3, 224, 224)
    for depth in DEPTHS:
        model = rd.create_model("rev_vit_small", depth=depth)
        for backward, memory in rd.compare_memory(model, x).by_backward.items():
            held[backward].append(memory.held / len(x) / 2**20)
    return held


def memory(x: float, y: float, held: dict[str, list[float]]) -> list[str]:
    """Draw memory against depth."""
    width, height, most = 270, 176, 225
    shapes = [line([(x, y), (x, y + height), (x + width, y + height)])]
    for value in (0, 100, 200):
        shapes.append(text(x - 6, y + height * (1 - value / most) + 4, str(value), "dim end"))
    for depth in (12, 24, 36, 48):
        shapes.append(text(x + width * depth / 48, y + height + 18, str(depth), "dim mid"))
    shapes.append(text(x + width / 2, y + height + 36, "layers", "dim mid"))
    for index, (name, values) in enumerate(held.items()):
        points = [
            (x + width * depth / 48, y + height * (1 - value / most))
            for depth, value in zip(DEPTHS, values, strict=True)
        ]
        shapes.append(line(points, f"line thick s{index}"))
        label = f"{name}, {values[-1]:.3g} MiB"
        shapes.append(text(points[-1][0] + 6, points[-1][1] + (4, 0, 4)[index], label))
    return shapes


def depth() -> None:
    """Draw memory against depth."""
    data = HERE / "memory.json"
    if not data.exists():
        data.write_text(json.dumps(count()) + "\n")
    shapes = [text(20, 24, "Activation memory against depth", "big")]
    shapes.append(text(20, 44, "MiB held for one image, Rev-ViT-S, float32", "dim"))
    shapes += memory(52, 62, json.loads(data.read_text()))
    write("memory.svg", 470, 290, "Activation memory against depth", shapes)


def stages() -> None:
    """Draw the ticks of four stages."""
    shapes = [text(20, 24, "Stages that never wait", "big")]
    note = "four stages; F: forward, B: backward of a micro-batch"
    shapes.append(text(20, 44, note, "dim"))
    shapes += ticks(20, 84, 4, 6)
    write("stages.svg", 490, 290, "Ticks of a pipeline of four stages", shapes)


def row() -> None:
    """Draw a row of couplings, forward and back."""
    shapes = []
    for left, label, kind in ((20, "(a, b)", "empty"), (590, "(c, a)", "kept")):
        for top in (40, 120):
            shapes.append(rect(left, top, 70, 30, kind))
            shapes.append(text(left + 35, top + 20, label, "mid"))
    for index, left in enumerate((130, 290, 450)):
        name = "coupling n-1" if index == 2 else f"coupling {index}"
        for top in (40, 120):
            shapes.append(rect(left, top, 100, 30, "box"))
            shapes.append(text(left + 50, top + 20, name, "mid"))
    stops = [(90, 130), (230, 290), (390, 450), (550, 590)]
    for start, end in stops:
        shapes.append(line([(start, 55), (end, 55)], arrow=True))
        shapes.append(line([(end, 135), (start, 135)], arrow=True))
    shapes.append(text(20, 22, "forward: nothing is kept inside the row", "dim"))
    shapes.append(
        text(20, 176, "backward: f runs once more, b = c - f(a), and gradients pass", "dim")
    )
    shapes.append(text(670, 60, "kept"))
    write("row.svg", 740, 190, "A row of couplings, forward and back", shapes)


def tick() -> None:
    """Draw the ticks of three stages at two latencies."""
    shapes = [text(20, 22, "latency 1: a message is read in the next tick", "big")]
    shapes += ticks(20, 56, 3, 5)
    shapes.append(text(20, 222, "latency 0.5: half a tick later", "big"))
    shapes += ticks(20, 256, 3, 5, 0.5)
    write("tick.svg", 440, 400, "Ticks of three stages", shapes)


def holds() -> None:
    """Draw what each backward holds of a row of eight couplings."""
    rows = (
        ("store", 30, "graphs of all units"),
        ("checkpoint", 12, "inputs of all units"),
        ("compress", 3, "inputs in 2 bits a value"),
        ("reverse", 0, "the last pair of streams"),
    )
    shapes = []
    for index, (name, height, note) in enumerate(rows):
        base = 46 + 48 * index
        shapes.append(text(20, base, name))
        for place in range(8):
            left = 130 + 34 * place
            kind = "kept" if height else "empty"
            shapes.append(rect(left, base - (height or 3), 26, height or 3, kind))
        if name in ("compress", "reverse"):
            shapes.append(rect(130 + 34 * 8, base - 12, 26, 12, "kept"))
        shapes.append(text(450, base, note, "dim"))
    write("holds.svg", 640, 215, "What each backward holds between forward and backward", shapes)


if __name__ == "__main__":
    depth()
    stages()
    row()
    tick()
    holds()
