"""Which heads of a judge look where the words point, measured on images in which that is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cast_rl.judges.evidence import QUERIES, EvidenceSettings
from cast_rl.judges.vlm import VLMJudge
from cast_rl.scene_graph import Atom, Span


@dataclass(frozen=True)
class Known:
    """B images and where their atoms' things are.

    Args:
        images: ``(B, 3, H, W)``, as a judge takes them.
        atoms: B lists of atoms with words in a prompt.
        regions: for each image ``(K_b, H, W)`` bool, true where what atom k states is to be seen.
    """

    images: Tensor
    atoms: Sequence[Sequence[Atom]]
    regions: Sequence[Tensor]


@dataclass(frozen=True)
class Ranking:
    """What heads of a judge look at, for one way of reading them.

    Args:
        query: of which tokens the rows were read, see `EvidenceSettings`.
        inside: ``(layers, heads)``, which share of a head's attention to the image lies in the region; mean over atoms.
        image: ``(layers, heads)``, the share of all its attention that goes to the image.
        together: element n - 1 is the share inside of the n best heads, averaged as evidence is.
        chance: the share inside of attention that is even over the image.
    """

    query: str
    inside: Tensor
    image: Tensor
    together: tuple[float, ...]
    chance: float

    @property
    def order(self) -> list[tuple[int, int]]:
        """``(layer, head)`` from the best to the worst."""
        heads = self.inside.shape[1]
        return [divmod(i, heads) for i in self.inside.flatten().argsort(descending=True, stable=True).tolist()]

    @property
    def settings(self) -> EvidenceSettings:
        """As many of the best heads as look best together."""
        best = max(range(len(self.together)), key=self.together.__getitem__) + 1
        return EvidenceSettings(heads=tuple(sorted(self.order[:best])), query=self.query)


def share_inside(attention: Tensor, regions: Tensor) -> Tensor:
    """The share of each map ``(..., h, w)`` that lies in its region, ``(...)``; 0 where a map is zero.

    ``regions (..., h, w)`` broadcast against it: how much of each cell belongs to the region.
    """
    total = attention.sum((-2, -1))
    return torch.where(total > 0, (attention * regions).sum((-2, -1)) / total.clamp_min(1e-30), 0.0)


def rank_heads(judge: Callable[[str], VLMJudge], known: Sequence[Known], most: int = 16) -> list[Ranking]:
    """Ranks a judge's heads for every query position, the best position first.

    Two passes over the images: one to rank heads, one to see how the best ones do together.

    Args:
        judge: from a query position to the judge that reads it.
        known: images to look at; atoms without a region are left out.
        most: how many heads may be averaged.

    Raises:
        ValueError: no atom has a region.
    """
    rankings = []
    for query in QUERIES:
        inside, image, even = _means(judge(query), known, _per_head)
        first = Ranking(query, inside, image, (), float(even))
        best = first.order[:most]
        layers, heads = (torch.tensor(part) for part in zip(*best, strict=True))
        (together,) = _means(
            judge(query),
            known,
            lambda seen, region, at=(layers, heads): (share_inside(seen[at].cumsum(0), region),),
        )
        rankings.append(Ranking(query, inside, image, tuple(together.tolist()), float(even)))
    return sorted(rankings, key=lambda ranking: -max(ranking.together))


def _per_head(seen: Tensor, region: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One atom's attention ``(L, H, h, w)`` and region ``(h, w)``: shares inside, on the image, and by chance."""
    return share_inside(seen, region), seen.sum((-2, -1)), region.mean()


def _means(
    judge: VLMJudge, known: Iterable[Known], figures: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> list[Tensor]:
    """Means over all atoms with a region of ``figures(attention (L, H, h, w), region (h, w))``."""
    sums: list[Tensor] = []
    count = 0
    for batch in known:
        attention = judge.head_attention(batch.images, batch.atoms).cpu()
        for seen, regions in zip(attention, batch.regions, strict=True):
            cells = F.adaptive_avg_pool2d(regions.float(), seen.shape[-2:])
            for k, region in enumerate(cells):
                if region.sum() == 0:
                    continue
                found = figures(seen[k], region)
                sums = list(found) if not sums else [total + new for total, new in zip(sums, found, strict=True)]
                count += 1
    if not count:
        raise ValueError("no atom of the images to calibrate on has a region; give boxes, or scenes with objects")
    return [total / count for total in sums]


def spans_of(prompt: str, words: Sequence[str]) -> tuple[Span, ...]:
    """Character spans of the first occurrence of each of ``words`` in the prompt, not within a longer word.

    Raises:
        ValueError: a word that is not there.
    """
    spans = []
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt, re.IGNORECASE) if word else None
        if found is None:
            raise ValueError(f"{word!r} does not stand in the prompt {prompt!r}")
        spans.append(found.span())
    return tuple(spans)
