"""How far the decisions about atoms at a denoising step agree with those about the final image.

Decisions are compared in 2x2 tables of counts, ``[[neither, only final], [only this step, both]]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESAMPLES = 1000


def tally(holds: Tensor, group: Tensor, groups: int) -> Tensor:
    """Tables of every step against the last one, per prompt and group of atoms.

    Args:
        holds: ``(P, K, T)`` int8, whether atom k of prompt p holds at step t: 1, 0, or -1 where nobody knows. A step
            is compared where both it and the last one are known.
        group: ``(P, K)`` int64 in ``[0, groups)``, the group of each atom.
        groups: G.

    Returns:
        Counts ``(G, P, T, 2, 2)`` float64.
    """
    final = holds[..., -1:].expand_as(holds)
    cells = torch.stack([torch.stack([(holds == now) & (final == end) for end in (0, 1)], -1) for now in (0, 1)], -2)
    member = torch.nn.functional.one_hot(group, groups)
    return torch.einsum("pkg,pktab->gptab", member.double(), cells.double())


def plain_agreement(tables: Tensor) -> Tensor:
    """Share of equal decisions, ``(G, ..., 2, 2)`` to ``(...)``; NaN where nothing was compared."""
    total = tables.sum(0)
    return total.diagonal(dim1=-2, dim2=-1).sum(-1) / total.sum((-2, -1))


def kappa(tables: Tensor) -> Tensor:
    """Cohen's kappa, ``(po - pe) / (1 - pe)`` (Cohen 1960), ``(G, ..., 2, 2)`` to ``(...)``.

    0 is what chance gives, 1 is full agreement, also where both sides always decide alike and chance would give it.
    The agreement expected by chance is taken within each of the G groups, so that groups with different shares of true
    atoms do not pass for agreement. NaN where nothing was compared.
    """
    count = tables.sum((-2, -1))
    observed = tables.diagonal(dim1=-2, dim2=-1).sum(-1)
    by_chance = (tables.sum(-1) * tables.sum(-2)).sum(-1) / count.clamp_min(1)
    count, observed, by_chance = count.sum(0), observed.sum(0), by_chance.sum(0)
    value = (observed - by_chance) / (count - by_chance)
    return torch.where(count == 0, torch.nan, torch.where(observed == count, 1.0, value))


def settled_from(curve: Tensor, threshold: float) -> Tensor:
    """The earliest step from which a curve stays at or above the threshold, ``(..., T)`` to ``(...)`` float64.

    T where its end is below, NaN where its end is NaN.
    """
    stays = (curve >= threshold).flip(-1).to(torch.int64).cumprod(-1).sum(-1)
    return torch.where(curve[..., -1].isnan(), torch.nan, (curve.shape[-1] - stays).double())


def resample(tables: Tensor, seed: int, resamples: int = RESAMPLES) -> Tensor:
    """Bootstrap: ``(G, P, T, 2, 2)`` to sums over P prompts drawn with replacement, ``(G, R, T, 2, 2)``."""
    prompts = tables.shape[1]
    drawn = torch.randint(prompts, (resamples, prompts), generator=torch.Generator().manual_seed(seed))
    times = torch.zeros(resamples, prompts, dtype=tables.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
    return torch.einsum("rp,gptab->grtab", times, tables)


def interval(values: Tensor, level: float = 0.95) -> Tensor:
    """The middle ``level`` of resampled values, ``(R, ...)`` to ``(2, ...)``; NaN are left out."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)
    return values.nanquantile(ends, dim=0)
