"""Captions that are sloppy in the ways those of the web are.

Now and then a fact is left out or wrong. More often two facts are mixed up: which of two things has which colour, and
which side is which (the viewer's or the subject's). A generator trained on such captions draws what they list, but
binds and places at little better than chance. Guidance does not mend that: it sharpens what the captions tell apart.
"""

from __future__ import annotations

import random
from dataclasses import replace

from cast_rl.miniature.vocabulary import COLORS, is_held_out
from cast_rl.scene_graph import OPPOSITE, Entity, SceneGraph

LEAVE_OUT = {"color": 0.02, "count": 0.02, "relation": 0.03}
MISTAKE = {"color": 0.01, "count": 0.02, "relation": 0.01}
CONFUSE = {"color": 0.4, "relation": 0.45}


def caption(graph: SceneGraph, rng: random.Random, *, confused: bool) -> str:
    """A caption of a scene in which each fact is left out or mistaken with the probabilities above.

    With ``confused``, two groups' colours are swapped, and relations turned round, with those of :data:`CONFUSE`.
    """
    graph = _confuse(graph, rng) if confused else graph
    entities = tuple(_blur(e, rng) for e in graph.entities)
    relations = []
    for r in graph.relations:
        u = rng.random()
        if u < MISTAKE["relation"]:
            relations.append(replace(r, predicate=OPPOSITE[r.predicate]))
        elif u >= MISTAKE["relation"] + LEAVE_OUT["relation"]:
            relations.append(r)
    return _sayable(entities, tuple(relations), graph).render()[0]


def _confuse(graph: SceneGraph, rng: random.Random) -> SceneGraph:
    entities, relations = list(graph.entities), graph.relations
    if len(entities) > 1 and rng.random() < CONFUSE["color"]:
        i, j = rng.sample(range(len(entities)), 2)
        a, b = entities[i], entities[j]
        entities[i], entities[j] = replace(a, attributes=b.attributes), replace(b, attributes=a.attributes)
    if rng.random() < CONFUSE["relation"]:
        relations = tuple(replace(r, predicate=OPPOSITE[r.predicate]) for r in relations)
    return _sayable(tuple(entities), relations, graph)


def _sayable(entities: tuple[Entity, ...], relations: tuple, graph: SceneGraph) -> SceneGraph:
    """The scene graph of these, or ``graph`` if no words would tell two groups apart or it is held out."""
    try:
        changed = SceneGraph(entities, relations)
    except ValueError:
        return graph
    return graph if is_held_out(changed) else changed


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
