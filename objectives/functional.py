"""Group statistics, group-relative advantages and advantage maps as pure functions."""

import torch
from torch import Tensor

from cast_rl.masked import valid_weights


def group_mean_std(scores: Tensor, mask: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and population standard deviation of each score within its group, over the valid entries.

    Args:
        scores: ``(N, K)``; read only where ``mask``.
        mask: bool ``(N, K)``.
        group_id: integer ``(N,)``, in any order.

    Returns:
        ``mean`` and ``std (N, K)``, repeated over the members of the group and 0 where it has no valid entry;
        and ``varies (N, K)``, whether its valid entries differ at all. The last is exact where the standard
        deviation is not: the float32 mean of eight times 0.1 is not 0.1.
    """
    group_id = group_id.reshape(-1)
    if group_id.is_floating_point() or scores.shape != mask.shape or scores.shape[:1] != group_id.shape:
        raise ValueError(
            f"scores {tuple(scores.shape)} and mask {tuple(mask.shape)} must be alike, with one integer "
            f"group_id per row; got {group_id.dtype} {tuple(group_id.shape)}"
        )
    ids, group = group_id.unique(return_inverse=True)
    zeros = scores.new_zeros(len(ids), scores.shape[1])
    index = group.unsqueeze(-1).expand_as(scores)
    count = zeros.index_add(0, group, mask.to(scores.dtype)).clamp_min(1)
    # Masked scores may be NaN, which a product with 0 would keep.
    mean = zeros.index_add(0, group, torch.where(mask, scores, 0.0)) / count
    deviation = torch.where(mask, scores - mean[group], 0.0)
    std = (zeros.index_add(0, group, deviation**2) / count).sqrt()
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(
        0, index, torch.where(mask, scores, -torch.inf), reduce="amax"
    )
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(
        0, index, torch.where(mask, scores, torch.inf), reduce="amin"
    )
    return mean[group], std[group], (highest > lowest)[group]


def group_relative_advantage(scores: Tensor, mask: Tensor, group_id: Tensor, *, delta: float = 1e-4) -> Tensor:
    """``A = (s - mean) / (std + delta)`` within each group and column, ``(N, K)``.

    Exactly 0 where masked, and where a group's valid scores are all equal (a group of one included).

    Source: GRPO (arXiv 2402.03300), with the population standard deviation and ``delta`` of Flow-GRPO's code.
    """
    mean, std, varies = group_mean_std(scores, mask, group_id)
    return torch.where(mask & varies, (scores - mean) / (std + delta), 0.0)


def temper_evidence(evidence: Tensor, *, uniform: float = 0.0, map_cap: float | None = None) -> Tensor:
    """Evidence ``(..., h, w)`` of unit spatial mean, capped and mixed with the uniform map; keeps the mean.

    Args:
        uniform: weight of the uniform map, ``H <- (1 - uniform) H + uniform``.
        map_cap: largest value before the map is brought back to mean 1 (and mixed).
    """
    if map_cap is not None:
        evidence = evidence.clamp(max=map_cap)
        mean = evidence.mean((-2, -1), keepdim=True)
        evidence = torch.where(mean > 0, evidence / mean.clamp_min(torch.finfo(mean.dtype).tiny), 1.0)
    return (1 - uniform) * evidence + uniform


def others_evidence(evidence: Tensor, mask: Tensor, group_id: Tensor) -> Tensor:
    """For each image, the mean evidence of the *other* images of its group: ``(N, K, h, w)`` of unit spatial mean.

    An image's own evidence depends on the noise whose log-probability it would weight (a found object has a region, a
    missing one has none), which gives the gradient a direction of its own whatever the reward. Leaving the image out,
    as a leave-one-out baseline does (RLOO, arXiv 2402.14740), makes the weights independent of that noise. An image
    with a uniform map votes for everywhere; uniform, too, where no other image has any evidence.

    Args:
        evidence: ``(N, K, h, w)``, unit spatial mean, or all 0 where nothing shows the atom; read only where ``mask``.
        mask: bool ``(N, K)``.
        group_id: integer ``(N,)``, in any order.
    """
    own = torch.where(mask[..., None, None], evidence, 0.0)
    ids, group = group_id.reshape(-1).unique(return_inverse=True)
    total = own.new_zeros(len(ids), *own.shape[1:]).index_add(0, group, own)
    # A difference of float32 sums can fall below 0 by a rounding error.
    others = (total[group] - own).clamp_min(0)
    mean = others.mean((-2, -1), keepdim=True)
    return torch.where(mean > 1e-4, others / mean.clamp_min(1e-4), 1.0)


def advantage_map(advantage: Tensor, mask: Tensor, evidence: Tensor, weight: Tensor | None = None) -> Tensor:
    """``M = (weighted) mean over valid k of A_k H_k``, ``(N, h, w)``; 0 without a valid atom.

    Source: CAST (arXiv 2609.39441).

    Args:
        advantage: ``(N, K)``, or ``(N, 1)`` for one advantage shared by all atoms.
        mask: bool ``(N, K)``.
        evidence: ``(N, K, h, w)``, unit spatial mean where valid, so that the spatial mean of the map is the
            mean advantage.
        weight: ``(N, K)``, not negative; by default all alike.
    """
    weight = valid_weights(evidence, mask, weight)
    total = weight.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weight * torch.where(mask, advantage.to(weight.dtype), 0.0) / total, 0.0)
    return torch.einsum("nk,nkhw->nhw", weights, torch.where(mask[..., None, None], evidence, 0.0))
