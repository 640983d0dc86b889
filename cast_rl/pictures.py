"""Pictures of a run: images before and after training, the atoms of an image, the curve of the reward."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from cast_rl.evaluation import Evaluation
from cast_rl.judges.base import Judgement
from cast_rl.prompts import Prompt

GOOD, BAD = "#1a7f37", "#cf222e"


def choose_examples(before: Evaluation, after: Evaluation, count: int) -> list[int]:
    """Indices of ``count`` prompts in the proportions of the run: gained, lost, right in both, wrong in both.

    Shares are rounded by the largest remainder, so that the picture flatters nobody.
    """
    was, now = before.all_correct.tolist(), after.all_correct.tolist()
    classes = [[i for i, pair in enumerate(zip(was, now, strict=True)) if pair == kind]
               for kind in ((False, True), (True, False), (True, True), (False, False))]  # fmt: skip
    take = [count * len(c) // len(was) for c in classes]
    remainders = [count * len(c) % len(was) for c in classes]
    for k in sorted(range(4), key=lambda k: -remainders[k])[: count - sum(take)]:
        take[k] += 1
    return [i for c, n in zip(classes, take, strict=True) for i in c[:n]]


def before_after(before: Evaluation, after: Evaluation, path: str | Path, count: int = 12, columns: int = 4) -> None:
    """Write a PNG of pairs of images, the prompt above each; green frame: all facts hold. Nothing for ``count=0``."""
    if count < 1:
        return
    examples = choose_examples(before, after, min(count, len(before.prompts)))
    rows = -(-len(examples) // columns)
    figure = Figure(figsize=(columns * 3.3, rows * 2.15 + 0.7), layout="constrained")
    figure.suptitle(
        f"Before and after training, same prompts and noise (green frame: all facts hold).  All-correct "
        f"{before.figures()['all_correct']:.1%} → {after.figures()['all_correct']:.1%} of {len(before.prompts)} "
        f"held-out prompts,  atom score {before.figures()['atom_score']:.3f} → {after.figures()['atom_score']:.3f}",
        fontsize=10,
    )
    cells = figure.subfigures(rows, columns, squeeze=False)
    for cell, i in zip(cells.flat, examples, strict=False):
        cell.suptitle(textwrap.fill(before.prompts[i].text, 44), fontsize=7.5)
        for axes, run, name in zip(cell.subplots(1, 2), (before, after), ("before", "after"), strict=True):
            axes.imshow(run.images[i].permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.set_xlabel(f"{name} {run.atom_means[i]:.2f}", fontsize=7)
            for spine in axes.spines.values():
                spine.set(color=GOOD if run.all_correct[i] else BAD, linewidth=2.5)
    figure.savefig(path, dpi=130)


def atoms_of_images(
    prompts: Sequence[Prompt], images: Tensor, judgement: Judgement, path: str | Path, most: int = 8
) -> None:
    """Write a PNG with one row per image: the image, then each atom's score over the evidence it was read from.

    Args:
        prompts: N prompts.
        images: ``(N, 3, H, W)`` in [0, 1].
        judgement: of the images, with evidence ``(N, K, h, w)``, whose cells are shown as squares of the image.
        path: of the PNG.
        most: atoms shown per image.
    """
    figure = Figure(figsize=(1.5 * (most + 1), 1.95 * len(prompts)), layout="constrained")
    rows = figure.subfigures(len(prompts), 1, squeeze=False)
    for row, prompt, image, scores, maps in zip(
        rows.flat, prompts, images.cpu(), judgement.scores.cpu(), judgement.evidence.cpu(), strict=True
    ):
        row.suptitle(f'"{prompt.text}"', fontsize=9)
        cells = row.subplots(1, most + 1)
        picture = image.permute(1, 2, 0).numpy()
        cells[0].imshow(picture, interpolation="nearest")
        for axes in cells:
            axes.set_axis_off()
        for axes, atom, score, evidence in zip(cells[1:], prompt.atoms, scores.tolist(), maps, strict=False):
            cells_shown = F.interpolate(evidence[None, None].float(), size=picture.shape[:2])[0, 0]
            shade = (cells_shown / cells_shown.max().clamp_min(1e-6)).numpy()[..., None]
            axes.imshow(picture.mean(-1, keepdims=True) * 0.35 + picture * shade * 0.65, interpolation="nearest")
            wording = textwrap.fill(atom.question.replace(" are in the image", "").replace(" in the image", ""), 20)
            axes.set_title(f"{wording}\n{atom.answer}: {score:.2f}", fontsize=6, color=GOOD if score > 0.5 else BAD)
    figure.savefig(path, dpi=110)


def learning_curve(scores: Sequence[float], path: str | Path, smooth: int = 5) -> None:
    """Write a PNG of the mean atom score per iteration, with its running mean over ``smooth`` iterations."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(scores, color="#8b949e", linewidth=0.8, label="iteration")
    running = [sum(scores[max(0, i - smooth + 1) : i + 1]) / min(i + 1, smooth) for i in range(len(scores))]
    axes.plot(running, color="#0969da", linewidth=1.8, label=f"mean of {smooth}")
    axes.set(xlabel="iteration", ylabel="mean atom score of rollouts")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
