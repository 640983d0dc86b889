"""The images that the miniature's judge learns from: rendered scenes and the generator's own samples.

Samples come as the generator draws them for evaluation and as it draws them in reinforcement learning, with
stochastic steps; both show what renders never do. What is in an image is what the oracle finds there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from cast_rl.backbones import Backbone, load_backbone
from cast_rl.miniature import GUIDANCE, STEPS
from cast_rl.miniature.oracle import Found, parse
from cast_rl.miniature.processes import rank_and_world, wait_for_all
from cast_rl.miniature.render import SIZE, render_graphs
from cast_rl.miniature.vocabulary import COLORS, SHAPES, TEST_GROUPS, sample_graphs, training_graphs
from cast_rl.prompt_bank import PromptBank
from cast_rl.scene_graph import SceneGraph
from cast_rl.transitions import ode_step, transition_mean_std

MOST_OBJECTS = 20  # an image with more patches than this is left out
RENDER_GROUPS = (0.15, 0.5, 0.35)  # weights of one, two and three groups
ROLLOUT_STEPS, ROLLOUT_WINDOW, ROLLOUT_NOISE = 6, (1, 3), 0.6  # as examples/train_cast.py rolls out, with CPS steps


@dataclass(frozen=True)
class Source:
    """Where images come from: ``kind`` is ``"render"``, ``"sample"`` or ``"rollout"``; ``chunks`` of ``size`` each."""

    kind: str
    chunks: int
    size: int


SOURCES = (Source("render", 12, 1500), Source("sample", 8, 500), Source("rollout", 8, 500))


def prompts_of(kind: str, index: int, size: int) -> list[SceneGraph]:
    """The scene graphs of one chunk, none of them held out for evaluation."""
    seed = 50_000_000 + index
    if kind != "render":
        return sample_graphs(size, seed + (500 if kind == "sample" else 0), held_out=False, groups=TEST_GROUPS)
    return training_graphs(size, random.Random(seed), RENDER_GROUPS)


@torch.no_grad()
def draw(backbone: Backbone, texts: list[str], seed: int, *, rollout: bool, batch: int = 100) -> Tensor:
    """The generator's images ``(N, 3, S, S)`` in [0, 1], from the noise of seeds ``seed + i``.

    Without ``rollout`` they are the pipeline's own; with it they are those of a rollout of reinforcement learning.
    """
    steps = ROLLOUT_STEPS if rollout else STEPS
    window = range(*ROLLOUT_WINDOW) if rollout else range(0)
    sigmas = backbone.sigmas(steps, SIZE, SIZE)
    g = torch.Generator().manual_seed(seed)
    bank = PromptBank.encode(backbone, texts)
    images = []
    for at in range(0, len(texts), batch):
        rows = torch.arange(at, min(at + batch, len(texts)))
        x = backbone.initial_latents((seed + rows).tolist(), SIZE, SIZE)
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            velocity = backbone.velocity(x, sigma, *bank(rows))
            if step in window:
                mean, std = transition_mean_std("cps", x, velocity, sigma, sigma_next, ROLLOUT_NOISE, sigmas[1])
                x = mean + std * torch.randn(x.shape, generator=g)
            else:
                x = ode_step(x, velocity, sigma, sigma_next)
        images.append(backbone.decode(x))
    return torch.cat(images)


def label(images: Tensor) -> dict[str, Tensor]:
    """What the oracle finds in ``images (N, 3, S, S)`` in [0, 1].

    Returns:
        pixels: ``(N, 3, S, S)`` uint8.
        objects: ``(N, M, 4)`` float32: shape (:data:`SHAPES`' length for none of them), colour, x and y in pixels; -1
            beyond an image's objects.
        regions: ``(N, S, S)`` uint8: 1 + the object that a pixel shows, or 0.
        kept: ``(N,)`` bool, False for an image with more than :data:`MOST_OBJECTS` objects.
    """
    pixels = (images.clamp(0, 1) * 255).round().byte().contiguous()
    objects = torch.full((len(images), MOST_OBJECTS, 4), -1.0)
    regions = np.zeros((len(images), SIZE, SIZE), dtype=np.uint8)
    kept = torch.ones(len(images), dtype=torch.bool)
    for n, found in enumerate(parse(pixels / 255)):
        kept[n] = len(found) <= MOST_OBJECTS
        for m, o in enumerate(found[:MOST_OBJECTS]):
            shape = len(SHAPES) if o.shape is None else SHAPES.index(o.shape)
            objects[n, m] = torch.tensor([shape, COLORS.index(o.color), o.x, o.y])
            regions[n][o.mask] = m + 1
    return {"pixels": pixels, "objects": objects, "regions": torch.from_numpy(regions), "kept": kept}


def found_in(objects: Tensor) -> list[Found]:
    """One image's ``objects (M, 4)`` of :func:`label`, without areas, fits and masks, which no fact depends on."""
    out = []
    for shape, color, x, y in objects[objects[:, 0] >= 0].tolist():
        name = SHAPES[int(shape)] if shape < len(SHAPES) else None
        out.append(Found(name, COLORS[int(color)], x, y, area=0.0, iou=0.0, fits=(), mask=np.zeros(0, dtype=bool)))
    return out


@dataclass
class Images:
    """The images of one kind of source: the tensors of :func:`label`, kept ones only, and each image's prompt."""

    pixels: Tensor
    objects: Tensor
    regions: Tensor
    prompts: list[SceneGraph]


def make_chunk(backbone: Backbone | None, kind: str, index: int, size: int) -> dict[str, Tensor]:
    """One chunk of images of a source, labelled; renders need no backbone."""
    graphs = prompts_of(kind, index, size)
    seed = 60_000_000 + 10_000 * index + (5_000_000 if kind == "rollout" else 0)
    if kind == "render":
        return label(render_graphs(graphs, seed))
    return label(draw(backbone, [g.render()[0] for g in graphs], seed, rollout=kind == "rollout"))


def judge_images(generator: Path, folder: Path, sources: tuple[Source, ...] = SOURCES) -> dict[str, Images]:
    """The images of all sources by kind; made once, by all processes together, and kept in ``folder``."""
    rank, world = rank_and_world()
    # Samples first and in turns, so that all processes have about as much to do.
    parts = [(s, i, folder / f"{s.kind}{i:03d}.safetensors") for s in reversed(sources) for i in range(s.chunks)]
    missing = [part for part in parts[rank::world] if not part[2].exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = any(source.kind != "render" for source, _, _ in missing)
        backbone = load_backbone(generator, guidance=GUIDANCE) if drawn else None
        for source, index, path in tqdm(missing, desc="images for the judge", mininterval=5, disable=rank > 0):
            save_file(make_chunk(backbone, source.kind, index, source.size), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    wait_for_all()
    out = {}
    for source in sources:
        chunks = [load_file(path) for s, _, path in parts if s == source]
        joined = {k: torch.cat([c[k] for c in chunks]) for k in chunks[0]}
        kept = joined.pop("kept")
        graphs = [g for i in range(source.chunks) for g in prompts_of(source.kind, i, source.size)]
        prompts = [g for g, k in zip(graphs, kept.tolist(), strict=True) if k]
        out[source.kind] = Images(**{k: v[kept] for k, v in joined.items()}, prompts=prompts)
    return out
