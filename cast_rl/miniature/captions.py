"""Captions that are sloppy in the ways those of the web are.

Now and then a fact is left out or wrong. Careless captions of several groups, in addition, call shapes by another name
and turn relations round almost every other time. A generator that ends its training on them still draws crisp shapes,
but often in the wrong place.
"""

from __future__ import annotations

import random
from dataclasses import replace

from cast_rl.miniature.vocabulary import COLORS, SHAPES, is_held_out
from cast_rl.relations import OPPOSITE
from cast_rl.scene_graph import Entity, Relation, SceneGraph

LEAVE_OUT = {"color": 0.02, "count": 0.02, "relation": 0.03}
MISTAKE = {"color": 0.01, "count": 0.02, "relation": 0.01}
CARELESS = {"noun": 0.4, "relation": 0.4}  # how often a shape is called another, and a relation turned round


def caption(graph: SceneGraph, rng: random.Random, *, careful: bool) -> str:
    """A caption of a scene in which facts are left out or mistaken with the probabilities above."""
    graph = graph if careful else _careless(graph, rng)
    entities = tuple(_blur(e, rng) for e in graph.entities)
    relations = []
    for r in graph.relations:
        u = rng.random()
        if u < MISTAKE["relation"]:
            relations.append(_turned(r))
        elif u >= MISTAKE["relation"] + LEAVE_OUT["relation"]:
            relations.append(r)
    return _sayable(entities, tuple(relations), graph).render()[0]


def _careless(graph: SceneGraph, rng: random.Random) -> SceneGraph:
    """Mixes up the shapes and the relation of a scene of several groups."""
    relations = tuple(_turned(r) if rng.random() < CARELESS["relation"] else r for r in graph.relations)
    entities = graph.entities
    if len(entities) > 1:
        entities = tuple(_renamed(e, rng) if rng.random() < CARELESS["noun"] else e for e in entities)
    return _sayable(entities, relations, graph)


def _turned(r: Relation) -> Relation:
    return replace(r, predicate=OPPOSITE[r.predicate])


def _renamed(e: Entity, rng: random.Random) -> Entity:
    return replace(e, noun=rng.choice([noun for noun in SHAPES if noun != e.noun]))


def _sayable(entities: tuple[Entity, ...], relations: tuple[Relation, ...], graph: SceneGraph) -> SceneGraph:
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
