"""Asking a judge: what it is given, and what its answer must be like before anything is made of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from cast_rl.judges.base import Judge, Judgement
from cast_rl.scene_graph import Atom


@torch.no_grad()
def ask(judge: Judge, images: Tensor, atoms: Sequence[Sequence[Atom]], max_atoms: int) -> Judgement:
    """The judge's answer with ``max_atoms`` columns, checked, on the images' device.

    A judge with a ``device`` gets the images there. It does not see images that nothing is asked of. If it raises, or
    its answer has a wrong shape (a list too short, say), it is asked again about each image on its own, and those on
    which it fails once more are masked, with a warning that says why. Scores are 0 and evidence is 0 where the mask is
    false: beyond an image's atoms, where the judge masked or failed, and where the score is not finite.

    Args:
        judge: any callable with the protocol of `cast_rl.judges.Judge`.
        images: ``(B, 3, H, W)`` in [0, 1].
        atoms: B lists of at most ``max_atoms`` atoms.
        max_atoms: K.

    Returns:
        scores and mask ``(B, K)``; evidence ``(B, K, h, w)`` as the judge gave it, or None.

    Raises:
        ValueError: more than ``max_atoms`` atoms; scores outside [0, 1] or negative evidence.
        Exception: what the judge raised, or the ValueError about its answer's shape, if it failed on every image.
    """
    home = images.device
    rows = [b for b, row in enumerate(atoms) if row]
    scores = torch.zeros(len(images), max_atoms, device=home)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    if not rows:
        return Judgement(scores, mask)
    asked = [list(atoms[b]) for b in rows]
    if max(map(len, asked)) > max_atoms:
        raise ValueError(f"an image is asked for {max(map(len, asked))} atoms, more than max_atoms={max_atoms}")
    answer = _answer(judge, images[rows].to(getattr(judge, "device", None) or home), asked)
    sizes = torch.tensor([[len(row)] for row in asked], device=home)
    given = _columns(answer.scores.to(home, torch.float32), max_atoms)
    valid = _columns(answer.mask.to(home, torch.bool), max_atoms) & given.isfinite()
    valid &= torch.arange(max_atoms, device=home) < sizes
    given = torch.where(valid, given, 0.0)
    if ((given < 0) | (given > 1)).any():
        raise ValueError(f"atom scores are probabilities, got values from {given.min():.4g} to {given.max():.4g}")
    scores[rows], mask[rows] = given, valid
    if answer.evidence is None:
        return Judgement(scores, mask)
    shown = _columns(answer.evidence.to(home, torch.float32), max_atoms)
    shown = torch.where(valid[..., None, None], shown, 0.0)
    negative = shown[(shown < 0) & shown.isfinite()]
    if len(negative):
        raise ValueError(f"evidence must be non-negative, got a minimum of {negative.min():.4g}")
    evidence = torch.zeros(len(images), *shown.shape[1:], device=home)
    evidence[rows] = shown
    return Judgement(scores, mask, evidence)


def _answer(judge: Judge, images: Tensor, asked: list[list[Atom]]) -> Judgement:
    """The judge's answer, of the right shape; image by image if it fails on all of them together."""
    try:
        return _checked(judge(images, asked), asked)
    except Exception as error:
        if len(asked) == 1:
            raise
        return _one_by_one(judge, images, asked, error)


def _one_by_one(judge: Judge, images: Tensor, asked: list[list[Atom]], error: Exception) -> Judgement:
    """Answers about single images, joined, masked where the judge fails; ``error`` is raised if that is everywhere."""
    answers: dict[int, Judgement] = {}
    for b, row in enumerate(asked):
        try:
            answers[b] = _checked(judge(images[b : b + 1], [row]), [row])
        except Exception as reason:
            error = reason
    if not answers:
        raise error
    failed = len(asked) - len(answers)
    if failed:
        warnings.warn(f"the judge failed on {failed} of {len(asked)} images, which are masked: {error!r}", stacklevel=4)
    else:
        warnings.warn(
            f"the judge failed on {len(asked)} images together, though on none alone: {error!r}", stacklevel=4
        )
    most = max(map(len, asked))
    scores = images.new_zeros(len(asked), most, dtype=torch.float32)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    sizes = {tuple(answer.evidence.shape[2:]) for answer in answers.values() if answer.evidence is not None}
    if len(sizes) > 1:
        raise ValueError(f"the judge returned evidence of several sizes for images of one size: {sorted(sizes)}")
    evidence = scores.new_zeros(len(asked), most, *sizes.pop()) if sizes else None
    for b, answer in answers.items():
        scores[b], mask[b] = _columns(answer.scores, most)[0], _columns(answer.mask, most)[0]
        if answer.evidence is not None:
            evidence[b] = _columns(answer.evidence, most)[0]
    return Judgement(scores, mask, evidence)


def _checked(answer: Judgement, asked: list[list[Atom]]) -> Judgement:
    """The answer, or a ValueError if its shapes are not those of ``asked``."""
    n, most = len(asked), max(map(len, asked))
    scores, mask, evidence = answer.scores, answer.mask, answer.evidence
    columns = scores.shape[-1] if scores.ndim else 0
    if scores.shape != (n, columns) or mask.shape != scores.shape or columns < most:
        raise ValueError(
            f"the judge returned scores {tuple(scores.shape)} and mask {tuple(mask.shape)} for {n} "
            f"images with up to {most} atoms; both must be ({n}, K) with K >= {most}"
        )
    if evidence is not None and (evidence.ndim != 4 or evidence.shape[:2] != scores.shape):
        raise ValueError(f"the judge returned evidence {tuple(evidence.shape)}; expected ({n}, {columns}, h, w)")
    return answer


def _columns(value: Tensor, count: int) -> Tensor:
    """``(n, K, ...)`` cut or zero-padded to ``count`` columns."""
    if value.shape[1] >= count:
        return value[:, :count]
    padding = value.new_zeros(len(value), count - value.shape[1], *value.shape[2:])
    return torch.cat([value, padding], 1)
