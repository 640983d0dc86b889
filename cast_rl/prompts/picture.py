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
# Inches: a box, the gap between boxes, the line at their left, an underline's room, a letter at a font size of one.
_WIDTH, _HEIGHT, _GAP, _RAIL, _LANE, _LETTER = 2.1, 0.75, 0.4, 0.12, 0.08, 0.602 / 72


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
    columns, rows = (1 + max(place[axis] for place in places) for axis in (0, 1))
    width, top = columns * (_WIDTH + _GAP), rows * (_HEIGHT + _GAP)
    skills = [skill for skill in COLORS if any(atom.skill == skill and atom.spans for atom in prompt.atoms)]
    head = 0.6 + _LANE * len(skills)
    figure = Figure(figsize=(width, top + head), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, top + head))
    axes.axis("off")
    _draw_prompt(axes, prompt, skills, width, top + head - 0.4)
    centers = [((x + 0.5) * (_WIDTH + _GAP), top - (y + 0.5) * (_HEIGHT + _GAP)) for x, y in places]
    for k, atom in enumerate(prompt.atoms):
        _draw_atom(axes, atom, centers[k])
        if atom.skill != "scene":  # it depends on every object; lines to all of them would hide the rest
            for parent in atom.parents:
                _draw_line(axes, centers[parent], centers[k], COLORS[atom.skill])
    figure.savefig(path)


def _places(prompt: Prompt) -> list[tuple[float, int]]:
    """Column and row of every atom: what depends on several at the top, objects below, their other facts under them."""
    joint = [k for k, atom in enumerate(prompt.atoms) if len(atom.parents) > 1 or atom.skill == "scene"]
    places: list[tuple[float, int]] = [(0.0, 0)] * len(prompt.atoms)
    depth: dict[float, int] = {}
    for k, atom in enumerate(prompt.atoms):
        if k not in joint:
            column = places[atom.parents[0]][0] if atom.parents else float(len(depth))
            places[k] = (column, depth.get(column, 0))
            depth[column] = places[k][1] + 1
    above: list[tuple[float, int]] = []
    for k in joint:
        ends = [places[parent][0] for parent in prompt.atoms[k].parents]
        column, row = sum(ends) / max(len(ends), 1), -1
        while any(y == row and abs(x - column) < 1 for x, y in above):
            row -= 1
        places[k] = (column, row)
        above.append(places[k])
    top = min(y for _, y in places)
    return [(x, y - top) for x, y in places]


def _draw_prompt(axes, prompt: Prompt, skills: list[str], width: float, y: float) -> None:
    """The text in a font of one width, underlined in the colour of every skill that has words in it."""
    size = min(12.0, 0.95 * width / (_LETTER * max(len(prompt.text), 1)))
    letter = _LETTER * size
    left = (width - letter * len(prompt.text)) / 2
    axes.text(left, y, prompt.text, family="DejaVu Sans Mono", fontsize=size, va="bottom")
    for atom in prompt.atoms:
        for start, end in atom.spans:
            lane = y - _LANE * (0.5 + skills.index(atom.skill))
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
    axes.text(x, y - 0.09, fill(f"{atom.question} {atom.answer}", 32), fontsize=7.5, ha="center", va="center")


def _draw_line(axes, parent: tuple[float, float], child: tuple[float, float], color: str) -> None:
    """An arrow behind the boxes: up to what depends on several, down along the left side to a thing's own facts."""
    end = (child[0], child[1] - _HEIGHT / 2)
    if child[1] < parent[1]:
        x, end = parent[0] - _WIDTH / 2, (child[0] - _WIDTH / 2, child[1])
        axes.plot((x, x - _RAIL, x - _RAIL), (parent[1], parent[1], child[1]), color=color, linewidth=1.0, zorder=0)
        parent = (x - _RAIL, child[1])
    axes.annotate("", end, parent, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.0}, zorder=0)
