"""How good the miniature's generator is, measured by the oracle on prompts it never saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from cast_rl.miniature import GUIDANCE, STEPS
from cast_rl.miniature.oracle import check, parse, unrequested
from cast_rl.miniature.render import SIZE
from cast_rl.miniature.vocabulary import difficulty
from cast_rl.scene_graph import SceneGraph


@torch.no_grad()
def generate(
    pipe: QwenImagePipeline,
    texts: Sequence[str],
    seed: int,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    batch: int = 100,
) -> Tensor:
    """The pipeline's own images ``(N, 3, S, S)`` in [0, 1]; image i starts from the noise of seed ``seed + i``."""
    images = []
    for at in range(0, len(texts), batch):
        part = list(texts[at : at + batch])
        out = pipe(
            prompt=part,
            negative_prompt=[" "] * len(part) if guidance > 1 else None,
            true_cfg_scale=guidance,
            height=SIZE,
            width=SIZE,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed + at + i) for i in range(len(part))],
            output_type="pt",
        )
        images.append(out.images.float())
    return torch.cat(images)


def measure(graphs: Sequence[SceneGraph], images: Tensor) -> dict[str, float]:
    """Shares over N prompts with one image each.

    ``all_correct``: every requested fact holds; ``strict``: and there is no unrequested object; ``hard``: all correct,
    on the third of the prompts with most facts; ``atoms``: mean atom score, the scene's included; ``crisp``: share of
    the patches that are clean known shapes; and one entry per skill.
    """
    correct, strict, atom_mean, clean, patches = [], [], [], 0, 0
    skills: dict[str, list[bool]] = defaultdict(list)
    for graph, objects in zip(graphs, parse(images), strict=True):
        atoms = graph.atoms()
        holds = [check(a, objects)[0] for a in atoms]
        for a, h in zip(atoms, holds, strict=True):
            skills[a.skill].append(h)
        correct.append(all(h for a, h in zip(atoms, holds, strict=True) if a.skill != "scene"))
        strict.append(correct[-1] and unrequested(atoms, objects) == 0)
        atom_mean.append(sum(holds) / len(holds))
        clean += sum(o.shape is not None for o in objects)
        patches += len(objects)
    order = sorted(range(len(graphs)), key=lambda i: difficulty(graphs[i]))
    hard = order[len(order) - len(order) // 3 :]

    def share(flags: Sequence[float]) -> float:
        return round(sum(flags) / max(len(flags), 1), 4)

    return {
        "all_correct": share(correct),
        "strict": share(strict),
        "hard": share([correct[i] for i in hard]),
        "atoms": share(atom_mean),
        "crisp": round(clean / max(patches, 1), 4),
        **{skill: share(flags) for skill, flags in sorted(skills.items())},
        "prompts": len(graphs),
    }


def fairness(
    pipe: QwenImagePipeline, graphs: Sequence[SceneGraph], seed: int, base: float, group: int = 16, hard: int = 40
) -> dict[str, float]:
    """Whether the generator is a fair test of credit assignment: what a global move gains, and what varies.

    ``more_guidance`` and ``more_steps``: gain in ``all_correct`` over ``base``, its value at the defaults, at 1.5
    times the guidance and at twice the steps, on the same prompts and noise; ``varied``: share of the atoms of
    ``hard`` hard prompts that hold in some and fail in others of ``group`` images.
    """
    texts = [g.render()[0] for g in graphs]
    guided = measure(graphs, generate(pipe, texts, seed, guidance=1.5 * GUIDANCE))["all_correct"]
    longer = measure(graphs, generate(pipe, texts, seed, steps=2 * STEPS))["all_correct"]
    ordered = sorted(graphs, key=difficulty)[-(len(graphs) // 3) :]
    sample = ordered[:: max(len(ordered) // hard, 1)][:hard]
    images = generate(pipe, [g.render()[0] for g in sample for _ in range(group)], seed + 10**6)
    found = parse(images)
    varied = []
    for i, graph in enumerate(sample):
        for atom in graph.atoms():
            holds = {check(atom, found[i * group + j])[0] for j in range(group)}
            varied.append(len(holds) == 2)
    return {
        "more_guidance": round(guided - base, 4),
        "more_steps": round(longer - base, 4),
        "varied": round(sum(varied) / len(varied), 4),
    }
