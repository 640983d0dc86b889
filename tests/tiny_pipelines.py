"""Tiny pipelines with random weights in the production classes, quick enough to run on one core."""

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from cast_rl.miniature.assemble import train_tokenizer

# With every word of Qwen-Image's template a token of its own, its prefix takes 34 tokens, as it does in the
# real tokenizer; the pipeline drops exactly that many.
TEMPLATE_WORDS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\n\nassistant\n"
)
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE that knows the template's words and spells everything else."""
    return train_tokenizer([TEMPLATE_WORDS], 1000, SPECIAL_TOKENS)


def qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    unused = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 2]),
    )
    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=16,
        fullatt_block_indexes=[0],
    )
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=unused, video_token_id=unused)
    return Qwen2_5_VLForConditionalGeneration(config)


def spread(module: torch.nn.Module) -> torch.nn.Module:
    """Redraw all matrices with unit gain; with the default small weights mistakes hardly show."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return module


def qwen_image_pipeline(seed: int = 0) -> QwenImagePipeline:
    """Qwen-Image's geometry (8x VAE, 2x2 packing) and schedule at a few thousand weights."""
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer()
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, 0.1, 0.5, -0.3],
        latents_std=[2.8, 1.4, 2.3, 1.6],
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    return QwenImagePipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=spread(transformer),
    )
