"""What an iteration starts from, as pure functions of (seed, iteration, rank): prompts and initial noise."""

import torch
from torch import Tensor

from cast_rl.seeding import derive_seed

PROMPT_STREAM = 0
LATENT_STREAM = 1


def draw_prompts(
    num_prompts: int, prompts_per_batch: int, *, seed: int, iteration: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """The prompt ids of one iteration on one rank, int64 ``(prompts_per_batch,)``.

    All ranks together walk through one random permutation of the prompts per epoch, each taking its own
    slice, so that every prompt is seen once before any is seen twice. A slice that crosses into the next
    epoch may hold a prompt twice.

    Raises:
        ValueError: if a count is not positive, or the rank or iteration is out of range.
    """
    if num_prompts < 1 or prompts_per_batch < 1:
        raise ValueError(f"num_prompts={num_prompts} and prompts_per_batch={prompts_per_batch} must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must lie in [0, world_size={world_size})")
    if iteration < 0:
        raise ValueError(f"iteration={iteration} must be >= 0")
    first = (iteration * world_size + rank) * prompts_per_batch
    positions = torch.arange(first, first + prompts_per_batch)
    epochs = positions // num_prompts
    ids = torch.empty_like(positions)
    for epoch in epochs.unique().tolist():
        generator = torch.Generator().manual_seed(derive_seed(seed, PROMPT_STREAM, epoch))
        order = torch.randperm(num_prompts, generator=generator)
        inside = epochs == epoch
        ids[inside] = order[positions[inside] % num_prompts]
    return ids


def draw_latent_seeds(
    prompts_per_batch: int,
    group_size: int,
    *,
    seed: int,
    iteration: int,
    rank: int = 0,
    share_noise: bool = False,
) -> list[int]:
    """One seed per row for its initial noise; with ``share_noise`` one per group, repeated over its rows.

    Returns:
        ``prompts_per_batch * group_size`` integers, rows of a group next to each other.
    """
    rows = range(prompts_per_batch * group_size)
    if share_noise:
        rows = [row // group_size * group_size for row in rows]
    return [derive_seed(seed, LATENT_STREAM, iteration, rank, row) for row in rows]
