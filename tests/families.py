"""How each family's stock pipeline is called, and how its backbone is loaded to do the same."""

from dataclasses import dataclass, field
from typing import Any

import torch

from cast_rl.backbones import Backbone

PROMPTS = ["a photo of two red cats left of a blue dog", "a green bench"]
SEEDS = [11, 12]

# What loads a backbone of each class in the plainest way, at a text length that keeps tests quick.
PLAIN: dict[str, dict[str, Any]] = {
    "Flux2Pipeline": {"guidance": 1.0, "max_sequence_length": 64},
    "Flux2KleinPipeline": {"max_sequence_length": 32},
    "QwenImagePipeline": {"max_sequence_length": 64, "fast_vae": False},
    "StableDiffusion3Pipeline": {"max_sequence_length": 24},
    "FluxPipeline": {"guidance": 1.0, "max_sequence_length": 24},
    "ZImagePipeline": {"max_sequence_length": 48},
}


@dataclass(frozen=True)
class Case:
    """A stock pipeline, the arguments that set its guidance, and the backbone's options for the same."""

    pipeline_class: str
    call: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    negative: str | None = None
    # Whether the pipeline runs both passes of its guidance as one batch, which rounds differently.
    batched: bool = False

    def __str__(self) -> str:
        return f"{self.pipeline_class}-{'-'.join(f'{k}={v}' for k, v in self.call.items())}"

    def load_options(self) -> dict[str, Any]:
        return PLAIN[self.pipeline_class] | self.options


CASES = [
    Case("Flux2Pipeline", {"guidance_scale": 1.0}, {"guidance": 1.0}),
    Case("Flux2Pipeline", {"guidance_scale": 4.0}, {"guidance": 4.0}),
    Case("Flux2KleinPipeline", {"guidance_scale": 1.0}),
    Case("Flux2KleinPipeline", {"guidance_scale": 4.0}, {"guidance": 4.0}, negative=""),
    Case("QwenImagePipeline", {"true_cfg_scale": 1.0}),
    Case("QwenImagePipeline", {"true_cfg_scale": 4.0}, {"guidance": 4.0}, negative=" "),
    Case("StableDiffusion3Pipeline", {"guidance_scale": 1.0}),
    Case("StableDiffusion3Pipeline", {"guidance_scale": 4.5}, {"guidance": 4.5}, negative="ugly", batched=True),
    Case("FluxPipeline", {"guidance_scale": 1.0}, {"guidance": 1.0}),
    Case("FluxPipeline", {"guidance_scale": 3.5}, {"guidance": 3.5}),
    Case(
        "FluxPipeline",
        {"guidance_scale": 3.5, "true_cfg_scale": 2.5},
        {"guidance": 3.5, "true_cfg_scale": 2.5},
        negative="ugly",
    ),
    Case("ZImagePipeline", {"guidance_scale": 0.0}),
    Case("ZImagePipeline", {"guidance_scale": 5.0}, {"guidance": 5.0}, negative="ugly", batched=True),
]


def stock_images(pipe, case: Case, size: tuple[int, int], steps: int) -> torch.Tensor:
    """What the pipeline itself gives for `PROMPTS` and `SEEDS`: (2, 3, H, W) in [0, 1]."""
    call = dict(case.call)
    # FLUX.2 klein has no argument for it: its negative prompt is always the empty one.
    if case.negative:
        call["negative_prompt"] = [case.negative] * len(PROMPTS)
    return pipe(
        prompt=list(PROMPTS),
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        max_sequence_length=case.load_options()["max_sequence_length"],
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="pt",
        **call,
    ).images


def conditionings(backbone: Backbone, case: Case):
    """(cond, negative or None) of `PROMPTS`, in the batches in which the pipeline encodes them."""
    negative = None if case.negative is None else backbone.encode([case.negative] * len(PROMPTS))
    return backbone.encode(PROMPTS), negative
