import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from toy import NUM_PROMPTS, SHAPE, ToyBackbone, ToyBank, toy_env, toy_policy, toy_training_env

from cast_rl.envs import DenoisingEnv, draw_prompts
from cast_rl.transitions import ode_step
from cast_rl.window import UniformWindow

# No transition injects noise into the last step, so a stochastic window ends before it.
WINDOWS = {"start": (0, 2), "middle": (1, 3), "end": (3, 5), "all": (0, 5), "random": UniformWindow(0, 3, 2)}


def ode_images(backbone, latent, prompt_id, steps=6):
    """All steps of the ODE in one loop, decoded."""
    sigmas = backbone.sigmas(steps, 8, 8)
    cond, _ = ToyBank()(prompt_id)
    with torch.no_grad():
        for i in range(steps):
            latent = ode_step(
                latent,
                backbone.velocity(latent, sigmas[i].expand(len(latent)), cond),
                sigmas[i],
                sigmas[i + 1],
            )
    return backbone.decode(latent)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("transition", ["ode", "cps", "flow_sde", "dance_sde"])
def test_specs(window, transition):
    check_env_specs(toy_env(window=window, transition=transition, a=0.3), break_when_any_done="both")


@pytest.mark.parametrize("window", [*WINDOWS.values(), (4, 6), (0, 6)], ids=[*WINDOWS, "last", "whole"])
def test_a_deterministic_rollout_gives_the_ode_s_images_at_one_evaluation_per_step(window):
    backbone = ToyBackbone()
    env = toy_env(backbone, window=window, transition="ode")
    with torch.no_grad():
        data = env.rollout(100, toy_policy(backbone, transition="ode"))
    assert data.shape == (8, env.episode_length)
    assert sum(backbone.transformer.evaluated_rows) == 8 * 6
    if window is not WINDOWS["random"]:
        assert len(backbone.transformer.evaluated_rows) == 6
    expected = ode_images(backbone, data["latent"][:, 0], data["prompt_id"][:, 0])
    torch.testing.assert_close(data["next", "pixels"][:, -1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["cps", "flow_sde", "dance_sde"])
def test_deterministic_exploration_of_a_stochastic_policy_too(kind):
    backbone = ToyBackbone()
    env = toy_env(backbone, transition=kind, a=0.5)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(100, toy_policy(backbone, transition=kind, a=0.5))
    expected = ode_images(backbone, data["latent"][:, 0], data["prompt_id"][:, 0])
    torch.testing.assert_close(data["next", "pixels"][:, -1], expected, rtol=0, atol=1e-5)


def test_the_books_of_an_episode():
    backbone = ToyBackbone()
    with torch.no_grad():
        data = toy_env(backbone, window=(2, 4)).rollout(100, toy_policy(backbone))
    assert data["step_index"][0].flatten().tolist() == [0, 2, 3, 4]
    assert data["next_index"][0].flatten().tolist() == [2, 3, 4, 6]
    assert data["in_window"][0].flatten().tolist() == [False, True, True, False]
    assert data["next", "done"][0].flatten().tolist() == [False] * 3 + [True]
    assert data["next", "terminated"].equal(data["next", "done"])
    assert torch.equal(data["next", "latent"], data["action"])
    assert torch.equal(data["latent"][:, 1:], data["action"][:, :-1])
    assert (data["action_log_prob"][:, [0, 3]] == 0).all()
    assert (data["action_log_prob"][:, 1:3] != 0).all()
    assert (data["next", "pixels"][:, :-1] == 0).all()
    torch.testing.assert_close(data["next", "pixels"][:, -1], backbone.decode(data["action"][:, -1]))
    root = {"latent", "step_index", "next_index", "window_start", "in_window", "prompt_id", "group_id"}
    assert root | {"action", "action_log_prob", "done", "terminated", "next"} == set(data.keys())


@pytest.mark.parametrize("window", [(0, 2), (3, 5), (0, 5)], ids=["start", "end", "all"])
def test_windows_at_the_ends_of_the_schedule(window):
    backbone = ToyBackbone()
    with torch.no_grad():
        data = toy_env(backbone, window=window).rollout(100, toy_policy(backbone))
    assert data.shape == (8, window[1] - window[0] + 2)
    inside = data["in_window"][0].flatten()
    assert data["step_index"][0].flatten()[inside].tolist() == list(range(*window))
    assert sum(backbone.transformer.evaluated_rows) == 8 * 6


def test_collector_draws_whole_iterations_in_order():
    backbone = ToyBackbone()
    env = toy_env(backbone)
    frames = 8 * env.episode_length
    collector = Collector(
        env,
        toy_policy(backbone),
        frames_per_batch=frames,
        total_frames=3 * frames,
        auto_register_policy_transforms=False,
    )
    for iteration, data in enumerate(collector):
        assert data.shape == (8, env.episode_length)
        assert data["next", "done"][:, -1].all()
        prompts = draw_prompts(NUM_PROMPTS, 2, seed=0, iteration=iteration).repeat_interleave(4)
        assert torch.equal(data["prompt_id"][:, 0, 0], prompts)
        groups = torch.tensor([0, 1]).repeat_interleave(4) + 2 * iteration
        assert torch.equal(data["group_id"][:, :, 0], groups.unsqueeze(-1).expand(-1, env.episode_length))
    collector.shutdown()


def test_a_collector_sees_new_weights():
    backbone = ToyBackbone()
    env = toy_env(backbone, transition="ode")
    policy = toy_policy(backbone, transition="ode")
    collector = Collector(env, policy, frames_per_batch=32, total_frames=64, auto_register_policy_transforms=False)
    for data in collector:
        expected = ode_images(backbone, data["latent"][:, 0], data["prompt_id"][:, 0])
        torch.testing.assert_close(data["next", "pixels"][:, -1], expected, rtol=0, atol=1e-5)
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(0.5)
    collector.shutdown()


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["bare", "transformed"])
def test_the_caller_chooses_prompts(wrap):
    backbone = ToyBackbone()
    env = wrap(toy_env(backbone))
    chosen = torch.tensor([3, 3]).repeat_interleave(4).unsqueeze(-1)
    start = env.reset(TensorDict(prompt_id=chosen, batch_size=[8]), set_state=True)
    assert torch.equal(start["prompt_id"], chosen)
    with torch.no_grad():
        data = env.rollout(100, toy_policy(backbone), tensordict=start, auto_reset=False)
    assert (data["prompt_id"] == 3).all()
    # One prompt twice is two groups, with noise of their own.
    assert data["group_id"][:, 0].unique().numel() == 2
    assert len(data["latent"][:, 0].unique(dim=0)) == 8
    # A reset that does not choose draws again.
    assert torch.equal(env.reset()["prompt_id"][::4, 0], draw_prompts(NUM_PROMPTS, 2, seed=0, iteration=1))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([9] * 8, "prompt_id 9"), ([-1] * 8, "prompt_id -1"), ([0, 1] * 4, r"group 0 .*\[0, 1\]")],
)
def test_prompts_that_cannot_be_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        toy_env().reset(TensorDict(prompt_id=torch.tensor(ids).unsqueeze(-1), batch_size=[8]), set_state=True)


def test_partial_reset_starts_new_groups_and_leaves_the_rest_alone():
    backbone = ToyBackbone()
    env, policy = toy_env(backbone), toy_policy(backbone)
    with torch.no_grad():
        data = policy(env.reset())
        data = env.step_mdp(env.step(data))
        mask = torch.tensor([True] * 4 + [False] * 4).unsqueeze(-1)
        mixed = env.reset(data.clone().set("_reset", mask))
    assert mixed["step_index"].flatten().tolist() == [0] * 4 + [1] * 4
    assert mixed["group_id"].flatten().tolist() == [2] * 4 + [1] * 4
    assert torch.equal(mixed["latent"][4:], data["latent"][4:])
    fresh = env.reset()
    env.iteration = 1
    assert torch.equal(mixed["latent"][:4], env.reset()["latent"][:4])
    assert not torch.equal(mixed["latent"][:4], fresh["latent"][:4])
    # Rows go on out of step, and each is done in its own time.
    done_at = torch.full((8,), -1)
    td = mixed.exclude("_reset")
    with torch.no_grad():
        for t in range(env.episode_length):
            stepped = env.step(policy(td))
            done = stepped["next", "done"].flatten()
            done_at = torch.where(done & (done_at < 0), t, done_at)
            images = stepped["next", "pixels"].flatten(1).abs().sum(1) > 0
            assert torch.equal(images, done)
            td = env.step_mdp(stepped)
            if t == 2:
                td = env.reset(td.set("_reset", done.unsqueeze(-1))).exclude("_reset")
    assert done_at.tolist() == [3] * 4 + [2] * 4


def test_reset_of_no_row_changes_nothing():
    env = toy_env()
    start = env.reset()
    again = env.reset(start.clone().set("_reset", torch.zeros(8, 1, dtype=torch.bool)))
    assert torch.equal(again["latent"], start["latent"])
    assert torch.equal(again["group_id"], start["group_id"])


def test_a_group_of_one():
    backbone = ToyBackbone()
    env = toy_training_env(backbone, group_size=1, prompts_per_batch=3)
    check_env_specs(env)
    with torch.no_grad():
        data = env.rollout(10, toy_policy(backbone))
    assert data["group_id"][:, 0].unique().numel() == 3


def test_ranks_draw_disjoint_prompts_noise_and_groups():
    starts = [toy_env(rank=rank, world_size=2).reset() for rank in range(2)]
    prompts = [start["prompt_id"][::4, 0].tolist() for start in starts]
    assert len({*prompts[0], *prompts[1]}) == 4
    assert len(torch.cat([start["latent"] for start in starts]).unique(dim=0)) == 16
    environments = [toy_env(rank=rank, world_size=2) for rank in range(2)]
    groups = torch.cat([env.reset()["group_id"] for _ in range(3) for env in environments])
    assert groups.unique().numel() == 3 * 2 * 2
    assert groups.dtype == torch.int64


def test_seed_and_iteration_give_everything():
    env = toy_env(window=UniformWindow(0, 3, 2), seed=5)
    first = [env.reset() for _ in range(4)]
    env.iteration = 2
    assert (env.reset() == first[2]).all()
    env.set_seed(5)
    assert (env.reset() == first[0]).all()
    assert env.iteration == 1
    env.set_seed(6)
    assert not torch.equal(env.reset()["latent"], first[0]["latent"])
    with pytest.raises(ValueError, match="iteration=-1"):
        env.iteration = -1


def plain_options():
    backbone = ToyBackbone()
    return {
        "sigmas": torch.tensor([1.0, 0.7, 0.3, 0.0]),
        "latent_shape": SHAPE,
        "decode": backbone.decode,
        "initial_latents": lambda seeds: backbone.initial_latents(seeds, 8, 8),
        "num_prompts": 4,
        "image_shape": (3, 8, 8),
        "prompts_per_batch": 2,
        "group_size": 2,
        "window": (0, 1),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (2, 2)}, "at least one step"),
        ({"window": (1, 4)}, "leaves the schedule"),
        ({"window": (2, 3)}, "must not take"),
        ({"window": UniformWindow(0, 2, 1)}, "2 to 2 .* must not take"),
        ({"sigmas": torch.tensor([1.0, 0.5, 0.1])}, "fall strictly to 0"),
        ({"sigmas": torch.tensor([0.5, 1.0, 0.0])}, "fall strictly to 0"),
        ({"group_size": 0}, "group_size=0"),
        ({"prompts_per_batch": 0}, "prompts_per_batch=0"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"rank": 1}, "rank=1"),
        ({"transition": "sde"}, "'sde'"),
        ({"seed": -1}, "-1"),
    ],
)
def test_what_cannot_work_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        DenoisingEnv(**plain_options() | options)


def test_wrong_shapes_of_the_callables_are_named():
    env = DenoisingEnv(**plain_options() | {"initial_latents": lambda seeds: torch.zeros(len(seeds), 1, 4, 4)})
    with pytest.raises(ValueError, match=r"\(4, 1, 4, 4\), expected \(4, 3, 4, 4\)"):
        env.reset()
    env = DenoisingEnv(**plain_options() | {"image_shape": (3, 16, 16)})
    with pytest.raises(ValueError, match=r"\(3, 8, 8\), image_shape is \(3, 16, 16\)"):
        env.rollout(10)


def test_a_sampler_that_leaves_its_promise_is_caught_at_the_draw():
    class Loose(UniformWindow):
        def __call__(self, seed, iteration, group):
            return 5

    with pytest.raises(ValueError, match="5 to 6 leaves"):
        toy_env(window=Loose(0, 1, 2)).reset()


def test_it_pickles_and_holds_no_parameters():
    env = toy_env()
    assert list(env.parameters()) == []
    assert not any(isinstance(m, torch.nn.Conv2d) for m in env.modules())
    clone = pickle.loads(pickle.dumps(env))
    assert (clone.reset() == env.reset()).all()
