"""From a model to the SDE windows of its training run, with the reasons left in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cast_rl.backbones.base import Backbone
from cast_rl.judges import Judge
from cast_rl.prompts import Prompt
from cast_rl.transitions import Kind
from cast_rl.window.draw import draw_structure
from cast_rl.window.measure import measure_structure
from cast_rl.window.profile import Criterion
from cast_rl.window.samplers import WindowSampler


def measured_window(
    backbone: Backbone,
    judge: Judge,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    window_width: int,
    order: str,
    every: int,
    criterion: Mapping[str, Any],
    transition: Kind,
    a: float,
    **measuring: Any,
) -> WindowSampler:
    """Windows among the steps before the model's structure is formed.

    Writes the profile to ``folder/structure.json`` and its picture to ``folder/structure.png``, and prints its table.

    Args:
        backbone: with the weights before training.
        judge, prompts: which decide what structure is, see `measure_structure`.
        window_width, order, every, transition, a: as `StructureProfile.window` has them.
        criterion: arguments of `Criterion`.
        **measuring: the other arguments of `measure_structure`: ``steps``, ``height``, ``width``, ``cache``, ...

    Raises:
        ValueError: no window fits, or one holds a step at which the transition must not inject noise.
    """
    criterion = Criterion(**criterion)
    profile = measure_structure(backbone, judge, prompts, **measuring)
    folder = Path(folder)
    profile.save(folder / "structure.json")
    draw_structure(profile, folder / "structure.png", criterion)
    print(profile.table(criterion))
    window = profile.window(window_width, order=order, every=every, criterion=criterion, transition=transition, a=a)
    print(f"windows of {window_width} steps start at step {window.starts[0]} to {window.starts[-1]}")
    return window
