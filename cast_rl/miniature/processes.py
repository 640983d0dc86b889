"""What the miniature's pretraining needs of a ``torchrun`` group; all of it also works in a single process."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are; ``(0, 1)`` outside a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def step_bar(name: str, done: int, steps: int, seconds: float) -> tqdm:
    """The steps that are left, with a progress bar in the first process, drawn anew every so many seconds."""
    rank, _ = rank_and_world()
    return tqdm(range(done, steps), desc=name, initial=done, total=steps, mininterval=seconds, disable=rank > 0)


def wait_for_all() -> None:
    """Returns when every process of the group has come here."""
    if dist.is_initialized():
        dist.barrier()


def average_gradients(parameters: list[Tensor]) -> None:
    """Average gradients over the processes of a group, in one message; nothing to do for a single process."""
    if not dist.is_initialized():
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), grads)
