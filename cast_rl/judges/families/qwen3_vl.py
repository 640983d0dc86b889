"""Qwen3-VL, dense and mixture-of-experts."""

from __future__ import annotations

from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from cast_rl.judges.families.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """Features of several depths of its vision tower enter its first layers, all of them during the prefix."""

    model_classes = (Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration)
