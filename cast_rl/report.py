"""What a training run leaves to look at, beside its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cast_rl.evaluation import Evaluation, compare, table
from cast_rl.pictures import before_after, learning_curve


def summary(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value per name over an iteration's optimizer steps: the largest if it is a ``max_...``, else the mean.

    NaN if one of them is.
    """
    columns = {name: torch.tensor([log[name] for log in logs], dtype=torch.float64) for name in logs[0]}
    return {n: (v.max() if n.startswith("max_") else v.mean()).item() for n, v in columns.items()}


def write_report(
    folder: Path, before: Evaluation, after: Evaluation, scores: Sequence[float], pictures: int = 12
) -> str:
    """Writes ``held_out.json``, ``before_after.png`` and ``reward.png``; returns the table of held-out figures.

    Args:
        folder: of the run.
        before, after: of the same prompts and noise, see `cast_rl.evaluation.evaluate`.
        scores: the rollouts' mean atom score, one per iteration.
        pictures: pairs of images shown; 0 leaves that picture out.

    Raises:
        ValueError: the evaluations are not of the same prompts.
    """
    comparison = compare(before, after)
    (folder / "held_out.json").write_text(json.dumps(comparison, indent=2))
    before_after(before, after, folder / "before_after.png", pictures)
    learning_curve(scores, folder / "reward.png")
    return table(comparison)
