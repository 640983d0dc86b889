"""The miniature's judge, put together from the real Qwen3-VL classes at toy size, without a hub."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cast_rl.miniature.assemble import MARKERS, train_tokenizer
from cast_rl.miniature.render import SIZE
from cast_rl.miniature.vocabulary import COLORS, RELATIONS, SHAPES
from cast_rl.scene_graph import number_word, plural

DIM, LAYERS = 128, 4
VISION_DIM, VISION_LAYERS, VISION_HEADS = 96, 3, 6
VISION_THETA = 10.0  # frequencies of positions from 1 to about 1 / VISION_THETA per patch, for a grid of 12x12
PATCH, MERGE = 4, 2  # pixels per patch, patches per image token and side: 8x8 pixels per token
GRID = SIZE // (PATCH * MERGE)  # image tokens per side
LOOKING = ((1, 0), (1, 1), (2, 0), (2, 1))  # (layer, head) that are taught where to look; evidence is read there
NUMBERS = tuple(number_word(n) for n in range(11))

# No names of roles and no newlines: an eighth of the tokens of a question, and this judge converses with nobody.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- endif %}"
)


def build_judge_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2 byte-level BPE tokenizer in which every word of the prompts, questions and answers is one token."""
    things = [*SHAPES, *map(plural, SHAPES)]
    words = ["a", "an", "and", "the", "some", *COLORS, *things, *RELATIONS, *NUMBERS]
    asked = (
        "Are there any in the image? Is the image? How many are in the image? objects Yes No yes no "
        "Answer in one word. Describe this image."
    )
    answers = [form for n in (*NUMBERS, "yes", "no") for form in (n, n.capitalize(), f" {n.capitalize()}")]
    corpus = [asked, " ".join(words), *words, *answers, *(f" {t}{mark}" for t in (*things, *COLORS) for mark in ",?")]
    tokenizer = train_tokenizer(corpus, 1024, MARKERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def build_judge(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    """An untrained judge of about 2M parameters.

    Matrices are initialised by fan-in: with the default of 0.02 attention starts out even, and what depends on the
    order of words is learned late. What is added to the residual stream starts out small.
    """
    ids = {m: tokenizer.convert_tokens_to_ids(m) for m in MARKERS}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": DIM, "intermediate_size": 3 * DIM,
            "num_hidden_layers": LAYERS, "num_attention_heads": DIM // 32, "num_key_value_heads": DIM // 32,
            "head_dim": 32, "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e3, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
            "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": VISION_LAYERS, "hidden_size": VISION_DIM, "intermediate_size": 3 * VISION_DIM,
            "num_heads": VISION_HEADS, "patch_size": PATCH, "spatial_merge_size": MERGE,
            "out_hidden_size": DIM, "num_position_embeddings": (SIZE // PATCH) ** 2,
            "deepstack_visual_indexes": [VISION_LAYERS // 2],
            "rope_parameters": {"rope_type": "axial", "rope_theta": VISION_THETA},
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    for name, p in model.named_parameters():
        if p.ndim >= 2 and "embed" not in name:
            # Each output is a sum over the input's channels (and, for patches, their pixels).
            gain = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")) else 1.0
            nn.init.normal_(p, std=gain * p[0].numel() ** -0.5)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.7)
    nn.init.normal_(model.model.visual.patch_embed.proj.weight, std=(3 * 2 * PATCH**2) ** -0.5)
    model.model.visual.pos_embed.weight.data.copy_(_smooth_positions())
    nn.init.normal_(model.lm_head.weight, std=0.02)
    return model


def _smooth_positions() -> torch.Tensor:
    """Random position embeddings ``(N, VISION_DIM)`` of the patches in which neighbours are alike."""
    axis = torch.linspace(-1, 1, SIZE // PATCH)
    waves = torch.stack([axis, *(f(k * torch.pi / 2 * axis) for k in (1, 2, 3) for f in (torch.sin, torch.cos))], 1)
    rows = waves[:, None].expand(-1, len(axis), -1)
    basis = torch.cat([rows, rows.transpose(0, 1)], -1).flatten(0, 1)  # (N, 14)
    return basis @ torch.randn(basis.shape[1], VISION_DIM) * 0.15


def save_judge(model: Qwen3VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the judge in half precision as a folder that ``from_pretrained`` and ``AutoProcessor`` load."""
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = {"shortest_edge": SIZE**2, "longest_edge": SIZE**2}
    images = {
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "size": pixels,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    for file, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / file).write_text(json.dumps(images | kind, indent=2) + "\n")
