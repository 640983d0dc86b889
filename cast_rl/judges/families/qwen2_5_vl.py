"""Qwen2.5-VL."""

from __future__ import annotations

from transformers import PretrainedConfig, Qwen2_5_VLForConditionalGeneration

from cast_rl.judges.families.qwen_vl import QwenVL


class Qwen2_5_VL(QwenVL):
    """Most layers of its vision tower attend within windows. Its decoder may do so too, which is refused."""

    model_classes = (Qwen2_5_VLForConditionalGeneration,)

    @classmethod
    def check(cls, config: PretrainedConfig) -> None:
        if "sliding_attention" in config.get_text_config().layer_types:
            raise ValueError(
                "the judge packs questions behind one image, which sliding-window attention does not see the whole of; "
                "load a checkpoint with use_sliding_window=False"
            )
