"""Latents as networks and VAEs want them, where families share it."""

from __future__ import annotations

from diffusers import AutoencoderKL
from torch import Tensor


def pack(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h/2 * w/2, 4C): one token per 2x2 positions, channels ordered (c, dy, dx)."""
    b, c, h, w = x.shape
    patches = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), 4 * c)


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """Inverse of `pack`: (B, h/2 * w/2, 4C) -> (B, C, h, w)."""
    b, _, c = tokens.shape
    return tokens.reshape(b, h // 2, w // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c // 4, h, w)


def decode_scaled(vae: AutoencoderKL, x: Tensor) -> Tensor:
    """Latents (B, C, h, w), scaled and shifted as the VAE's config says, to images (B, 3, H, W) in [-1, 1]."""
    return vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
