"""F8 and F9: a group shares one window, and starts from distinct noise unless asked otherwise."""

import torch
from toy import ToyBackbone, toy_policy, toy_training_env

from cast_rl.window import FixedWindow, UniformWindow


def rollout(window, iteration=0, **options):
    backbone = ToyBackbone()
    env = toy_training_env(backbone, window=window, prompts_per_batch=1, group_size=8, **options)
    env.base_env.iteration = iteration
    torch.manual_seed(0)
    with torch.no_grad():
        return env.rollout(10, toy_policy(backbone))


def test_f08_one_window_per_group():
    backbone = ToyBackbone()
    env = toy_training_env(backbone, window=UniformWindow(0, 3, 2), prompts_per_batch=4, group_size=8)
    starts = []
    for _ in range(6):
        with torch.no_grad():
            data = env.rollout(10, toy_policy(backbone))
        assert data.shape == (32, 4)
        groups = data["window_start"].reshape(4, 8 * 4)
        assert (groups == groups[:, :1]).all()
        # The window that is announced is the one in which steps are stochastic.
        stochastic = (data["action_log_prob"] != 0).flatten(2).any(-1)
        assert torch.equal(stochastic, data["in_window"].squeeze(-1))
        first = data["step_index"].squeeze(-1)[:, 1]
        assert torch.equal(first, data["window_start"][:, 0, 0])
        starts += groups[:, 0].tolist()
    assert set(starts) == {0, 1, 2, 3}


def test_f08_the_draw_leaves_the_group_s_rewards_alone():
    for iteration in range(4):
        drawn = rollout(UniformWindow(0, 3, 2), iteration)
        start = int(drawn["window_start"][0, 0])
        fixed = rollout(FixedWindow(start, 2), iteration)
        rewards = [data["next", "reward"][:, -1, 0] for data in (drawn, fixed)]
        assert torch.equal(rewards[0], rewards[1])
        assert rewards[0].var() > 0


def test_f09_eight_distinct_initial_latents():
    latents = rollout((1, 3))["latent"][:, 0]
    distances = torch.cdist(latents.flatten(1), latents.flatten(1)) + 1e3 * torch.eye(8)
    # Independent noise of 48 numbers lies about sqrt(2 * 48) = 10 apart.
    assert distances.min() > 4
    assert rollout((1, 3), iteration=1)["latent"][0, 0].ne(latents[0]).all()


def test_f09_sharing_is_an_option():
    data = rollout((1, 3), share_noise=True)
    assert (data["latent"][:, 0] == data["latent"][:1, 0]).all()
    # What differs is the noise injected in the window.
    assert len(data["action"][:, -1].unique(dim=0)) == 8
