"""Captions as sloppy as those of the web: now and then a fact is left out or wrong.

A generator that has learned what the words mean, and then that they cannot be relied on, draws crisp shapes but binds,
counts and places them unreliably. That is what there is for reinforcement learning to improve: to trust the prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from cast_rl.miniature.vocabulary import COLORS, is_held_out
from cast_rl.scene_graph import OPPOSITE, Entity, SceneGraph


@dataclass(frozen=True)
class Sloppiness:
    """Probabilities, each per group of the scene, or per scene for the last three."""

    wrong_color: float
    no_color: float
    wrong_count: float  # one more, or one less
    no_count: float  # "some red circles"
    no_group: float  # the last of several groups is not mentioned
    wrong_relation: float  # the opposite one
    no_relation: float


CAREFUL = Sloppiness(0.01, 0.02, 0.02, 0.02, 0.0, 0.01, 0.03)
SLOPPY = Sloppiness(0.10, 0.02, 0.12, 0.02, 0.10, 0.12, 0.03)


def caption(graph: SceneGraph, rng: random.Random, sloppiness: Sloppiness) -> str:
    """A caption of a scene in which facts are left out or mistaken; never one that is held out for evaluation."""
    s = sloppiness
    entities = tuple(_blur(e, rng, s) for e in graph.entities)
    relations = []
    for r in graph.relations:
        u = rng.random()
        if u < s.wrong_relation:
            relations.append(replace(r, predicate=OPPOSITE[r.predicate]))
        elif u >= s.wrong_relation + s.no_relation:
            relations.append(r)
    if len(entities) > 1 and rng.random() < s.no_group:
        entities = entities[:-1]
        relations = [r for r in relations if max(r.subject, r.object) < len(entities)]
    try:
        sloppy = SceneGraph(entities, tuple(relations))
    except ValueError:  # it would no longer tell two groups apart
        return graph.render()[0]
    return graph.render()[0] if is_held_out(sloppy) else sloppy.render()[0]


def _blur(e: Entity, rng: random.Random, s: Sloppiness) -> Entity:
    u, v = rng.random(), rng.random()
    if u < s.wrong_color:
        e = replace(e, attributes=(rng.choice(COLORS),))
    elif u < s.wrong_color + s.no_color:
        e = replace(e, attributes=())
    if v < s.wrong_count:
        e = replace(e, count=max(1, e.count + rng.choice((-1, 1))))
    elif v < s.wrong_count + s.no_count and e.count > 1:
        e = replace(e, count=None)
    return e
