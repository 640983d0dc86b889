"""The 2D path for still images gives the video VAE's own numbers, forwards and backwards."""

import copy
import pickle

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage

from cast_rl.backbones.single_frame import SingleFrameCausalConv3d, single_frame_vae

CONFIGS = {
    "still": dict(dim_mult=[1, 2, 2], temperal_downsample=[False, False], z_dim=12),
    "video": dict(dim_mult=[1, 2, 2, 2], temperal_downsample=[False, True, True], z_dim=4),
}


def make_vae(name: str) -> AutoencoderKLQwenImage:
    torch.manual_seed(0)
    config = CONFIGS[name]
    stats = dict(latents_mean=[0.0] * config["z_dim"], latents_std=[1.0] * config["z_dim"])
    return AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, attn_scales=[], **config, **stats)


def reconstruct(vae: AutoencoderKLQwenImage, clip: torch.Tensor) -> torch.Tensor:
    return vae.decode(vae.encode(clip).latent_dist.mode()).sample


@pytest.mark.parametrize("name", CONFIGS)
def test_still_images_and_their_gradients_are_unchanged(name):
    original = make_vae(name)
    fast = single_frame_vae(copy.deepcopy(original))
    images = torch.rand(3, 3, 1, 48, 64) * 2 - 1
    for vae in (original, fast):
        (reconstruct(vae, images) - images).square().mean().backward()
    torch.testing.assert_close(reconstruct(fast, images), reconstruct(original, images), rtol=0, atol=1e-5)
    gradients = {key: p.grad for key, p in original.named_parameters()}
    assert any(g is not None and g.abs().max() > 1e-3 for g in gradients.values())
    for key, p in fast.named_parameters():
        if gradients[key] is None:
            assert p.grad is None, key
        else:
            torch.testing.assert_close(p.grad, gradients[key], rtol=0, atol=1e-5, msg=key)


def test_the_2d_path_is_the_one_taken(monkeypatch):
    fast = single_frame_vae(make_vae("still"))
    monkeypatch.setattr(torch.nn.Conv3d, "forward", lambda *a, **k: pytest.fail("a 3D convolution ran"))
    reconstruct(fast, torch.zeros(1, 3, 1, 16, 16))


def test_a_wrong_slice_would_be_noticed():
    original = make_vae("still")
    fast = single_frame_vae(copy.deepcopy(original))
    for module in fast.modules():
        if isinstance(module, SingleFrameCausalConv3d):
            module.weight.data = module.weight.data.flip(2)
    images = torch.rand(1, 3, 1, 16, 16)
    assert (reconstruct(fast, images) - reconstruct(original, images)).abs().max() > 1e-3


def test_clips_of_several_frames_keep_the_original_path():
    original = make_vae("video")
    fast = single_frame_vae(copy.deepcopy(original))
    clip = torch.rand(1, 3, 5, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(reconstruct(fast, clip), reconstruct(original, clip), rtol=0, atol=1e-5)


def test_copies_pickles_and_state_dicts_survive():
    original = make_vae("still")
    keys = list(original.state_dict())
    fast = single_frame_vae(single_frame_vae(original))
    assert fast is original and list(fast.state_dict()) == keys
    images = torch.rand(1, 3, 1, 16, 16)
    with torch.no_grad():
        expected = reconstruct(fast, images)
        assert torch.equal(reconstruct(copy.deepcopy(fast), images), expected)
        assert torch.equal(reconstruct(pickle.loads(pickle.dumps(fast)), images), expected)


def test_another_vae_is_refused():
    with pytest.raises(TypeError, match="AutoencoderKL"):
        single_frame_vae(AutoencoderKL(block_out_channels=(8,), norm_num_groups=4))
