"""The words of the miniature's world and how its prompts are sampled, with combinations held out for evaluation."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import combinations

from cast_rl.scene_graph import Entity, Relation, SceneGraph

COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "right of", "above", "below")
MAX_OBJECTS = 4
HELD_OUT_PERCENT = 15

# Weights of the number of groups (1, 2, 3) in a prompt. Training prompts are mostly simpler than those asked later,
# as captions of the web are, so that what the generator gets wrong is how things combine.
TRAIN_GROUPS = (0.35, 0.5, 0.15)
TEST_GROUPS = (0.0, 0.7, 0.3)
# How often the first two groups are related.
TRAIN_RELATED, TEST_RELATED = 0.75, 1.0


def is_held_out(graph: SceneGraph) -> bool:
    """Whether a prompt asks for a pair of kinds (colour and shape) that never occurs in a training prompt."""
    kinds = sorted(f"{e.attributes[0]} {e.noun}" for e in graph.entities if e.attributes)
    return any(zlib.crc32(f"{a}|{b}".encode()) % 100 < HELD_OUT_PERCENT for a, b in combinations(kinds, 2))


def sample_graph(
    rng: random.Random, groups: Sequence[float] = TRAIN_GROUPS, related: float = TRAIN_RELATED
) -> SceneGraph:
    """One scene graph of one to three groups and at most :data:`MAX_OBJECTS` objects.

    Args:
        rng: the source of randomness.
        groups: weights of one, two and three groups.
        related: how often the first two groups are related.
    """
    while True:
        n = rng.choices((1, 2, 3), groups)[0]
        counts = [rng.choices((1, 2, 3, 4), (4, 3, 2, 1) if n > 1 else (1, 1, 1, 1))[0] for _ in range(n)]
        kinds = [(rng.choice(COLORS), rng.choice(SHAPES)) for _ in range(n)]
        if sum(counts) > MAX_OBJECTS or len(set(kinds)) < n:
            continue
        relations = (Relation(0, rng.choice(RELATIONS), 1),) if n > 1 and rng.random() < related else ()
        return SceneGraph(
            tuple(Entity(shape, count, (color,)) for count, (color, shape) in zip(counts, kinds, strict=True)),
            relations,
            closed=True,
        )


def sample_graphs(
    n: int, seed: int, *, held_out: bool, groups: Sequence[float] = TEST_GROUPS, related: float = TEST_RELATED
) -> list[SceneGraph]:
    """``n`` scene graphs without duplicates, all held out or none.

    Raises:
        ValueError: so few graphs exist that ``n`` different ones were not found.
    """
    rng = random.Random(seed)
    found: dict[SceneGraph, None] = {}
    for _ in range(200 * n + 1000):
        graph = sample_graph(rng, groups, related)
        if is_held_out(graph) == held_out:
            found.setdefault(graph)
        if len(found) == n:
            return list(found)
    raise ValueError(f"found only {len(found)} different prompts of the {n} asked for; ask for fewer")


def difficulty(graph: SceneGraph) -> tuple[int, int]:
    """Orders prompts from easy to hard: by the number of facts, then of objects. The last third is "hard"."""
    return len(graph.atoms()), sum(e.count or 0 for e in graph.entities)
