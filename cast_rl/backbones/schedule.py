"""The shift of the noise schedule with the size of the image, which several pipelines compute alike."""

from __future__ import annotations

from diffusers.configuration_utils import FrozenDict
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift


def resolution_shift(scheduler: FrozenDict, tokens: int) -> float:
    """`mu` for an image of `tokens` network tokens, on the line through the two points of the scheduler's config."""
    return calculate_shift(
        tokens,
        scheduler.base_image_seq_len,
        scheduler.max_image_seq_len,
        scheduler.base_shift,
        scheduler.max_shift,
    )
