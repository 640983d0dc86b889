"""The backbone's protocol: neighbours do not matter, and what does not fit is refused."""

import warnings

import pytest
import torch

from cast_rl.backbones import load_backbone
from cast_rl.prompt_bank import PromptBank, concatenate

SHORT = "a red cat and a blue dog"
LONG = "a photo of " + ", ".join(f"a green bench number {n}" for n in range(12))


@pytest.fixture(scope="module")
def backbone(qwen_folder):
    return load_backbone(qwen_folder)


@pytest.fixture(scope="module")
def guided(qwen_folder):
    return load_backbone(qwen_folder, guidance=4.0)


def rows(cond, index):
    return {key: value[index] for key, value in cond.items()}


@pytest.mark.parametrize("name", ["backbone", "guided"])
def test_a_row_depends_neither_on_its_neighbours_nor_on_the_padding(name, request):
    """F2, F13: alone unpadded, and beside a prompt ten times as long, give the same velocity to 1e-5."""
    backbone = request.getfixturevalue(name)
    alone = backbone.encode([SHORT])
    joint = concatenate([alone, backbone.encode([LONG]), backbone.encode(["a bowl"])])
    assert alone["embeds"].shape[1] * 4 < joint["embeds"].shape[1]
    x = backbone.initial_latents([1, 2, 3], 64, 96)
    sigma = torch.tensor([0.7, 0.9, 0.2])
    negative = backbone.encode([" "] * 3) if backbone.uses_negative else None
    one = None if negative is None else rows(negative, slice(1))
    expected = backbone.velocity(x[:1], 0.7, alone, one)
    together = backbone.velocity(x, sigma, joint, negative)
    torch.testing.assert_close(together[:1], expected, rtol=0, atol=1e-5)
    assert (together[1:] - expected).abs().max() > 0.1

    order = torch.tensor([2, 0, 1])
    shuffled = backbone.velocity(x[order], sigma[order], rows(joint, order), negative)
    torch.testing.assert_close(shuffled, together[order], rtol=0, atol=1e-5)


def test_what_stands_in_the_padding_is_not_read(backbone):
    cond = concatenate([backbone.encode([SHORT]), backbone.encode([LONG])])
    x = backbone.initial_latents([1, 2], 64, 64)
    expected = backbone.velocity(x, 0.5, cond)
    filled = cond | {"embeds": cond["embeds"].masked_fill(~cond["mask"].unsqueeze(-1), 50.0)}
    torch.testing.assert_close(backbone.velocity(x, 0.5, filled), expected, rtol=0, atol=1e-5)


def test_encoding_alone_or_in_a_batch_gives_the_same_row(backbone):
    alone, joint = backbone.encode([SHORT]), backbone.encode([LONG, SHORT])
    length = alone["mask"].sum()
    assert joint["mask"][1].sum() == length
    torch.testing.assert_close(joint["embeds"][1, :length], alone["embeds"][0], rtol=0, atol=1e-5)


def test_gradients_flow_to_the_latents_and_decoding_has_none(backbone):
    x = backbone.initial_latents([1], 64, 64).requires_grad_()
    velocity = backbone.velocity(x, 0.5, backbone.encode([SHORT]))
    assert velocity.shape == x.shape and velocity.dtype == torch.float32
    (gradient,) = torch.autograd.grad(velocity.sum(), x)
    assert gradient.abs().max() > 0
    assert not backbone.decode(x).requires_grad


def test_initial_latents_depend_on_their_own_seed_only(backbone):
    """F9: distinct seeds give distinct noise, whatever the batch."""
    together = backbone.initial_latents(torch.arange(8), 64, 64)
    assert together.shape == (8, *backbone.latent_shape(64, 64))
    assert len(together.flatten(1).unique(dim=0)) == 8
    assert torch.equal(together[5:6], backbone.initial_latents([5], 64, 64))


def test_decoding_in_parts_gives_the_same_images(backbone, qwen_folder):
    x = backbone.initial_latents(range(5), 64, 96)
    images = backbone.decode(x)
    assert images.shape == (5, 3, 64, 96) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    in_parts = load_backbone(qwen_folder, decode_batch=2).decode(x)
    torch.testing.assert_close(in_parts, images, rtol=0, atol=1e-5)
    assert backbone.decode(x[:0]).shape == (0, 3, 64, 96)


def test_loading_freezes_everything(backbone):
    modules = [m for m in backbone.pipe.components.values() if isinstance(m, torch.nn.Module)]
    assert not any(p.requires_grad for m in modules for p in m.parameters())
    assert not any(m.training for m in modules)
    assert backbone.trainable_parameters() == []


def test_guidance_and_negative_prompts_go_together(backbone, guided):
    cond = backbone.encode([SHORT])
    x = backbone.initial_latents([1], 64, 64)
    with pytest.raises(ValueError, match=r"guidance=4\.0 needs a negative"):
        guided.velocity(x, 0.5, cond)
    with pytest.raises(ValueError, match="guidance=None does not use one"):
        backbone.velocity(x, 0.5, cond, cond)
    with pytest.raises(ValueError, match=r"guidance=4\.0 needs a negative prompt"):
        PromptBank.encode(guided, [SHORT], negative=None)


def test_inputs_that_do_not_fit_are_refused(backbone):
    cond = backbone.encode([SHORT])
    with pytest.raises(ValueError, match="1 rows for 2 latents"):
        backbone.velocity(backbone.initial_latents([1, 2], 64, 64), 0.5, cond)
    with pytest.raises(ValueError, match="width=72 .* multiple of 16 pixels, for example 64"):
        backbone.latent_grid(64, 72)
    with pytest.raises(ValueError, match="height=0"):
        backbone.sigmas(4, 0, 64)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        backbone.sigmas(0, 64, 64)
    with pytest.raises(TypeError, match="got one string"):
        backbone.encode(SHORT)
    with pytest.raises(ValueError, match="no prompts"):
        backbone.encode([])


def test_a_truncated_prompt_is_named_once(qwen_folder):
    """F12: what the text encoder cuts off is said, once per prompt."""
    backbone = load_backbone(qwen_folder, max_sequence_length=24)
    with pytest.warns(UserWarning, match="keeps 24 of the .* 'a photo of a green bench") as caught:
        cond = backbone.encode([LONG, SHORT, LONG])
    assert len(caught) == 1 and cond["embeds"].shape[1] == 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone.encode([LONG])
    with pytest.warns(UserWarning, match="a second one"):
        backbone.encode(["a second one, " + LONG])
