"""A prompt's atoms as a picture: the words that state them, and which depends on which."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from textwrap import fill

from cast_rl.prompts.base import Prompt

COLORS = {
    "object": "#4477aa",
    "attribute": "#cc6677",
    "count": "#117733",
    "position": "#aa7700",
    "verb": "#882255",
    "scene": "#555555",
}
_POINT = 1 / 72  # inch
_WIDTH, _HEIGHT, _GAP = 2.1, 0.85, 0.35  # of a box and between boxes, inches


def save_picture(prompt: Prompt, path: str | PathLike) -> None:
    """Draw a prompt into a file; its name ends in .svg, .png or .pdf.

    Raises:
        ValueError: another ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if Path(path).suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{path}: a picture's name ends in .svg, .png or .pdf")
    places = _places(prompt)
    columns = 1 + max(x for x, _ in places)
    rows = 1 + max(y for _, y in places)
    size = min(11.0, 0.98 * columns * (_WIDTH + _GAP) / (0.602 * max(len(prompt.text), 1) * _POINT))  # of the prompt
    lanes = 0.16 * len(COLORS)
    width, top = columns * (_WIDTH + _GAP), rows * (_HEIGHT + _GAP)
    figure = Figure(figsize=(width, top + lanes + 0.6), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, top + lanes + 0.6))
    axes.axis("off")
    _draw_prompt(axes, prompt, width, top + lanes + 0.2, size)
    centers = [((x + 0.5) * (_WIDTH + _GAP), top - (y + 0.5) * (_HEIGHT + _GAP) + _GAP / 4) for x, y in places]
    for k, atom in enumerate(prompt.atoms):
        _draw_atom(axes, atom, centers[k])
        if atom.skill == "scene":  # depends on every object; lines to all of them would hide the rest
            continue
        for parent in atom.parents:
            _draw_arrow(axes, centers[parent], centers[k], COLORS[atom.skill])
    figure.savefig(path)


def _places(prompt: Prompt) -> list[tuple[float, int]]:
    """Column and row of every atom: those of one parent stacked below it, those of several in rows at the bottom."""
    places: list[tuple[float, int]] = [(0.0, 0)] * len(prompt.atoms)
    depth: dict[float, int] = {}
    joint = []
    for k, atom in enumerate(prompt.atoms):
        if len(atom.parents) > 1 or atom.skill == "scene":
            joint.append(k)
            continue
        column = places[atom.parents[0]][0] if atom.parents else float(len(depth))
        places[k] = (column, depth.get(column, 0))
        depth[column] = places[k][1] + 1
    taken: set[tuple[float, int]] = set()
    bottom = max(depth.values(), default=0)
    for k in joint:
        ends = [places[parent][0] for parent in prompt.atoms[k].parents]
        column = sum(ends) / len(ends) if ends else 0.0
        row = next(
            r for r in range(bottom, bottom + len(joint)) if not any(y == r and abs(x - column) < 1 for x, y in taken)
        )
        places[k] = (column, row)
        taken.add((column, row))
    return places


def _draw_prompt(axes, prompt: Prompt, width: float, y: float, size: float) -> None:
    """The text in a font of one width, underlined once for every skill that has words in it."""
    letter = 0.602 * size * _POINT
    left = (width - letter * len(prompt.text)) / 2
    axes.text(left, y, prompt.text, family="DejaVu Sans Mono", fontsize=size, va="bottom")
    for atom in prompt.atoms:
        lane = y - 0.02 - 0.09 * list(COLORS).index(atom.skill)
        for start, end in atom.spans:
            ends = (left + letter * start, left + letter * end)
            axes.plot(ends, (lane, lane), color=COLORS[atom.skill], linewidth=2, solid_capstyle="butt")


def _draw_atom(axes, atom, center: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = center
    corner = (x - _WIDTH / 2, y - _HEIGHT / 2)
    color = COLORS[atom.skill]
    axes.add_patch(
        FancyBboxPatch(corner, _WIDTH, _HEIGHT, "round,pad=0,rounding_size=0.08", ec=color, fc="white", lw=1.5)
    )
    axes.text(x, y + _HEIGHT / 2 - 0.06, atom.skill, color=color, fontsize=8, ha="center", va="top", weight="bold")
    axes.text(x, y - 0.09, fill(f"{atom.question} {atom.answer}", 30), fontsize=7.5, ha="center", va="center")


def _draw_arrow(axes, parent: tuple[float, float], child: tuple[float, float], color: str) -> None:
    if parent[0] == child[0] and parent[1] - child[1] < 1.5 * (_HEIGHT + _GAP):
        start, end, bend = (parent[0], parent[1] - _HEIGHT / 2), (child[0], child[1] + _HEIGHT / 2), 0.0
    else:  # past what stands between them, along the right-hand side
        start, end = (parent[0] + _WIDTH / 2, parent[1]), (child[0] + _WIDTH / 2, child[1])
        bend = -0.12
        if parent[0] != child[0]:
            end = (child[0] + (_WIDTH / 4 if parent[0] > child[0] else -_WIDTH / 4), child[1] + _HEIGHT / 2)
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.0, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=style)
