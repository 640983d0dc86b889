"""Z-Image (arXiv 2511.22699): `ZImagePipeline`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.latents import decode_scaled
from cast_rl.backbones.schedule import resolution_shift


class ZImage(Backbone):
    """Z-Image. `guidance` is the pipeline's ``guidance_scale`` g, in its own convention.

    The guided prediction is ``positive + g (positive - negative)``: 0 is none, and g here is 1 + g elsewhere. Above 0
    it needs a negative prompt. Z-Image-Turbo is distilled and sampled with 0, but its files do not say so.
    """

    family = "Z-Image"
    pipeline_classes = ("ZImagePipeline",)

    @property
    def channels(self) -> int:
        return self.pipe.transformer.in_channels

    @property
    def pixel_multiple(self) -> int:
        return 2 * self.cell

    @property
    def uses_negative(self) -> bool:
        return self.guidance is not None and self.guidance > 0

    def _encode(self, prompts: list[str]) -> Cond:
        # The pipeline writes its chat template into the list it is given.
        embeds, _ = self.pipe.encode_prompt(
            list(prompts),
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in embeds], batch_first=True)
        return {"embeds": pad_sequence(embeds, batch_first=True), "mask": mask.to(self.device)}

    def _text_tokens(self, prompt: str) -> int:
        text = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(self.pipe.tokenizer(text).input_ids)

    def _schedule(self, steps: int, height: int, width: int) -> dict[str, Any]:
        tokens = (height // self.pixel_multiple) * (width // self.pixel_multiple)
        # Float32 as in the pipeline; NumPy's float64 would round to other last bits.
        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        return {"sigmas": sigmas, "mu": resolution_shift(self.pipe.scheduler.config, tokens)}

    def _predict(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """The network runs on lists of samples, and its time goes from 0, noise, to 1; returns (B, C, h, w) float32."""
        texts = [row[keep].to(x.dtype) for row, keep in zip(cond["embeds"], cond["mask"], strict=True)]
        time = (1000 - sigma * self.pipe.scheduler.config.num_train_timesteps) / 1000
        samples = network(x=list(x.unsqueeze(2)), t=time, cap_feats=texts, return_dict=False)[0]
        return torch.stack(samples).squeeze(2).float()

    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        return positive + self.guidance * (positive - negative)

    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        return -prediction

    def _decode(self, x: Tensor) -> Tensor:
        return decode_scaled(self.vae, x)

    def lora_targets(self) -> list[str]:
        """Attention and MLP of the main layers and of the refiners of image and text before them."""
        config = self.pipe.transformer.config
        layers = ["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"]
        layers += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
        return [
            f"{stack}.{block}.{layer}"
            for stack, blocks in (
                ("noise_refiner", config.n_refiner_layers),
                ("context_refiner", config.n_refiner_layers),
                ("layers", config.n_layers),
            )
            for block in range(blocks)
            for layer in layers
        ]
