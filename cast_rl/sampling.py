"""Deterministic sampling: what stochastic rollouts are held against, and what evaluation uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.transitions import ode_step

Callback = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.no_grad()
def ode_rollout(
    backbone: Backbone,
    x: Tensor,
    cond: Cond,
    negative: Cond | None = None,
    *,
    steps: int,
    height: int,
    width: int,
    callback: Callback | None = None,
) -> Tensor:
    """Integrate ``dx/dsigma = v`` from noise to data with Euler steps, ``x' = x + (s' - s) v``.

    From the pipeline's initial latents this gives the pipeline's own images.

    Args:
        x: initial latents (B, C, h, w) float32.
        cond, negative: one row per latent; `negative` where the backbone's guidance needs it.
        steps, height, width: number of steps and image size in pixels, which fix the schedule.
        callback: called before each step as ``callback(step, x, sigma, velocity)``; the Tweedie estimate of
            the final latent is ``x - sigma * velocity``.

    Returns:
        Latents (B, C, h, w) float32 at sigma 0.

    Raises:
        ValueError: the latents do not have the shape of height x width.
    """
    expected = backbone.latent_shape(height, width)
    if x.shape[1:] != expected:
        raise ValueError(
            f"ode_rollout: the latents are {tuple(x.shape[1:])}, but {height}x{width} pixels have {expected}."
        )
    x = x.float()
    sigmas = backbone.sigmas(steps, height, width)
    for step, (sigma, sigma_next) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        velocity = backbone.velocity(x, sigma, cond, negative)
        if callback is not None:
            callback(step, x, sigma, velocity)
        x = ode_step(x, velocity, sigma, sigma_next)
    return x
