"""Measuring a model's structure profile: ODE rollouts whose every step is decoded and judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from cast_rl.backbones.base import Backbone
from cast_rl.judges import Judge, ask
from cast_rl.prompt_bank import PromptBank
from cast_rl.prompts import Prompt
from cast_rl.sampling import ode_rollout
from cast_rl.transitions import tweedie
from cast_rl.window.key import dependencies
from cast_rl.window.profile import StructureProfile, digest
from cast_rl.window.similarity import low_pass, structural_similarity

THUMBNAIL = 96
"""Pixels of the shorter side of a picture in the strip, at most."""

Measured = dict[str, Tensor]


@torch.no_grad()
def measure_structure(
    backbone: Backbone,
    judge: Judge,
    prompts: Sequence[Prompt],
    steps: int,
    *,
    height: int,
    width: int,
    negative_prompt: str | None = " ",
    seed: int = 0,
    batch_size: int = 32,
    strip: int = 4,
    cache: str | Path | None = None,
) -> StructureProfile:
    """One deterministic image per prompt; at every step the estimate of the clean image is decoded and judged.

    Prompt i starts from the noise of seed ``seed + i``, and a judge sees a batch once per step. Torch's global random
    state is neither read nor changed here.

    Args:
        backbone: with the weights as they are now.
        judge: of the atoms; see `cast_rl.judges.ask`.
        prompts: at least two, each with atoms.
        steps: denoising steps, T.
        height, width: pixels.
        negative_prompt: used where the backbone's guidance needs one.
        seed: of the noise.
        batch_size: images at a time.
        strip: of how many prompts, the first ones, small pictures are kept.
        cache: folder. Every finished batch is kept there, under a key made of all that it depends on, and found again:
            by a run that goes on after a kill, and by all later ones with the same key.

    Raises:
        ValueError: fewer than two prompts, or a prompt without atoms.
    """
    prompts = list(prompts)
    bare = [p.text for p in prompts if not p.atoms]
    if len(prompts) < 2 or bare or batch_size < 1:
        what = f"{bare[0]!r} has none" if bare else f"got {len(prompts)} and batch_size={batch_size}"
        raise ValueError(f"a profile needs two or more prompts with atoms and a batch_size of at least 1; {what}")
    settings = {"height": height, "width": width, "steps": steps, "negative_prompt": negative_prompt, "seed": seed}
    depends = dependencies(backbone, judge, prompts, **settings)
    key = digest(depends)
    bank: PromptBank | None = None
    batches = []
    for at in tqdm(range(0, len(prompts), batch_size), desc="structure", leave=False):
        rows = range(at, min(at + batch_size, len(prompts)))
        pictured = len([i for i in rows if i < strip])
        path = None if cache is None else Path(cache) / key / f"{rows.start}-{rows.stop}-{pictured}.safetensors"
        batch = None if path is None else _load(path, key)
        if batch is None:
            if bank is None:
                bank = PromptBank.encode(backbone, [p.text for p in prompts], negative_prompt)
            batch = _measure_batch(backbone, judge, prompts, rows, bank, settings, pictured)
            if path is not None:
                _save(batch, path, key)
        batches.append(batch)
    measured = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    low = measured["low"]
    final = low[:, -1]
    return StructureProfile(
        depends=depends,
        sigmas=backbone.sigmas(steps, height, width).cpu(),
        texts=[p.text for p in prompts],
        skills=[[atom.skill for atom in p.atoms] for p in prompts],
        holds=measured["holds"],
        similarity=torch.stack([structural_similarity(low[:, t], final) for t in range(steps)], 1).float(),
        similarity_by_chance=structural_similarity(final, final.roll(1, 0)).mean().item(),
        strip=measured["strip"],
    )


def _measure_batch(
    backbone: Backbone,
    judge: Judge,
    prompts: Sequence[Prompt],
    rows: range,
    bank: PromptBank,
    settings: dict,
    pictured: int,
) -> Measured:
    """``holds (b, K, T)`` int8, ``low (b, T, 3, l, l)`` and, of the first rows, ``strip (n, T, 3, h, w)`` uint8."""
    height, width, most = settings["height"], settings["width"], max(len(p.atoms) for p in prompts)
    holds, low, strip = [], [], []

    def see(step: int, x: Tensor, sigma: Tensor, velocity: Tensor) -> None:
        pixels = backbone.decode(tweedie(x, velocity, sigma))
        judged = ask(judge, pixels, [prompts[i].atoms for i in rows], most)
        holds.append(torch.where(judged.mask, judged.scores > 0.5, -1).to(torch.int8).cpu())
        low.append(low_pass(pixels).cpu())
        strip.append(_thumbnails(pixels[:pictured]).cpu())

    ids = torch.arange(rows.start, rows.stop, device=backbone.device)
    x = backbone.initial_latents([settings["seed"] + i for i in rows], height, width)
    size = {"steps": settings["steps"], "height": height, "width": width}
    ode_rollout(backbone, x, *bank(ids), **size, callback=see)
    return {"holds": torch.stack(holds, -1), "low": torch.stack(low, 1), "strip": torch.stack(strip, 1)}


def _thumbnails(pixels: Tensor) -> Tensor:
    """``(n, 3, H, W)`` in [0, 1] to uint8, no larger than :data:`THUMBNAIL` along the shorter side."""
    scale = min(1.0, THUMBNAIL / min(pixels.shape[-2:]))
    size = [max(1, round(side * scale)) for side in pixels.shape[-2:]]
    small = F.interpolate(pixels, size, mode="area") if len(pixels) else pixels.new_empty(0, 3, *size)
    return (small * 255).round().to(torch.uint8)


def _save(batch: Measured, path: Path, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    save_file({name: value.contiguous() for name, value in batch.items()}, part, metadata={"key": key})
    # In one piece or not at all: a run killed while it writes leaves no half a batch to be found.
    os.replace(part, path)


def _load(path: Path, key: str) -> Measured | None:
    """What `_save` wrote, or None where there is nothing of this key."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") != key:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}
