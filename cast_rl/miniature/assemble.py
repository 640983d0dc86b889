"""The miniature's generator, put together from the real Qwen-Image classes at toy size, without a hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from cast_rl.miniature.vocabulary import COLORS, RELATIONS, SHAPES
from cast_rl.wording import number_word, plural

WEIGHTS = Path(__file__).parent / "weights"
LATENT_CHANNELS = 8
TEXT_DIM = 96

# QwenImagePipeline drops the first 34 tokens of its prompt template, as many as the full-size tokenizer makes of it:
# one per word, punctuation mark, newline and marker.
TEMPLATE_WORDS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:\n user\n assistant\n"
)
MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def build_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2 byte-level BPE tokenizer in which every word of this world is one token."""
    numbers = [number_word(n) for n in range(1, 11)]
    words = ["a", "an", "and", "the", "some", *COLORS, *SHAPES, *map(plural, SHAPES), *RELATIONS, *numbers]
    asked = "Are there any in the image? Is How many are objects Yes No yes no Answer in one word. Describe this image."
    corpus = [
        TEMPLATE_WORDS,
        asked,
        " ".join(words),
        "system",
        "user",
        "assistant",
        *words,
        *(f" {w}," for w in words),
    ]
    return train_tokenizer(corpus, 4096, MARKERS)


def train_tokenizer(corpus: Sequence[str], vocab_size: int, markers: Sequence[str]) -> Qwen2Tokenizer:
    """A Qwen2 byte-level BPE tokenizer of a corpus's words, with ``markers`` as special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=1, show_progress=False, initial_alphabet=alphabet
    )
    bpe.train_from_iterator(corpus, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=trained["vocab"], merges=[tuple(m) for m in trained["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    return tokenizer


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen2.5-VL; its vision tower is the smallest possible, since the generator only reads text."""
    ids = {m: tokenizer.convert_tokens_to_ids(m) for m in MARKERS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": TEXT_DIM, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            # By fan-in: with the default of 0.02 attention starts out even, and word order is learned late.
            "initializer_range": TEXT_DIM**-0.5,
            "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.7)
    return model


def build_vae(
    latents_mean: list[float] | None = None, latents_std: list[float] | None = None
) -> AutoencoderKLQwenImage:
    """An autoencoder with two downsamplings: 4x4 pixels per latent cell, 8x8 per packed token."""
    return AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=latents_mean or [0.0] * LATENT_CHANNELS,
        latents_std=latents_std or [1.0] * LATENT_CHANNELS,
    )


def build_transformer(layers: int = 4, heads: int = 4) -> QwenImageTransformer2DModel:
    """A Qwen-Image transformer that starts, as DiTs do, with every block the identity and a zero velocity."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(8, 12, 12),
    )
    for name, p in model.named_parameters():
        if p.ndim == 2:
            nn.init.xavier_uniform_(p)
        if any(part in name for part in ("_mod.", "norm_out.linear", "proj_out")):
            nn.init.zeros_(p)
    return model


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's dynamic shifting, with the constants of a 6x6-token image."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.7,
        max_shift=0.9,
        base_image_seq_len=36,
        max_image_seq_len=144,
        time_shift_type="exponential",
    )


def assemble(
    vae: AutoencoderKLQwenImage,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    transformer: QwenImageTransformer2DModel,
) -> QwenImagePipeline:
    """The pipeline of the given parts and :func:`build_scheduler`."""
    return QwenImagePipeline(build_scheduler(), vae, text_encoder, tokenizer, transformer)
