"""The words of the miniature's world and how its prompts are sampled, with combinations held out for evaluation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cast_rl.prompts import sampler
from cast_rl.prompts.sampler import Mixture, draw
from cast_rl.prompts.vocabulary import Predicate, Vocabulary
from cast_rl.scene_graph import SceneGraph

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


VOCABULARY = Vocabulary(
    nouns={"shape": SHAPES},
    attributes={"color": COLORS},
    relations=tuple(map(Predicate, RELATIONS)),
    counts=tuple(range(2, MAX_OBJECTS + 1)),
    max_objects=MAX_OBJECTS,
    closed=True,
    held_out_pairs="kinds",
    held_out_percent=HELD_OUT_PERCENT,
)


def is_held_out(graph: SceneGraph) -> bool:
    """Whether a prompt asks for a pair of kinds (colour and shape) that never occurs in a training prompt."""
    return VOCABULARY.is_held_out(graph)


def _mixture(groups: Sequence[float], related: float) -> Mixture:
    return Mixture(VOCABULARY, groups, counts=(4, 3, 2, 1), counts_alone=(1, 1, 1, 1), related=related)


def sample_graph(
    rng: random.Random, groups: Sequence[float] = TRAIN_GROUPS, related: float = TRAIN_RELATED
) -> SceneGraph:
    """One scene graph of one to three groups and at most :data:`MAX_OBJECTS` objects.

    Args:
        rng: the source of randomness.
        groups: weights of one, two and three groups.
        related: how often the first two groups are related.
    """
    layout = _mixture(groups, related)
    while (graph := draw(rng, VOCABULARY, layout)) is None:
        continue
    return graph


def training_graphs(n: int, rng: random.Random, groups: Sequence[float] = TRAIN_GROUPS) -> list[SceneGraph]:
    """``n`` scene graphs, none of them held out for evaluation; simple ones repeat."""
    graphs: list[SceneGraph] = []
    while len(graphs) < n:
        graph = sample_graph(rng, groups)
        if not is_held_out(graph):
            graphs.append(graph)
    return graphs


def sample_graphs(
    n: int, seed: int, *, held_out: bool | None, groups: Sequence[float] = TEST_GROUPS, related: float = TEST_RELATED
) -> list[SceneGraph]:
    """``n`` scene graphs without duplicates, all held out, none, or (None) whatever is drawn.

    Raises:
        ValueError: so few graphs exist that ``n`` different ones were not found.
    """
    layout = _mixture(groups, related)
    return list(sampler.sample_graphs(random.Random(seed), n, VOCABULARY, layout, held_out))


def difficulty(graph: SceneGraph) -> tuple[int, int]:
    """Orders prompts from easy to hard: by the number of facts, then of objects. The last third is "hard"."""
    return len(graph.atoms()), sum(e.count or 0 for e in graph.entities)
