"""The picture of a structure profile."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cast_rl.window import agreement
from cast_rl.window.profile import STRUCTURE, Criterion, StructureProfile

COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#6e7781", "#953800", "#1b7c83")
MOST_PICTURES = 12


def draw_structure(profile: StructureProfile, path: str | Path, criterion: Criterion = STRUCTURE) -> None:
    """Write a PNG: agreement per skill against step and sigma, the candidate steps shaded, estimates of images above.

    Args:
        profile: with a strip, as it is measured; without one, as it is loaded, only the curves are drawn.
        path: of the PNG.
        criterion: when structure counts as formed.
    """
    strip = profile.strip if profile.strip is not None else ()
    rows = len(strip)
    width = max(7.0, 1.05 * min(profile.steps, MOST_PICTURES) + 2.8)
    figure = Figure(figsize=(width, 3.8 + 1.25 * rows), layout="constrained")
    grid = figure.add_gridspec(rows + 1, 1, height_ratios=[1.25] * rows + [3.6])
    curves = figure.add_subplot(grid[rows])
    _draw_curves(curves, profile, criterion)
    for row, pictures in enumerate(strip):
        axes = figure.add_subplot(grid[row], sharex=curves)
        _draw_strip(axes, pictures, profile.texts[row])
    # Images ask for a range of their own.
    curves.set_xlim(-0.5, profile.steps - 0.5)
    figure.savefig(path, dpi=120)


def _draw_curves(axes: Axes, profile: StructureProfile, criterion: Criterion) -> None:
    steps, corrected = range(profile.steps), {"corrected": criterion.corrected}
    candidates = profile.candidates(criterion)
    low, high = profile.formed_interval(criterion)
    axes.axvspan(-0.5, len(candidates) - 0.5, color="#ddf4ff", label="candidate steps")
    for skill, colour in zip(profile.skill_names, COLOURS * len(profile.skill_names), strict=False):
        curve = profile.agreement(skill, **corrected)
        settles = agreement.settled_from(curve, criterion.threshold).item()
        label = f"{skill}, from {settles:.0f}"
        axes.plot(steps, curve, color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    band = profile.agreement_interval(*criterion.skills, **corrected)
    axes.fill_between(steps, *band, color="black", alpha=0.12, linewidth=0)
    structure = profile.agreement(*criterion.skills, **corrected)
    label = f"structure, from {len(candidates)} ({low} to {high})"
    axes.plot(steps, structure, color="black", linewidth=2, label=label)
    alike = profile.similarity.mean(0)
    axes.plot(steps, alike, color="#6e7781", linestyle=":", label="similarity of low-passed images")
    axes.axhline(criterion.threshold, color="black", linewidth=0.8, linestyle="--")
    every = -(-profile.steps // MOST_PICTURES)
    axes.set_xticks(list(steps)[::every], [f"{t}\n{profile.sigmas[t]:.2f}" for t in steps][::every])
    kind = "agreement beyond chance (kappa)" if criterion.corrected else "share of equal decisions"
    axes.set(xlabel="step, sigma before it", ylabel=kind, ylim=(min(-0.08, float(structure.min()) - 0.05), 1.03))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_strip(axes: Axes, pictures: Tensor, text: str) -> None:
    """The estimates ``(T, 3, h, w)`` of one image, each above its step."""
    every = -(-len(pictures) // MOST_PICTURES)
    half = 0.48 * every
    for step in range(0, len(pictures), every):
        image = pictures[step].permute(1, 2, 0).numpy()
        axes.imshow(image, extent=(step - half, step + half, 0, 1), aspect="auto", interpolation="nearest")
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.set_title(textwrap.shorten(text, 110, placeholder=" ..."), fontsize=7.5, loc="left", pad=2)
