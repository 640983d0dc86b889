"""FLUX.2 (github.com/black-forest-labs/flux2): `Flux2Pipeline` (dev) and `Flux2KleinPipeline` (klein)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.utils import is_torchvision_available

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.checks import check_embedded_guidance


class Flux2(Backbone):
    """FLUX.2 with its guidance as an input of the network. `guidance` is the pipeline's ``guidance_scale``.

    One latent position is a 2x2 patch of the VAE's latent, so that a cell is 16 pixels wide.

    Raises:
        ValueError: guidance for a model distilled to do without, or none for one that takes it as an input.
    """

    family = "FLUX.2"
    pipeline_classes = ("Flux2Pipeline",)
    reads_padding = True

    def __init__(self, pipe: DiffusionPipeline, **common: Any):
        self._check_guidance(pipe, common.get("guidance"))
        super().__init__(pipe, **common)

    @classmethod
    def _check_guidance(cls, pipe: DiffusionPipeline, guidance: float | None) -> None:
        check_embedded_guidance(cls.family, pipe.transformer.config.guidance_embeds, guidance)

    @classmethod
    def own_components(cls, source: str, index: Mapping[str, Any]) -> dict[str, Any]:
        """The tokenizer of the pipeline's image-and-text processor, where torchvision, which that needs, is missing.

        The pipeline asks either of them for its chat template of texts, and gets the same tokens.
        """
        if is_torchvision_available() or index["tokenizer"][1] != "PixtralProcessor":
            return {}
        return {"tokenizer": AutoTokenizer.from_pretrained(source, subfolder="tokenizer", trust_remote_code=False)}

    @property
    def channels(self) -> int:
        return self.pipe.transformer.config.in_channels

    @property
    def cell(self) -> int:
        return 2 * self.pipe.vae_scale_factor

    @property
    def pixel_multiple(self) -> int:
        return self.cell

    @property
    def uses_negative(self) -> bool:
        return False

    def _encode(self, prompts: list[str]) -> Cond:
        embeds, _ = self.pipe.encode_prompt(prompts, device=self.device, max_sequence_length=self.max_sequence_length)
        return {"embeds": embeds}

    def _text_tokens(self, prompt: str) -> int:
        # Imported here, as it takes Mistral 3's classes along, for which the other families need not wait.
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input([prompt], system_message=self.pipe.system_message)
        tokens = self.pipe.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        return len(tokens["input_ids"][0])

    def _schedule(self, steps: int, height: int, width: int) -> dict[str, Any]:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        shift = compute_empirical_mu((height // self.cell) * (width // self.cell), steps)
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": shift}

    def _predict(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        # The pipeline rounds sigma * 1000 to the model's dtype and divides again; rounding sigma differs.
        timestep = (sigma * self.pipe.scheduler.config.num_train_timesteps).to(x.dtype) / 1000
        return network(
            hidden_states=x.flatten(2).transpose(1, 2),
            timestep=timestep,
            guidance=self._guidance_input(sigma),
            encoder_hidden_states=cond["embeds"].to(x.dtype),
            txt_ids=self.pipe._prepare_text_ids(cond["embeds"][:1]).to(x.device),
            img_ids=self.pipe._prepare_latent_ids(x[:1]).to(x.device),
            return_dict=False,
        )[0]

    def _guidance_input(self, sigma: Tensor) -> Tensor | None:
        """(B,) float32, or None."""
        return None if self.guidance is None else torch.full_like(sigma, self.guidance)

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        raise NotImplementedError(f"{self.family} has no negative pass.")

    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        return prediction.transpose(1, 2).reshape(shape)

    def _decode(self, x: Tensor) -> Tensor:
        # The VAE's latents are normalised by the running statistics of a batch norm over 2x2 patches.
        statistics = self.vae.bn
        mean = statistics.running_mean.view(1, -1, 1, 1).to(x)
        std = torch.sqrt(statistics.running_var.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps).to(x)
        return self.vae.decode(self.pipe._unpatchify_latents(x * std + mean), return_dict=False)[0]

    def lora_targets(self) -> list[str]:
        """Attention and MLP of both streams in the double blocks, and the fused layers of the single ones."""
        config = self.pipe.transformer.config
        double = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.linear_in", "ff.linear_out"]
        double += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
        double += ["ff_context.linear_in", "ff_context.linear_out"]
        single = ["attn.to_qkv_mlp_proj", "attn.to_out"]
        return [
            f"{stack}.{block}.{layer}"
            for stack, blocks, layers in (
                ("transformer_blocks", config.num_layers, double),
                ("single_transformer_blocks", config.num_single_layers, single),
            )
            for block in range(blocks)
            for layer in layers
        ]


class Flux2Klein(Flux2):
    """FLUX.2 klein. `guidance` above 1 needs a negative prompt, for which the pipeline takes the empty one.

    Raises:
        ValueError: guidance above 1 for a checkpoint distilled to do without.
    """

    family = "FLUX.2 klein"
    pipeline_classes = ("Flux2KleinPipeline",)

    @classmethod
    def _check_guidance(cls, pipe: DiffusionPipeline, guidance: float | None) -> None:
        if pipe.config.is_distilled:
            check_embedded_guidance(cls.family, False, None if guidance is None or guidance <= 1 else guidance)

    @classmethod
    def own_components(cls, source: str, index: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @property
    def uses_negative(self) -> bool:
        return self.guidance is not None and self.guidance > 1

    def _text_tokens(self, prompt: str) -> int:
        text = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return len(self.pipe.tokenizer(text).input_ids)

    def _guidance_input(self, sigma: Tensor) -> None:
        return None

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + self.guidance * (positive - negative)
