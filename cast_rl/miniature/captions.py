"""Captions that are sloppy in the ways those of the web are.

Now and then a fact is left out or wrong. Captions of the second kind also turn relations round almost every other time,
as people do who mean now the viewer's left, now the subject's. A generator that ends its training on them draws what is
listed, but places it at little better than chance. Guidance mends that little: it sharpens what captions tell apart.
"""

from __future__ import annotations

import random
from dataclasses import replace

from cast_rl.miniature.vocabulary import COLORS, is_held_out
from cast_rl.scene_graph import OPPOSITE, Entity, SceneGraph

LEAVE_OUT = {"color": 0.02, "count": 0.02, "relation": 0.03}
MISTAKE = {"color": 0.01, "count": 0.02, "relation": 0.01}
TURNED = 0.44  # how often a relation is turned round where captions do not care


def caption(graph: SceneGraph, rng: random.Random, *, careful: bool) -> str:
    """A caption of a scene in which each fact is left out or mistaken with the probabilities above."""
    entities = tuple(_blur(e, rng) for e in graph.entities)
    mistake = MISTAKE["relation"] if careful else TURNED
    relations = []
    for r in graph.relations:
        u = rng.random()
        if u < mistake:
            relations.append(replace(r, predicate=OPPOSITE[r.predicate]))
        elif u >= mistake + LEAVE_OUT["relation"]:
            relations.append(r)
    try:
        sloppy = SceneGraph(entities, tuple(relations))
    except ValueError:  # it would no longer tell two groups apart
        return graph.render()[0]
    return graph.render()[0] if is_held_out(sloppy) else sloppy.render()[0]


def _blur(e: Entity, rng: random.Random) -> Entity:
    u, v = rng.random(), rng.random()
    if u < MISTAKE["color"]:
        e = replace(e, attributes=(rng.choice(COLORS),))
    elif u < MISTAKE["color"] + LEAVE_OUT["color"]:
        e = replace(e, attributes=())
    if v < MISTAKE["count"]:
        e = replace(e, count=max(1, e.count + rng.choice((-1, 1))))
    elif v < MISTAKE["count"] + LEAVE_OUT["count"] and e.count > 1:
        e = replace(e, count=None)
    return e
