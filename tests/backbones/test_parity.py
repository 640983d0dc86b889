"""A rollout is the pipeline's own: same noise, same schedule, same images, and a broken one is noticed."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from cast_rl.backbones import load_backbone
from cast_rl.backbones.qwen_image import QwenImage, pack, unpack
from cast_rl.prompt_bank import PromptBank
from cast_rl.sampling import ode_rollout

PROMPTS = ["a photo of two red cats left of a blue dog", "a green bench"]
SEEDS = [11, 12]
STEPS = 4
SIZES = [(64, 64), (64, 96)]
GUIDANCES = [None, 4.0]


def stock_call(pipe, size, guidance, output_type="pt"):
    return pipe(
        prompt=list(PROMPTS),
        negative_prompt=[" "] * len(PROMPTS) if guidance else None,
        true_cfg_scale=guidance or 1.0,
        height=size[0],
        width=size[1],
        num_inference_steps=STEPS,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type=output_type,
    ).images


def our_images(backbone, size):
    cond, negative = PromptBank.encode(backbone, PROMPTS)(torch.arange(len(PROMPTS)))
    x = backbone.initial_latents(SEEDS, *size)
    x = ode_rollout(backbone, x, cond, negative, steps=STEPS, height=size[0], width=size[1])
    return backbone.decode(x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("guidance", GUIDANCES)
def test_images_equal_the_pipelines_bit_for_bit(qwen_folder, qwen_pipe, size, guidance):
    expected = stock_call(qwen_pipe, size, guidance)
    exact = load_backbone(qwen_folder, guidance=guidance, fast_vae=False)
    assert torch.equal(our_images(exact, size), expected)
    fast = load_backbone(qwen_folder, guidance=guidance)
    torch.testing.assert_close(our_images(fast, size), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_bfloat16_differs_only_by_the_states_we_keep_in_float32(qwen_folder, guidance):
    """With the pipeline's rounding of the latents put back, bf16 agrees to the bit; without, to 0.03."""
    size = (64, 96)
    stock = DiffusionPipeline.from_pretrained(qwen_folder, dtype=torch.bfloat16)
    stock.set_progress_bar_config(disable=True)
    backbone = load_backbone(qwen_folder, dtype="bfloat16", guidance=guidance, fast_vae=False)
    assert backbone.dtype == torch.bfloat16

    cond, negative = PromptBank.encode(backbone, PROMPTS)(torch.arange(len(PROMPTS)))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(stock.scheduler.config)
    scheduler.set_timesteps(**backbone._schedule(STEPS, *size))
    x = backbone.initial_latents(SEEDS, *size).bfloat16()
    for sigma, timestep in zip(scheduler.sigmas, scheduler.timesteps, strict=False):
        velocity = backbone.velocity(x.float(), sigma, cond, negative)
        assert velocity.dtype == torch.float32
        x = scheduler.step(velocity.bfloat16(), timestep, x, return_dict=False)[0]
    assert torch.equal(pack(x), stock_call(stock, size, guidance, output_type="latent"))

    images = stock_call(stock, size, guidance).float()
    torch.testing.assert_close(our_images(backbone, size), images, rtol=0, atol=0.03)


def test_noise_and_schedule_are_the_pipelines(qwen_folder, qwen_pipe):
    backbone = load_backbone(qwen_folder)
    stock_call(qwen_pipe, (64, 96), None)
    sigmas = backbone.sigmas(STEPS, 64, 96)
    assert sigmas.dtype == torch.float32 and sigmas[-1] == 0
    assert torch.equal(sigmas, qwen_pipe.scheduler.sigmas)
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    drawn = qwen_pipe.prepare_latents(2, 4, 64, 96, torch.float32, "cpu", generators)
    assert torch.equal(pack(backbone.initial_latents(SEEDS, 64, 96)), drawn)


def test_asking_for_a_schedule_leaves_the_pipelines_scheduler_alone(qwen_folder):
    backbone = load_backbone(qwen_folder)
    before = backbone.pipe.scheduler.sigmas.clone()
    backbone.sigmas(7, 64, 64)
    assert torch.equal(backbone.pipe.scheduler.sigmas, before)


def test_sigmas_that_share_a_bfloat16_timestep_stay_apart(qwen_folder):
    """F14: steps go by integer, so a fine schedule repeats and skips nothing."""
    sigmas = load_backbone(qwen_folder).sigmas(400, 64, 64)
    timesteps = (sigmas[:-1] * 1000).bfloat16()
    assert len(timesteps.unique()) < len(timesteps)
    assert len(sigmas) == 401 and (sigmas.diff() < 0).all()


def test_unpack_inverts_pack_in_the_pipelines_order(qwen_pipe):
    x = torch.randn(2, 4, 8, 12)
    assert torch.equal(pack(x), qwen_pipe._pack_latents(x, 2, 4, 8, 12))
    assert torch.equal(unpack(pack(x), 8, 12), x)


def negated(self, prediction, shape):
    return -unpack(prediction, *shape[-2:])


def unshifted(self, steps, height, width):
    return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": 0.0}


def shifted_for_another_size(self, steps, height, width):
    return QwenImage._schedule(self, steps, 2 * height, 2 * width)


def with_inputs(**changed):
    """A `_predict` whose network sees some of its inputs changed."""

    def predict(self, network, x, sigma, cond):
        def broken(**inputs):
            return network(**{key: changed.get(key, lambda v: v)(value) for key, value in inputs.items()})

        return QwenImage._predict(self, broken, x, sigma, cond)

    return predict


def transposed(img_shapes):
    return [[(frames, w, h) for frames, h, w in image] for image in img_shapes]


def rescaled_per_image(self, positive, negative):
    guided = negative + self.guidance * (positive - negative)
    norm, new = (v.flatten(1).norm(dim=1).view(-1, 1, 1) for v in (positive, guided))
    return guided * norm / new


def with_statistics(**changed):
    def decode(self, x):
        before = {name: getattr(self, name) for name in changed}
        for name, value in changed.items():
            setattr(self, name, value)
        try:
            return QwenImage._decode(self, x)
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    return decode


BREAKAGES = {
    "sign of the velocity": {"_to_velocity": negated},
    "no schedule shift": {"_schedule": unshifted},
    "shift of another image size": {"_schedule": shifted_for_another_size},
    "height and width swapped": {"_predict": with_inputs(img_shapes=transposed)},
    "mask ignored": {"_predict": with_inputs(encoder_hidden_states_mask=torch.ones_like)},
    "timestep not divided by 1000": {"_predict": with_inputs(timestep=lambda t: 1000 * t)},
    "timestep off by a tenth": {"_predict": with_inputs(timestep=lambda t: 0.9 * t)},
    "prompts dropped": {"_predict": with_inputs(encoder_hidden_states=torch.zeros_like)},
    "no guidance": {"_guide": lambda self, positive, negative: positive},
    "no rescale": {"_guide": lambda self, pos, neg: neg + self.guidance * (pos - neg)},
    "rescale per image": {"_guide": rescaled_per_image},
    "VAE mean": {"_decode": with_statistics(_latents_mean=[0.0] * 4)},
    "VAE standard deviation": {"_decode": with_statistics(_latents_std=[1.0] * 4)},
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_backbone_gives_other_images(qwen_pipe, qwen_folder, breakage):
    expected = stock_call(qwen_pipe, (64, 96), 4.0)
    broken = type("Broken", (QwenImage,), BREAKAGES[breakage])
    backbone = broken(load_backbone(qwen_folder).pipe, guidance=4.0)
    assert (our_images(backbone, (64, 96)) - expected).abs().max() > 1e-4
