"""The training loop of the miniature's generator and judge: Muon and AdamW, averaged weights, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torchrl.checkpoint import Checkpoint

from cast_rl.miniature.muon import BatchedMuon
from cast_rl.miniature.processes import average_gradients, rank_and_world, step_bar
from cast_rl.miniature.schedule import rate

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Recipe:
    """How a model is fitted.

    Args:
        steps: of the whole training; the learning rates follow it, see `cast_rl.miniature.schedule.rate`.
        save_every: steps from one checkpoint to the next; there is one at the end, too.
        adam_rate, muon_rate: largest learning rates.
        ema_decay: of the averaged weights; less during the first steps.
    """

    steps: int
    save_every: int = 250
    adam_rate: float = 2e-3
    muon_rate: float = 2e-2
    ema_decay: float = 0.996


def fit(
    model: Model,
    matrices: Sequence[Tensor],
    rest: Sequence[Tensor],
    terms_of_step: Callable[[int], dict[str, Tensor]],
    recipe: Recipe,
    folder: Path,
) -> Model:
    """Train, or go on training, ``model``; the checkpoint is ``folder``. Returns a copy with the averaged weights.

    In a ``torchrun`` group each process computes the terms of its share of a step and gradients are averaged.

    Args:
        model: what is trained, in place.
        matrices: its parameters for Muon.
        rest: its other trained parameters, for AdamW. All processes must give the same ones a gradient.
        terms_of_step: a step's terms of the loss, which is their sum; the progress bar shows each. Torch's global
            generator is seeded by step and process beforehand; whatever else is random must be a function of the step
            too, so that a resumed run repeats an uninterrupted one.
        recipe: see :class:`Recipe`.
        folder: its name is shown by the progress bar.
    """
    rank, world = rank_and_world()
    matrices, rest = list(matrices), list(rest)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    muon = BatchedMuon(matrices, recipe.muon_rate)
    adam = torch.optim.AdamW(rest, recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    progress = {"step": 0}
    checkpoint = Checkpoint(model=model, average=average, muon=muon, adam=adam, progress=progress)
    if folder.exists():
        checkpoint.load(folder)
    bar = step_bar(folder.name, progress["step"], recipe.steps, seconds=10)
    shown: dict[str, float] = {}
    for step in bar:
        torch.manual_seed(step * world + rank)
        terms = terms_of_step(step)
        sum(terms.values()).backward()
        average_gradients(matrices + rest)
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, base in ((muon, recipe.muon_rate), (adam, recipe.adam_rate)):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(step / recipe.steps, step)
            optimizer.step()
            optimizer.zero_grad()
        decay = min(recipe.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        shown = {name: 0.98 * shown.get(name, term.item()) + 0.02 * term.item() for name, term in terms.items()}
        bar.set_postfix({name: f"{value:.4f}" for name, value in shown.items()}, refresh=False)
        if rank == 0 and ((step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps):
            progress["step"] = step + 1
            checkpoint.save(folder)
    return average
