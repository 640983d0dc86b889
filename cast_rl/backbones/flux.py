"""FLUX.1 (github.com/black-forest-labs/flux): `FluxPipeline`, dev and schnell."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.checks import check_embedded_guidance
from cast_rl.backbones.latents import decode_scaled, pack, unpack
from cast_rl.backbones.schedule import resolution_shift


class Flux(Backbone):
    """FLUX.1. `guidance` is the pipeline's ``guidance_scale``, an input of the network; schnell has none.

    Args:
        true_cfg_scale: the pipeline's argument of that name; above 1 it needs a negative prompt. None for none.
        **common: as for `Backbone`.

    Raises:
        ValueError: guidance for a model distilled to do without, or none for one that takes it as an input.
    """

    family = "FLUX.1"
    pipeline_classes = ("FluxPipeline",)
    text_reader = "T5"
    longest_text = 512
    reads_padding = True

    def __init__(self, pipe: DiffusionPipeline, *, true_cfg_scale: float | None = None, **common: Any):
        check_embedded_guidance(self.family, pipe.transformer.config.guidance_embeds, common.get("guidance"))
        super().__init__(pipe, **common)
        self.true_cfg_scale = true_cfg_scale

    @property
    def channels(self) -> int:
        return self.pipe.transformer.config.in_channels // 4

    @property
    def pixel_multiple(self) -> int:
        return 2 * self.cell

    @property
    def uses_negative(self) -> bool:
        return self.true_cfg_scale is not None and self.true_cfg_scale > 1

    @property
    def guidance_setting(self) -> str:
        return f"true_cfg_scale={self.true_cfg_scale}"

    def _encode(self, prompts: list[str]) -> Cond:
        embeds, pooled, _ = self.pipe.encode_prompt(
            prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"embeds": embeds, "pooled": pooled}

    def _text_tokens(self, prompt: str) -> int:
        return len(self.pipe.tokenizer_2(prompt).input_ids)

    def _fixed_text_tokens(self, prompt: str) -> dict[str, tuple[int, int]]:
        return {"CLIP": (len(self.pipe.tokenizer(prompt).input_ids), self.pipe.tokenizer_max_length)}

    def _schedule(self, steps: int, height: int, width: int) -> dict[str, Any]:
        tokens = (height // self.pixel_multiple) * (width // self.pixel_multiple)
        shift = resolution_shift(self.pipe.scheduler.config, tokens)
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": shift}

    def _predict(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        # The pipeline rounds sigma * 1000 to the model's dtype and divides again; rounding sigma differs.
        timestep = (sigma * self.pipe.scheduler.config.num_train_timesteps).to(x.dtype) / 1000
        h, w = x.shape[-2:]
        return network(
            hidden_states=pack(x),
            timestep=timestep,
            guidance=None if self.guidance is None else torch.full_like(sigma, self.guidance),
            pooled_projections=cond["pooled"].to(x.dtype),
            encoder_hidden_states=cond["embeds"].to(x.dtype),
            txt_ids=torch.zeros(cond["embeds"].shape[1], 3, device=x.device, dtype=x.dtype),
            img_ids=self.pipe._prepare_latent_image_ids(1, h // 2, w // 2, x.device, x.dtype),
            return_dict=False,
        )[0]

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + self.true_cfg_scale * (positive - negative)

    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        return unpack(prediction, *shape[-2:])

    def _decode(self, x: Tensor) -> Tensor:
        return decode_scaled(self.vae, x)

    def lora_targets(self) -> list[str]:
        """Attention and MLP of both streams in the double blocks, and of the joint stream in the single ones."""
        config = self.pipe.transformer.config
        attention = ["attn.to_q", "attn.to_k", "attn.to_v"]
        double = ["attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
        double += ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
        single = ["proj_mlp", "proj_out"]
        return [
            f"{stack}.{block}.{layer}"
            for stack, blocks, layers in (
                ("transformer_blocks", config.num_layers, attention + double),
                ("single_transformer_blocks", config.num_single_layers, attention + single),
            )
            for block in range(blocks)
            for layer in layers
        ]
