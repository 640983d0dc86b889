"""A tiny pipeline with random weights for every family besides Qwen-Image, in the production classes."""

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tiny_pipelines import qwen_image_pipeline, spread
from tokenizers import decoders, pre_tokenizers
from transformers import Qwen2Tokenizer

from cast_rl.miniature.assemble import train_tokenizer

WORDS = "a the photo of with left and two red blue green small cat cats dog bench bowl table number ugly".split()
FLUX2_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
QWEN_MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
QWEN3_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL_MARKERS = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]
MISTRAL_CHAT = (
    "<s>{% for m in messages %}{% set text = m['content'] | map(attribute='text') | join %}"
    "{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ text }}[/INST]{% endif %}{% endfor %}"
)


def byte_level(markers: list[str]) -> Qwen2Tokenizer:
    """Byte-level BPE in which the words of the tests are tokens."""
    words = [form for word in WORDS for form in (word, f" {word}")]
    return train_tokenizer([FLUX2_SYSTEM, "system\n", "user\n", "assistant\n", *words], 1000, markers)


def qwen3_tokenizer() -> Qwen2Tokenizer:
    tokenizer = byte_level(QWEN_MARKERS)
    tokenizer.chat_template = QWEN3_CHAT
    return tokenizer


def mistral_tokenizer() -> transformers.PreTrainedTokenizerFast:
    bpe = byte_level([]).backend_tokenizer
    bpe.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=MISTRAL_MARKERS,
        padding_side="left",
    )
    tokenizer.chat_template = MISTRAL_CHAT
    return tokenizer


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """One token per letter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> transformers.T5TokenizerFast:
    """One token per word of the tests, and per other letter."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(f"▁{word}", -1.0) for word in WORDS] + [(chr(code), -5.0) for code in range(33, 127)]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def clip_config(tokenizer, projection: int) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=projection,
        intermediate_size=16,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_encoder(tokenizer) -> transformers.T5EncoderModel:
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def language_model(tokenizer, layers: int) -> dict:
    """Settings of a decoder."""
    return dict(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
    )


def image_vae() -> AutoencoderKL:
    blocks = 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(4,) * blocks,
        norm_num_groups=2,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


def patch_vae() -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(block_out_channels=(4, 4, 4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=2)
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return vae


def flux2_transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 16,
        timestep_guidance_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def growing_shift() -> FlowMatchEulerDiscreteScheduler:
    """Constants that are nobody's defaults, so that reading others would show."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.4,
        max_shift=1.3,
        base_image_seq_len=16,
        max_image_seq_len=512,
    )


def stable_diffusion_3() -> StableDiffusion3Pipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=spread(
            SD3Transformer2DModel(
                sample_size=16,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=12 + 20,
                pos_embed_max_size=16,
                dual_attention_layers=(0,),
                qk_norm="rms_norm",
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        text_encoder=transformers.CLIPTextModelWithProjection(clip_config(clip, 12)),
        tokenizer=clip,
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config(clip, 20)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def flux(guidance_embeds: bool = True) -> FluxPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=growing_shift(),
        vae=image_vae(),
        text_encoder=transformers.CLIPTextModel(clip_config(clip, 16)),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
        transformer=spread(transformer),
    )


def flux2() -> Flux2Pipeline:
    """The pipeline reads layers 10, 20 and 30 of its text encoder, so there must be as many."""
    tokenizer = mistral_tokenizer()
    config = transformers.Mistral3Config(
        text_config=dict(model_type="mistral", sliding_window=None, **language_model(tokenizer, 30)),
        vision_config=dict(
            model_type="pixtral",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=8,
            image_size=28,
            patch_size=14,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return Flux2Pipeline(
        scheduler=growing_shift(),
        vae=patch_vae(),
        text_encoder=transformers.Mistral3ForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=spread(flux2_transformer(guidance_embeds=True)),
    )


def flux2_klein(is_distilled: bool = False) -> Flux2KleinPipeline:
    """The pipeline reads layers 9, 18 and 27 of its text encoder, so there must be as many."""
    tokenizer = qwen3_tokenizer()
    return Flux2KleinPipeline(
        scheduler=growing_shift(),
        vae=patch_vae(),
        text_encoder=transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**language_model(tokenizer, 27))),
        tokenizer=tokenizer,
        transformer=spread(flux2_transformer(guidance_embeds=False)),
        is_distilled=is_distilled,
    )


def z_image() -> ZImagePipeline:
    tokenizer = qwen3_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 16, 16],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        text_encoder=transformers.Qwen3Model(transformers.Qwen3Config(**language_model(tokenizer, 2))),
        tokenizer=tokenizer,
        transformer=spread(transformer),
    )


# Builders by pipeline class.
TINY = {
    "Flux2Pipeline": flux2,
    "Flux2KleinPipeline": flux2_klein,
    "QwenImagePipeline": qwen_image_pipeline,
    "StableDiffusion3Pipeline": stable_diffusion_3,
    "FluxPipeline": flux,
    "ZImagePipeline": z_image,
}
