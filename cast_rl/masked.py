"""Means over the entries that are valid."""

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean over the valid entries of the last dimension, ``(N, K)`` to ``(N, 1)``; 0 where there is none.

    ``weight (N, K)``, not negative, makes it a weighted one.
    """
    weight = valid_weights(values, mask, weight)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, (weight * torch.where(mask, values, 0.0)).sum(-1, keepdim=True) / total, 0.0)


def valid_weights(values: Tensor, mask: Tensor, weight: Tensor | None) -> Tensor:
    """``weight``, or 1, where valid and 0 elsewhere, in the type of ``values``."""
    weight = torch.ones_like(mask, dtype=values.dtype) if weight is None else weight.to(values.dtype)
    return torch.where(mask, weight, 0.0)
