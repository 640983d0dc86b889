"""How alike two images are in layout, without a judge."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

CELLS = 16
KERNEL = 7


def low_pass(images: Tensor, cells: int = CELLS) -> Tensor:
    """Area averages, ``cells`` along the shorter side: ``(B, 3, H, W)`` to ``(B, 3, h, w)``."""
    height, width = images.shape[-2:]
    scale = cells / min(height, width)
    return F.interpolate(images, (round(height * scale), round(width * scale)), mode="area")


def structural_similarity(a: Tensor, b: Tensor) -> Tensor:
    """Mean SSIM (Wang et al. 2004) of images ``(B, C, h, w)`` in [0, 1] over channels and 7x7 windows: ``(B,)``."""

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.double(), KERNEL, stride=1)

    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a.double() ** 2) - mean_a**2, mean(b.double() ** 2) - mean_b**2
    covariance = mean(a.double() * b.double()) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    likeness = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (likeness / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean((1, 2, 3))
