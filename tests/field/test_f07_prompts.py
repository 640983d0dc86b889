"""F7: prompts are a pure function of seed, iteration and rank, however they are collected."""

import functools
import sys

import pytest
import torch
from torchrl.collectors import Collector
from toy import NUM_PROMPTS, ToyBackbone, toy_env, toy_policy

from cast_rl.envs import draw_prompts

SEED = 11


def expected(iteration, rank=0, world_size=1):
    ids = draw_prompts(NUM_PROMPTS, 2, seed=SEED, iteration=iteration, rank=rank, world_size=world_size)
    return ids.repeat_interleave(2).tolist()


def collect(env, iterations):
    """The prompts of each batch of a single-process collector."""
    frames = env.batch_size[0] * env.episode_length
    collector = Collector(
        env,
        toy_policy(ToyBackbone()),
        frames_per_batch=frames,
        total_frames=iterations * frames,
        auto_register_policy_transforms=False,
    )
    prompts = [data["prompt_id"][:, 0, 0].tolist() for data in collector]
    collector.shutdown()
    return prompts


def test_f07_ten_iterations_and_a_resumed_run():
    env = toy_env(group_size=2, seed=SEED)
    prompts = collect(env, 10)
    assert prompts == [expected(i) for i in range(10)]
    assert len({tuple(p) for p in prompts}) > 5
    resumed = toy_env(group_size=2, seed=SEED)
    resumed.iteration = 5
    assert collect(resumed, 5) == prompts[5:]


def test_f07_resumed_noise_and_groups_agree_too():
    env = toy_env(seed=SEED)
    starts = [env.reset() for _ in range(7)]
    resumed = toy_env(seed=SEED)
    resumed.iteration = 5
    for start in starts[5:]:
        assert (resumed.reset() == start).all()


def rank_env(rank, iteration):
    torch.set_num_threads(1)
    env = toy_env(group_size=2, seed=SEED, rank=rank, world_size=2)
    env.iteration = iteration
    return env


@pytest.fixture
def forked_workers():
    """Workers that start with what is imported already; spawning them takes half a minute on a busy core."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.parametrize("first", [0, 5])
def test_f07_two_worker_processes(first, forked_workers):
    frames = 4 * 4
    collector = Collector(
        [functools.partial(rank_env, rank, first) for rank in range(2)],
        policy_factory=functools.partial(toy_policy, ToyBackbone()),
        frames_per_batch=2 * frames,
        total_frames=2 * frames * 5,
        backend="process",
        sync=True,
        cat_results="stack",
        auto_register_policy_transforms=False,
    )
    try:
        for iteration, data in enumerate(collector, start=first):
            for rank in range(2):
                assert data["prompt_id"][rank, :, 0, 0].tolist() == expected(iteration, rank, world_size=2)
    finally:
        collector.shutdown()
    assert iteration == first + 4
