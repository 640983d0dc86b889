"""F1, F2, F9, F12, F13, F14 and F15 on every family's own classes, at the guidance with most passes."""

import warnings

import pytest
import torch
from families import CASES, PLAIN

from cast_rl.backbones import FAMILIES, load_backbone
from cast_rl.ema import WeightAverage
from cast_rl.envs import DenoisingEnv
from cast_rl.objectives import AtomAdvantage, CASTLoss
from cast_rl.policy import make_policy
from cast_rl.prompt_bank import PromptBank, concatenate
from cast_rl.sampling import ode_rollout
from cast_rl.saving import save_weights

CLIP = 0.01
KINDS = ["cps", "flow_sde", "dance_sde"]
CLIP_AND_T5 = ("StableDiffusion3Pipeline", "FluxPipeline")
SHORT, LONG = "two cats", "a photo of " + "a red dog and a small blue bowl left of the table with " * 5
GUIDED = {case.pipeline_class: case for case in CASES}


@pytest.fixture(scope="module", params=FAMILIES)
def guided(request, tiny_folder):
    """(backbone, bank of two prompts)."""
    return with_bank(tiny_folder, request.param)


def with_bank(tiny_folder, pipeline_class, **options):
    case = GUIDED[pipeline_class]
    backbone = load_backbone(tiny_folder(pipeline_class), **case.load_options(), **options)
    return backbone, PromptBank.encode(backbone, [SHORT, "a green bench with a red bowl"], case.negative)


def rollout(backbone, bank, kind):
    """(policy, window step of a group of four images of each of two prompts (8,))."""
    noise = {"transition": kind, "a": 0.5}
    size = {"height": 64, "width": 64, "steps": 3}
    batch = {"prompts_per_batch": 2, "group_size": 4, "window": (0, 1)}
    env = DenoisingEnv.from_backbone(backbone, len(bank), **size, **batch, **noise)
    policy = make_policy(backbone, bank, env.sigmas, **noise)
    with torch.no_grad():
        data = env.rollout(10, policy)
    data["next", "atom_scores"] = data["next", "pixels"].mean((-3, -2, -1)).unsqueeze(-1)
    data["next", "atom_mask"] = torch.ones(*data.shape, 1, dtype=torch.bool)
    return policy, AtomAdvantage(maps="none").inv(data).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_f01_f02_f09_replayed_in_any_batch(guided, kind):
    policy, data = rollout(*guided, kind)
    assert data.shape == (8,) and data["latent"].dtype == data["action"].dtype == torch.float32
    loss = CASTLoss(policy, clip_epsilon=CLIP)
    out = loss(data)
    assert out["max_abs_log_ratio"] == 0 and out["max_ratio"] == out["mean_ratio"] == 1
    if kind == "cps":
        assert max(loss(batch)["max_abs_log_ratio"] for size in (1, 3) for batch in data.split(size)) <= 1e-5
        # Independent noise of n numbers lies about sqrt(2 n) apart.
        latents = data["latent"].flatten(1)
        distances = torch.cdist(latents, latents) + 1e3 * torch.eye(8)
        assert distances.min() > 0.5 * latents.shape[1] ** 0.5


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_f01_bfloat16_stays_far_inside_the_clip_range(tiny_folder, pipeline_class):
    guided = with_bank(tiny_folder, pipeline_class, dtype="bfloat16")
    for kind in KINDS:
        policy, data = rollout(*guided, kind)
        assert data["latent"].dtype == data["action"].dtype == torch.float32
        loss = CASTLoss(policy, clip_epsilon=CLIP)
        for batch in (data, data[2:5]):
            assert loss(batch)["max_abs_log_ratio"] < CLIP / 10, kind


def test_f09_noise_depends_on_its_own_seed_only(guided):
    backbone, _ = guided
    together = backbone.initial_latents(range(8), 64, 96)
    assert together.shape == (8, *backbone.latent_shape(64, 96))
    assert len(together.flatten(1).unique(dim=0)) == 8
    assert torch.equal(together[5:6], backbone.initial_latents([5], 64, 96))


def test_f12_a_truncated_prompt_is_named_once_and_keeps_its_id(guided):
    backbone, _ = guided
    negative = GUIDED[type(backbone.pipe).__name__].negative
    first, second = LONG + "one", LONG + "two"
    kept = rf"keeps {backbone.max_sequence_length} of the \d+ tokens"
    with pytest.warns(UserWarning, match=f"{kept} .*'a photo of a red dog.* raise max_sequence_length") as caught:
        bank = PromptBank.encode(backbone, [first, second, SHORT], negative)
        backbone.encode([first])
    assert len(caught) == 2 and bank.texts == (first, second, SHORT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone.encode([first, SHORT])


def test_f12_prompts_that_differ_only_in_case_are_two(guided):
    backbone, _ = guided
    texts = ("a red bowl", "A red bowl", "a red bowl")
    bank = PromptBank.encode(backbone, texts, GUIDED[type(backbone.pipe).__name__].negative)
    lower, upper, again = bank(torch.arange(3))[0]["embeds"]
    assert bank.texts == texts and torch.equal(lower, again) and not torch.equal(lower, upper)


@pytest.mark.parametrize("pipeline_class", CLIP_AND_T5)
def test_f12_what_clip_alone_cuts_off_is_named_too(shared_stock, pipeline_class):
    options = PLAIN[pipeline_class] | {"max_sequence_length": 200}
    backbone = load_backbone(shared_stock(pipeline_class), **options)
    words = "a red dog and " * 10  # a token each for T5; for the tiny CLIP each letter is one
    with pytest.warns(UserWarning, match=r"^CLIP keeps 77 of the 102 tokens of the prompt 'a red dog .*; shorten it"):
        backbone.encode([words])
    with pytest.warns(UserWarning, match=r"^T5 keeps 200 of the .* and CLIP keeps 77 of the .* raise max_sequence_le"):
        backbone.encode([words * 6])


@pytest.mark.filterwarnings("ignore:.* keeps")
def test_f13_a_row_depends_neither_on_its_neighbours_nor_on_their_length(guided):
    backbone, bank = guided
    alone, joint = backbone.encode([SHORT]), concatenate([backbone.encode([text]) for text in (SHORT, LONG)])
    encoded_together = backbone.encode([SHORT, LONG])
    if backbone.reads_padding:
        assert "mask" not in alone
        assert alone["embeds"].shape[1] == joint["embeds"].shape[1]
    else:
        assert alone["embeds"].shape[1] < joint["embeds"].shape[1]
    x = backbone.initial_latents([1, 2], 64, 64)
    sigma = torch.tensor([0.7, 0.2])
    negative = bank(torch.tensor([0, 1]))[1]
    first = None if negative is None else {key: value[:1] for key, value in negative.items()}
    with torch.no_grad():
        expected = backbone.velocity(x[:1], 0.7, alone, first)
        for cond in (joint, encoded_together):
            together = backbone.velocity(x, sigma, cond, negative)
            torch.testing.assert_close(together[:1], expected, rtol=0, atol=1e-5)
        assert (together[1:] - expected).abs().max() > 0.1


def test_f14_sigmas_that_share_a_bfloat16_timestep_stay_apart(guided):
    backbone, _ = guided
    sigmas = backbone.sigmas(400, 64, 64)
    timesteps = (sigmas[:-1] * 1000).bfloat16()
    assert len(timesteps.unique()) < len(timesteps)
    assert len(sigmas) == 401 and (sigmas.diff() < 0).all()


def test_f14_each_of_400_steps_is_taken_once(guided, monkeypatch):
    """Along a constant velocity the Euler steps add up to one from the first sigma to 0."""
    backbone, _ = guided
    x = backbone.initial_latents([1], 64, 64)
    velocity, seen = torch.randn_like(x), []

    def constant(latents, sigma, cond, negative):
        seen.append(float(sigma))
        return velocity

    monkeypatch.setattr(backbone, "velocity", constant)
    end = ode_rollout(backbone, x, {}, steps=400, height=64, width=64)
    assert len(seen) == len(set(seen)) == 400
    torch.testing.assert_close(end, x - seen[0] * velocity, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_f15_the_average_is_swapped_back_and_saved_under_its_own_name(tiny_folder, tmp_path, pipeline_class):
    torch.manual_seed(0)
    backbone, bank = with_bank(tiny_folder, pipeline_class, lora={"rank": 2, "alpha": 4})
    average = WeightAverage(backbone, decay=0.9)
    weights, x = backbone.trainable_parameters(), backbone.initial_latents([1, 2], 64, 64)
    conditions = bank(torch.tensor([0, 1]))
    with torch.no_grad():
        for _ in range(2):  # the first step takes the weights as they are
            for weight in weights:
                weight.add_(torch.randn_like(weight))
            average.step()
        raw, velocity = [weight.clone() for weight in weights], backbone.velocity(x, 0.6, *conditions)
        with average.averaged():
            averaged = [weight.clone() for weight in weights]
            assert (backbone.velocity(x, 0.6, *conditions) - velocity).abs().max() > 1e-3
        assert all(torch.equal(a, b) for a, b in zip(weights, raw, strict=True))
        assert torch.equal(backbone.velocity(x, 0.6, *conditions), velocity)
    folders = save_weights(backbone, tmp_path, average=average)
    assert [folder.name for folder in folders] == ["lora", "lora_ema"]
    for folder, expected in zip(folders, (raw, averaged), strict=True):
        backbone.load_lora(folder)
        assert all(torch.equal(a, b) for a, b in zip(backbone.trainable_parameters(), expected, strict=True))


def test_every_family_is_here():
    assert set(GUIDED) == set(FAMILIES) == set(PLAIN)
