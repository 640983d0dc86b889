"""A benchmark's figures from atom scores: Soft-TIFA (GenEval 2, arXiv 2512.16853) as a whole and where it is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cast_rl.prompts import Prompt


def soft_tifa(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Arithmetic and geometric mean of each prompt's atom scores.

    Args:
        scores: ``(N, K)`` in [0, 1].
        mask: ``(N, K)`` bool, False where there is no score.

    Returns:
        AM ``(N,)`` and GM ``(N,)``, float64; NaN for a prompt without a score.
    """
    known = torch.where(mask, scores.double(), torch.nan)
    return known.nanmean(1), known.log().nanmean(1).exp()


def hardest(prompts: Sequence[Prompt], scores: Tensor, mask: Tensor, share: float) -> list[str]:
    """The texts of the ``share`` of the prompts whose GM is lowest, hardest first; those without a score do not count.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the hard case is a share of the prompts above 0 and at most 1, got {share}")
    _, gm = soft_tifa(scores, mask)
    order = [i for i in gm.argsort(stable=True).tolist() if gm[i].isfinite()]
    return [prompts[i].text for i in order[: max(1, round(share * len(order)))]]


def report(prompts: Sequence[Prompt], scores: Tensor, mask: Tensor, hard_case: Sequence[str]) -> dict[str, Any]:
    """The figures of a benchmark; all but the counts are in [0, 1].

    Args:
        prompts: N prompts.
        scores: ``(N, K)`` in [0, 1].
        mask: ``(N, K)`` bool, False where there is no score.
        hard_case: texts of the prompts that make it up.

    Returns:
        ``all`` and ``hard_case``: AM and GM, averaged over prompts, with standard errors; ``skills``: the mean score
        of the atoms of each; ``atomicity``: AM and GM of the prompts of each; ``unjudged_atoms``.

    Raises:
        ValueError: ``hard_case`` names a prompt that is not among ``prompts``.
    """
    unknown = sorted(set(hard_case) - {prompt.text for prompt in prompts})
    if unknown:
        raise ValueError(f"the hard case has {len(unknown)} prompts that the benchmark has not, such as {unknown[0]!r}")
    rows: dict[str, list[int]] = defaultdict(list)
    skills: dict[str, list[float]] = defaultdict(list)
    unjudged = 0
    hard = set(hard_case)
    for i, prompt in enumerate(prompts):
        rows[str(prompt.atomicity)].append(i)
        for atom, score, judged in zip(prompt.atoms, scores[i].tolist(), mask[i].tolist(), strict=False):
            if judged:
                skills[atom.skill].append(score)
            unjudged += not judged
    means = soft_tifa(scores, mask)
    return {
        "all": _means(*means, range(len(prompts))),
        "hard_case": _means(*means, [i for i, prompt in enumerate(prompts) if prompt.text in hard]),
        "skills": {skill: {"score": sum(s) / len(s), "atoms": len(s)} for skill, s in sorted(skills.items())},
        "atomicity": {size: _means(*means, rows[size]) for size in sorted(rows, key=int)},
        "unjudged_atoms": unjudged,
    }


def _means(am: Tensor, gm: Tensor, rows: Sequence[int]) -> dict[str, float]:
    """Means and standard errors over the given rows of ``am (N,)`` and ``gm (N,)`` that have a score."""
    chosen = {"am": am[list(rows)], "gm": gm[list(rows)]}
    figures: dict[str, float] = {"prompts": int(chosen["am"].isfinite().sum())}
    for name, values in chosen.items():
        values = values[values.isfinite()]
        figures[name] = values.mean().item() if len(values) else None
        figures[f"{name}_se"] = (values.std() / len(values) ** 0.5).item() if len(values) > 1 else None
    return figures


def table(figures: dict[str, Any]) -> str:
    """What `report` returns as lines of text."""
    lines = [f"{'':>16s}{'AM':>9s}{'GM':>9s}{'prompts':>10s}"]
    rows = {"all": figures["all"], "hard case": figures["hard_case"]}
    rows |= {f"atomicity {size}": row for size, row in figures["atomicity"].items()}
    for name, row in rows.items():
        am, gm = (f"{row[key]:9.4f}" if row[key] is not None else f"{'-':>9s}" for key in ("am", "gm"))
        lines.append(f"{name:>16s}{am}{gm}{row['prompts']:10d}")
    lines.append(f"{'':>16s}{'score':>9s}{'':>9s}{'atoms':>10s}")
    lines += [f"{name:>16s}{row['score']:9.4f}{'':>9s}{row['atoms']:10d}" for name, row in figures["skills"].items()]
    if figures["unjudged_atoms"]:
        lines.append(f"{figures['unjudged_atoms']} atoms could not be judged and count nowhere")
    return "\n".join(lines)
