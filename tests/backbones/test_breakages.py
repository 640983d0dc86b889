"""The parity tests can fail: each of these breakages of a backbone gives other images than the pipeline's."""

import functools

import numpy as np
import pytest
import torch
from families import CASES, PLAIN, SEEDS, conditionings, stock_images

from cast_rl.backbones import FAMILIES, load_backbone
from cast_rl.backbones.schedule import resolution_shift
from cast_rl.sampling import ode_rollout

# Two steps would not do: Qwen-Image stretches its schedule to a fixed last one, whatever its shift.
SIZE, STEPS = (64, 96), 3
# The last case of each class is the one with the most guidance.
GUIDED = {case.pipeline_class: case for case in CASES}


def negated(family):
    return {"_to_velocity": lambda self, prediction, shape: -family._to_velocity(self, prediction, shape)}


def unshifted(family):
    return {"sigmas": lambda self, steps, height, width: torch.linspace(1, 0, steps + 1)}


def shifted_for_another_size(family):
    return {"_schedule": lambda self, steps, height, width: family._schedule(self, steps, 2 * height, 2 * width)}


def with_inputs(**changed):
    """The network sees some of its inputs changed."""

    def breakage(family):
        def predict(self, network, x, sigma, cond):
            def broken(**inputs):
                return network(**{key: changed.get(key, lambda v: v)(value) for key, value in inputs.items()})

            return family._predict(self, broken, x, sigma, cond)

        return {"_predict": predict}

    return breakage


def with_latents(change):
    """The VAE sees other latents."""
    return lambda family: {"_decode": lambda self, x: family._decode(self, change(x))}


def guided(combine):
    return lambda family: {"_guide": combine}


def replaced(**methods):
    return lambda family: methods


def swapped_ids(ids):
    """Row and column exchanged, in the second and third of the coordinates."""
    return ids[..., [0, 2, 1, *range(3, ids.shape[-1])]]


def linear_shift(self, steps, height, width):
    tokens = (height // self.cell) * (width // self.cell)
    shift = resolution_shift(self.pipe.scheduler.config, tokens)
    return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": shift}


def evenly(self, steps, height, width):
    return {"sigmas": np.linspace(1.0, 1 / steps, steps)}


def rescaled_per_image(self, positive, negative):
    new = negative + self.guidance * (positive - negative)
    norm, now = (v.flatten(1).norm(dim=1).view(-1, 1, 1) for v in (positive, new))
    return new * norm / now


def decoded_without_statistics(self, x):
    return self.vae.decode(self.pipe._unpatchify_latents(x), return_dict=False)[0]


def decoded_without_scale(self, x):
    return self.vae.decode(x, return_dict=False)[0]


def mask_ignored(family):
    def predict(self, network, x, sigma, cond):
        return family._predict(self, network, x, sigma, cond | {"mask": torch.ones_like(cond["mask"])})

    return {"_predict": predict}


def other_scale(scale):
    return lambda value: scale * value


EVERY_FAMILY = {"sign of the velocity": negated, "no schedule shift": unshifted}
FLUX2 = {
    "timestep off by a tenth": with_inputs(timestep=other_scale(0.9)),
    "prompts dropped": with_inputs(encoder_hidden_states=torch.zeros_like),
    "height and width swapped": with_inputs(img_ids=swapped_ids),
    "text without positions": with_inputs(txt_ids=torch.zeros_like),
    "shift of another image size": shifted_for_another_size,
    "shift of another formula": replaced(_schedule=linear_shift),
    "tokens read as channels": replaced(_to_velocity=lambda self, prediction, shape: prediction.reshape(shape)),
    "VAE statistics": replaced(_decode=decoded_without_statistics),
}
CFG = {
    "no guidance": guided(lambda self, positive, negative: positive),
    "guidance order": guided(lambda self, positive, negative: positive + self.guidance * (negative - positive)),
}
BREAKAGES = {
    "Flux2Pipeline": FLUX2
    | {
        "guidance off by one": with_inputs(guidance=lambda guidance: guidance + 1),
        "guidance dropped": with_inputs(guidance=lambda guidance: None),
    },
    "Flux2KleinPipeline": FLUX2 | CFG,
    "QwenImagePipeline": CFG
    | {
        "shift of another image size": shifted_for_another_size,
        "height and width swapped": with_inputs(img_shapes=lambda shapes: [[(f, w, h)] for [(f, h, w)] in shapes]),
        "mask ignored": with_inputs(encoder_hidden_states_mask=torch.ones_like),
        "timestep not divided by 1000": with_inputs(timestep=other_scale(1000)),
        "timestep off by a tenth": with_inputs(timestep=other_scale(0.9)),
        "prompts dropped": with_inputs(encoder_hidden_states=torch.zeros_like),
        "no rescale": guided(lambda self, positive, negative: negative + self.guidance * (positive - negative)),
        "rescale per image": guided(rescaled_per_image),
        "VAE mean": with_latents(lambda x: x - 0.1),
        "VAE standard deviation": with_latents(other_scale(1.1)),
    },
    "StableDiffusion3Pipeline": CFG
    | {
        "timestep divided by 1000": with_inputs(timestep=other_scale(1e-3)),
        "prompts dropped": with_inputs(encoder_hidden_states=torch.zeros_like),
        "pooled text dropped": with_inputs(pooled_projections=torch.zeros_like),
        "schedule of FLUX.1": replaced(_schedule=evenly),
        "VAE scale": replaced(_decode=decoded_without_scale),
    },
    "FluxPipeline": {
        "no true guidance": guided(lambda self, positive, negative: positive),
        "the embedded guidance for the true one": guided(
            lambda self, positive, negative: negative + self.guidance * (positive - negative)
        ),
        "embedded guidance off by one": with_inputs(guidance=lambda guidance: guidance + 1),
        "height and width swapped": with_inputs(img_ids=swapped_ids),
        "timestep off by a tenth": with_inputs(timestep=other_scale(0.9)),
        "prompts dropped": with_inputs(encoder_hidden_states=torch.zeros_like),
        "pooled text dropped": with_inputs(pooled_projections=torch.zeros_like),
        "shift of another image size": shifted_for_another_size,
        "VAE shift": with_latents(lambda x: x + 0.1),
    },
    "ZImagePipeline": CFG
    | {
        "the usual convention of guidance": guided(lambda self, pos, neg: neg + self.guidance * (pos - neg)),
        "time not reversed": with_inputs(t=lambda t: 1 - t),
        "prompts dropped": with_inputs(cap_feats=lambda texts: [torch.zeros_like(text) for text in texts]),
        "padding read as text": mask_ignored,
        "VAE scale": replaced(_decode=decoded_without_scale),
    },
}
ALL = [(name, breakage) for name, broken in BREAKAGES.items() for breakage in EVERY_FAMILY | broken]


@pytest.fixture(scope="module")
def parts(tiny_folder, shared_stock):
    """From a pipeline class to what the pipeline gives, and what a backbone is made of."""

    @functools.cache
    def load(pipeline_class):
        case = GUIDED[pipeline_class]
        backbone = load_backbone(tiny_folder(pipeline_class), **case.load_options())
        expected = stock_images(shared_stock(pipeline_class), case, SIZE, STEPS)
        return backbone.pipe, conditionings(backbone, case), expected

    return load


def distance(family, pipeline_class, parts):
    pipe, conds, expected = parts(pipeline_class)
    backbone = family(pipe, **GUIDED[pipeline_class].load_options())
    x = backbone.initial_latents(SEEDS, *SIZE)
    x = ode_rollout(backbone, x, *conds, steps=STEPS, height=SIZE[0], width=SIZE[1])
    return (backbone.decode(x) - expected).abs().max().item()


@pytest.mark.parametrize(("pipeline_class", "breakage"), ALL)
def test_a_broken_backbone_gives_other_images(parts, pipeline_class, breakage):
    family = FAMILIES[pipeline_class]
    methods = (EVERY_FAMILY | BREAKAGES[pipeline_class])[breakage](family)
    assert distance(type("Broken", (family,), methods), pipeline_class, parts) > 1e-4


def test_there_are_enough_and_an_intact_one_gives_the_same_images(parts):
    assert len(ALL) >= 15 and set(BREAKAGES) == set(FAMILIES) == set(PLAIN)
    for pipeline_class, family in FAMILIES.items():
        assert distance(family, pipeline_class, parts) <= 1e-5
