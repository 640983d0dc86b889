import pytest
import torch

from cast_rl.envs import draw_latent_seeds, draw_prompts


def epoch(num_prompts, per_batch, world_size, iterations, seed=0):
    return torch.cat(
        [
            draw_prompts(num_prompts, per_batch, seed=seed, iteration=i, rank=r, world_size=world_size)
            for i in range(iterations)
            for r in range(world_size)
        ]
    )


def test_ranks_share_one_permutation_per_epoch():
    first = epoch(12, 2, world_size=3, iterations=2)
    assert sorted(first.tolist()) == list(range(12))
    assert first.tolist() != list(range(12))
    both = epoch(12, 2, world_size=3, iterations=4)
    assert torch.equal(both[:12], first)
    assert sorted(both[12:].tolist()) == list(range(12))
    assert not torch.equal(both[12:], first)


def test_the_order_does_not_depend_on_how_many_ranks_there_are():
    assert torch.equal(epoch(12, 4, world_size=1, iterations=3), epoch(12, 2, world_size=2, iterations=3))


def test_slices_cross_epochs_and_may_exceed_the_set():
    ids = epoch(5, 4, world_size=1, iterations=5)
    assert torch.equal(ids.bincount(minlength=5), torch.full((5,), 4))
    assert draw_prompts(3, 7, seed=0, iteration=0).bincount().tolist().count(2) == 2


def test_seeds_differ():
    assert not torch.equal(epoch(50, 10, 1, 5, seed=0), epoch(50, 10, 1, 5, seed=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"prompts_per_batch": 0}, "prompts_per_batch=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"iteration": -1}, "iteration=-1"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    options = {"num_prompts": 4, "prompts_per_batch": 2, "seed": 0, "iteration": 0} | options
    with pytest.raises(ValueError, match=message):
        draw_prompts(**options)


def test_latent_seeds_are_distinct_over_rows_iterations_and_ranks():
    seeds = [s for i in range(3) for r in range(2) for s in draw_latent_seeds(2, 4, seed=0, iteration=i, rank=r)]
    assert len(set(seeds)) == 3 * 2 * 8


def test_shared_noise_is_one_seed_per_group():
    own = draw_latent_seeds(2, 3, seed=0, iteration=1)
    shared = draw_latent_seeds(2, 3, seed=0, iteration=1, share_noise=True)
    assert shared == [own[0]] * 3 + [own[3]] * 3
