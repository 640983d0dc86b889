"""Held-out figures: one deterministic image per prompt, scored atom by atom."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from cast_rl.backbones.base import Backbone
from cast_rl.judges import Judge, ask
from cast_rl.prompt_bank import PromptBank
from cast_rl.prompts import Prompt
from cast_rl.sampling import ode_rollout


@dataclass
class Evaluation:
    """Images and scores of N prompts with at most K atoms each.

    Args:
        images: ``(N, 3, H, W)`` in [0, 1], on the CPU.
        scores: ``(N, K)`` in [0, 1]; mask: ``(N, K)`` bool, False where there is no score.
        prompts: the N prompts.
    """

    images: Tensor
    scores: Tensor
    mask: Tensor
    prompts: Sequence[Prompt]

    @property
    def atom_means(self) -> Tensor:
        """Mean atom score of each image, ``(N,)``; NaN for one without a score."""
        return torch.where(self.mask, self.scores, torch.nan).nanmean(1)

    @property
    def all_correct(self) -> Tensor:
        """Whether every atom of an image holds (score above one half), bool ``(N,)``; not without any score."""
        return ((self.scores > 0.5) | ~self.mask).all(1) & self.mask.any(1)

    @property
    def hard(self) -> list[int]:
        """The third of the prompts with the most atoms, which no score decides; of equal ones those that come last."""
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i].atoms))
        return order[len(order) - max(1, len(order) // 3) :]

    def figures(self) -> dict[str, float]:
        """``atom_score`` and ``all_correct`` with their standard errors over prompts, both for the hard third as
        ``hard_...`` (NaN if nothing of it was judged), and the mean score per skill.

        With a scene-level atom (the number of objects there are) among the atoms, ``all_correct`` is strict: an
        unrequested object counts against it.
        """
        means, correct, hard = self.atom_means, self.all_correct.float(), self.hard
        atom = means[means.isfinite()]
        skills: dict[str, list[float]] = defaultdict(list)
        for prompt, scores, mask in zip(self.prompts, self.scores.tolist(), self.mask.tolist(), strict=True):
            for atom_k, score, valid in zip(prompt.atoms, scores, mask, strict=False):
                if valid:
                    skills[atom_k.skill].append(score)
        return {
            "atom_score": atom.mean().item(),
            "atom_score_se": _standard_error(atom),
            "all_correct": correct.mean().item(),
            "all_correct_se": _standard_error(correct),
            "hard_atom_score": means[hard].nanmean().item(),
            "hard_all_correct": torch.where(self.mask.any(1), correct, torch.nan)[hard].nanmean().item(),
            **{f"skill_{name}": sum(s) / len(s) for name, s in sorted(skills.items())},
        }


def _standard_error(values: Tensor) -> float:
    """Of the mean of ``values (N,)``."""
    return (values.std() / len(values) ** 0.5).item()


def compare(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    """:meth:`Evaluation.figures` of both, and ``gain``: paired, over the atoms that were judged in both.

    The standard errors of ``gain`` are those of the differences. A skill that was not judged in both is left out of it.

    Raises:
        ValueError: the two are not of the same prompts.
    """
    if list(before.prompts) != list(after.prompts):
        raise ValueError("the evaluations are of different prompts; only those of the same ones can be compared")
    both = before.mask & after.mask
    was, now = (replace(run, mask=both) for run in (before, after))
    first, second = was.figures(), now.figures()
    gain = {name: second[name] - first[name] for name in first}
    judged = both.any(1)
    gain["atom_score_se"] = _standard_error((now.atom_means - was.atom_means)[judged])
    gain["all_correct_se"] = _standard_error((now.all_correct.float() - was.all_correct.float())[judged])
    return {"before": before.figures(), "after": after.figures(), "gain": gain}


def table(comparison: dict[str, dict[str, float]]) -> str:
    """What :func:`compare` returns as lines of text, a figure per line; nan where there is none."""
    lines = [f"{'held-out':>18s}" + "".join(f"{column:>9s}" for column in comparison)]
    for name in dict.fromkeys(name for figures in comparison.values() for name in figures):
        row = "".join(f"{figures.get(name, math.nan):9.3f}" for figures in comparison.values())
        lines.append(f"{name:>18s}{row}")
    return "\n".join(lines)


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    judge: Judge,
    prompts: Sequence[Prompt],
    bank: PromptBank,
    *,
    height: int,
    width: int,
    steps: int,
    seed: int = 0,
    batch_size: int = 64,
) -> Evaluation:
    """Sample one image per prompt along the ODE and judge it; prompt i starts from the noise of seed ``seed + i``.

    Args:
        backbone: its weights as they are now.
        judge: scores the images.
        prompts: N prompts; ``bank`` holds their encodings in the same order.
        height, width: pixels.
        steps: denoising steps.
        seed: of the noise. The same seed before and after training gives pairs of images to compare.
        batch_size: images at a time.

    Raises:
        ValueError: ``bank`` holds other prompts.
    """
    if [p.text for p in prompts] != list(bank.texts):
        raise ValueError(f"evaluate: the bank must encode these {len(prompts)} prompts, in this order; it holds others")
    images, scores, masks = [], [], []
    K = max(len(p.atoms) for p in prompts)
    for at in tqdm(range(0, len(prompts), batch_size), desc="evaluate", leave=False):
        ids = torch.arange(at, min(at + batch_size, len(prompts)), device=backbone.device)
        x = backbone.initial_latents([seed + i for i in ids.tolist()], height, width)
        pixels = backbone.decode(ode_rollout(backbone, x, *bank(ids), steps=steps, height=height, width=width))
        judged = ask(judge, pixels, [prompts[i].atoms for i in ids.tolist()], K)
        images.append(pixels.cpu())
        scores.append(judged.scores.cpu())
        masks.append(judged.mask.cpu())
    return Evaluation(torch.cat(images), torch.cat(scores), torch.cat(masks), prompts)
