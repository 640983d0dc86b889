"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): `StableDiffusion3Pipeline`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.latents import decode_scaled
from cast_rl.backbones.schedule import resolution_shift


class StableDiffusion3(Backbone):
    """SD3 and SD3.5. `guidance` is the pipeline's ``guidance_scale``; above 1 it needs a negative prompt."""

    family = "Stable Diffusion 3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    text_reader = "T5"
    longest_text = 512
    reads_padding = True

    @property
    def channels(self) -> int:
        return self.pipe.transformer.config.in_channels

    @property
    def pixel_multiple(self) -> int:
        return self.pipe.patch_size * self.cell

    @property
    def uses_negative(self) -> bool:
        return self.guidance is not None and self.guidance > 1

    def _encode(self, prompts: list[str]) -> Cond:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompts,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds, "pooled": pooled}

    def _text_tokens(self, prompt: str) -> int:
        # Checkpoints may come without the T5 encoder; then all that is read are CLIP's tokens.
        return 0 if self.pipe.text_encoder_3 is None else len(self.pipe.tokenizer_3(prompt).input_ids)

    def _fixed_text_tokens(self, prompt: str) -> dict[str, tuple[int, int]]:
        # The two CLIP encoders have the same tokens.
        return {"CLIP": (len(self.pipe.tokenizer(prompt).input_ids), self.pipe.tokenizer_max_length)}

    def _schedule(self, steps: int, height: int, width: int) -> dict[str, Any]:
        config = self.pipe.scheduler.config
        if not config.use_dynamic_shifting:
            return {"num_inference_steps": steps}
        tokens = (height // self.pixel_multiple) * (width // self.pixel_multiple)
        return {"num_inference_steps": steps, "mu": resolution_shift(config, tokens)}

    def _predict(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return network(
            hidden_states=x,
            timestep=sigma * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states=cond["embeds"].to(x.dtype),
            pooled_projections=cond["pooled"].to(x.dtype),
            return_dict=False,
        )[0]

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + self.guidance * (positive - negative)

    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        return prediction

    def _decode(self, x: Tensor) -> Tensor:
        return decode_scaled(self.vae, x)

    def lora_targets(self) -> list[str]:
        """Attention and MLP of both streams, less what follows the last block's text, which nobody reads."""
        config = self.pipe.transformer.config
        image = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"]
        image_alone = ["attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"]
        text_for_image = ["attn.add_k_proj", "attn.add_v_proj"]
        text = ["attn.add_q_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"]
        names = []
        for block in range(config.num_layers):
            layers = image + text_for_image
            layers += image_alone if block in config.dual_attention_layers else []
            layers += text if block < config.num_layers - 1 else []
            names += [f"transformer_blocks.{block}.{layer}" for layer in layers]
        return names
