"""Qwen-Image (arXiv 2508.02324): `QwenImagePipeline`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.latents import pack, unpack
from cast_rl.backbones.schedule import resolution_shift
from cast_rl.backbones.single_frame import single_frame_vae


class QwenImage(Backbone):
    """Qwen-Image. `guidance` is the pipeline's ``true_cfg_scale``; above 1 it needs a negative prompt.

    Args:
        fast_vae: run the video VAE with 2D convolutions, equal to 1e-5 and faster; see `single_frame_vae`.
        **common: as for `Backbone`.
    """

    family = "Qwen-Image"
    pipeline_classes = ("QwenImagePipeline",)
    longest_text = 1024

    def __init__(self, pipe: DiffusionPipeline, *, fast_vae: bool = True, **common: Any):
        if pipe.transformer.config.guidance_embeds:
            raise ValueError(
                "this Qwen-Image transformer has guidance_embeds=True, which diffusers' model cannot run; "
                "use a checkpoint without it."
            )
        super().__init__(pipe, **common)
        self._latents_mean, self._latents_std = pipe.vae.config.latents_mean, pipe.vae.config.latents_std
        if fast_vae:
            single_frame_vae(pipe.vae)

    @property
    def channels(self) -> int:
        return self.pipe.transformer.config.in_channels // 4

    @property
    def pixel_multiple(self) -> int:
        return 2 * self.cell

    @property
    def uses_negative(self) -> bool:
        return self.guidance is not None and self.guidance > 1

    def _encode(self, prompts: list[str]) -> Cond:
        embeds, mask = self.pipe.encode_prompt(
            prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        # The pipeline drops a mask that is all true. Here it always goes along, so that a sample takes the
        # same path through the attention whatever the length of its neighbours.
        if mask is None:
            mask = torch.ones(embeds.shape[:2], device=embeds.device)
        return {"embeds": embeds, "mask": mask.bool()}

    def _text_tokens(self, prompt: str) -> int:
        text = self.pipe.prompt_template_encode.format(prompt)
        return len(self.pipe.tokenizer(text).input_ids) - self.pipe.prompt_template_encode_start_idx

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
            encoder_hidden_states=cond["embeds"].to(x.dtype),
            encoder_hidden_states_mask=cond["mask"],
            img_shapes=[[(1, h // 2, w // 2)]] * len(x),
            return_dict=False,
        )[0]

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Classifier-free guidance, each packed token rescaled to the norm it has without."""
        guided = negative + self.guidance * (positive - negative)
        norm = torch.norm(positive, dim=-1, keepdim=True)
        return guided * (norm / torch.norm(guided, dim=-1, keepdim=True))

    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        return unpack(prediction, *shape[-2:])

    def _decode(self, x: Tensor) -> Tensor:
        mean = torch.tensor(self._latents_mean, device=x.device, dtype=x.dtype).view(1, -1, 1, 1, 1)
        # Dividing by the rounded reciprocal, as the pipeline does, keeps the last bit.
        reciprocal = 1.0 / torch.tensor(self._latents_std).view(1, -1, 1, 1, 1).to(x)
        return self.vae.decode(x.unsqueeze(2) / reciprocal + mean, return_dict=False)[0].squeeze(2)

    def lora_targets(self) -> list[str]:
        """Attention and MLP of both streams, less what follows the last block's text, which nobody reads."""
        image = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
        image += ["img_mlp.net.0.proj", "img_mlp.net.2"]
        text_for_image = ["attn.add_k_proj", "attn.add_v_proj"]
        text = ["attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
        last = self.pipe.transformer.config.num_layers - 1
        return [
            f"transformer_blocks.{block}.{layer}"
            for block in range(last + 1)
            for layer in image + text_for_image + (text if block < last else [])
        ]
