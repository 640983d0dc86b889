"""What a judge is: images and the atoms asked of each, to scores and the places the evidence lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from cast_rl.scene_graph import Atom


@dataclass
class Judgement:
    """The answer of a judge for a batch of B images with at most K atoms each.

    Args:
        scores: ``(B, K)`` float32 in [0, 1], the probability that the atom holds.
        mask: ``(B, K)`` bool, False where an image has fewer atoms or an atom could not be judged.
        evidence: ``(B, K, h, w)`` float32, non-negative, unit spatial mean; all zero where there is no evidence to
            show. None when the judge gives none.
    """

    scores: Tensor
    mask: Tensor
    evidence: Tensor | None = None


@runtime_checkable
class Judge(Protocol):
    """Scores every atom of every image. Row b of the result depends on ``images[b]`` and ``atoms[b]`` alone.

    A judge with a ``device`` is given its images there; see `cast_rl.judges.ask`, through which it is called.
    """

    def __call__(self, images: Tensor, atoms: Sequence[Sequence[Atom]]) -> Judgement:
        """Judge ``images (B, 3, H, W)`` in [0, 1]; ``atoms[b]`` are the facts asked of image b."""
        ...
