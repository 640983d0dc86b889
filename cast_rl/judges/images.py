"""From pixels to a vision tower's patches, in torch, on the images' own device.

The numbers are those of transformers' Qwen2-VL image processor (which both families use): an image is rounded to 8
bits, resized so that both sides are multiples of a patch and its area lies within bounds, normalised and cut into
patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL.Image import Resampling
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

OVERSHOOT = 1e-3  # how far beyond [0, 1] rounding in a decoder may carry a pixel


@dataclass(frozen=True)
class ImageSettings:
    """What the checkpoint's ``preprocessor_config.json`` says.

    Args:
        patch: side of a patch in pixels.
        merge: side, in patches, of what becomes one image token.
        frames: how many equal frames a patch of a still image is made of.
        mean, std: per channel, for pixels in [0, 1].
        min_pixels, max_pixels: bounds on the resized image's area.
    """

    patch: int
    merge: int
    frames: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int

    @classmethod
    def from_processor(cls, processor: Qwen2VLImageProcessorPil) -> ImageSettings:
        """Reads a processor of transformers.

        Raises:
            ValueError: a step of it is switched off or done in another way than here.
        """
        wanted = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": Resampling.BICUBIC}
        for name, value in wanted.items():
            if getattr(processor, name) != value:
                raise ValueError(
                    f"the image processor has {name}={getattr(processor, name)!r}; only {value!r} is known"
                )
        return cls(
            processor.patch_size, processor.merge_size, processor.temporal_patch_size, tuple(processor.image_mean),
            tuple(processor.image_std), processor.size["shortest_edge"], processor.size["longest_edge"],
        )  # fmt: skip

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size ``(H, W)`` at which an image is shown to the model."""
        return smart_resize(height, width, self.patch * self.merge, self.min_pixels, self.max_pixels)

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens of an image."""
        side = self.patch * self.merge
        return self.resized(height, width)[0] // side, self.resized(height, width)[1] // side


def usable(images: Tensor) -> Tensor:
    """Which images ``(B, 3, H, W)`` have only finite pixels, ``(B,)`` bool.

    Raises:
        ValueError: neither float nor uint8, or finite pixels outside [0, 1].
    """
    if images.dtype == torch.uint8:
        return torch.ones(len(images), dtype=torch.bool, device=images.device)
    if not images.is_floating_point():
        raise ValueError(f"the judge takes images as float in [0, 1] or as uint8, got {images.dtype}")
    pixels = images.flatten(1)
    finite = pixels.isfinite()
    beyond = (finite & ((pixels < -OVERSHOOT) | (pixels > 1 + OVERSHOOT))).any(1)
    if beyond.any():
        worst = int(beyond.nonzero()[0])
        shown = pixels[worst][finite[worst]]
        raise ValueError(
            f"float images are in [0, 1], got pixels from {shown.min():.4g} to {shown.max():.4g}; clamp them, divide "
            "them by 255, or pass uint8"
        )
    return finite.all(1)


def _resize(levels: Tensor, size: tuple[int, int]) -> Tensor:
    """``(B, 3, H, W)`` levels from 0 to 255 to ``size`` as PIL does: columns, rounded to levels, then rows."""
    for step in ((levels.shape[-2], size[1]), size):
        if step != tuple(levels.shape[-2:]):
            levels = F.interpolate(levels, step, mode="bicubic", antialias=True).round().clamp(0, 255)
    return levels


def patches(images: Tensor, settings: ImageSettings) -> Tensor:
    """``(B, 3, H, W)`` float in [0, 1] or uint8 -> normalised patches ``(B, N, 3 * frames * patch**2)`` float32.

    Patches are in the model's order: those that make one image token follow each other.
    """
    # A tensor of its own, which the steps after it may overwrite: a large image is held as few times as possible.
    levels = images.float() if images.dtype == torch.uint8 else images.float().clamp(0, 1).mul_(255).round_()
    levels = _resize(levels, settings.resized(*images.shape[-2:]))
    mean, std = (levels.new_tensor(v)[:, None, None] for v in (settings.mean, settings.std))
    normal = levels.div_(255).sub_(mean).div_(std)
    p, m, f = settings.patch, settings.merge, settings.frames
    cut = normal.unflatten(3, (-1, m, p)).unflatten(2, (-1, m, p))  # (B, 3, gh, m, p, gw, m, p)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # (B, gh, gw, m, m, 3, p, p)
    return cut.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, f, -1, -1).reshape(len(images), -1, 3 * f * p * p)
