"""Tiny vision-language models with random weights in the production classes, saved as checkpoints."""

import json

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from cast_rl.miniature.assemble import MARKERS, build_tokenizer

# What Qwen's own templates make of a user turn with one image.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def judge_tokenizer() -> Qwen2Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _ids(tokenizer) -> dict:
    ids = {m: tokenizer.convert_tokens_to_ids(m) for m in MARKERS}
    return dict(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _text(tokenizer, hidden: int, layers: int, **more) -> dict:
    return (
        dict(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            initializer_range=0.3,
            pad_token_id=tokenizer.pad_token_id,
        )
        | more
    )


def qwen3_vl(tokenizer, *, moe: bool = False, hidden: int = 48, layers: int = 3, patch: int = 4, **vision):
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True)
    more = dict(head_dim=16, rope_parameters=rope)
    if moe:
        more |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    tower = dict(
        depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=patch, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=hidden, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
        initializer_range=0.2,
    )  # fmt: skip
    config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(
        text_config=_text(tokenizer, hidden, layers, **more), vision_config=tower | vision, **_ids(tokenizer)
    )
    return (Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration)(config)


def qwen2_5_vl(tokenizer, *, hidden: int = 64, layers: int = 3, patch: int = 4):
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
    tower = dict(
        depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=patch, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=hidden, window_size=16, fullatt_block_indexes=[1], initializer_range=0.2,
    )  # fmt: skip
    # Without Qwen3's normalised queries and keys, larger weights make attention so sharp that rounding shows.
    text = _text(tokenizer, hidden, layers, rope_parameters=rope, initializer_range=0.12)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **_ids(tokenizer))
    return Qwen2_5_VLForConditionalGeneration(config)


def image_processor(patch: int = 4) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=2, image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.6, 0.7],
        size={"shortest_edge": 16 * patch**2, "longest_edge": 2**20},
    )  # fmt: skip


BUILDERS = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": lambda tokenizer: qwen3_vl(tokenizer, moe=True),
    "qwen2_5_vl": qwen2_5_vl,
}


def save_judge(kind: str, folder, seed: int = 0, **sizes):
    """A checkpoint of a tiny random model of a kind in :data:`BUILDERS`, of other `sizes` than its builder's."""
    torch.manual_seed(seed)
    tokenizer = judge_tokenizer()
    model = BUILDERS[kind](tokenizer, **sizes)
    with torch.no_grad():
        # A random model spreads its answers over the whole vocabulary, where mistakes would drown in the tolerance.
        answers = tokenizer("Yes yes one two three")["input_ids"]
        model.lm_head.weight[answers] *= 6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind
    return folder
