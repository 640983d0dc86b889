"""What the miniature's judge is asked in training: facts of an image, true and false in equal parts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cast_rl.miniature.oracle import MARGIN, Found, beyond_by, check
from cast_rl.miniature.vocabulary import COLORS, RELATIONS, SHAPES, sample_graph
from cast_rl.scene_graph import Atom, Entity, Relation, SceneGraph, number_word

MOST = 10  # the largest number that is said; more objects than that are "ten"
SKILL_WEIGHTS = {"object": 1.0, "attribute": 1.5, "count": 1.5, "position": 2.0, "scene": 0.5}
ALTERED = {"noun": 0.3, "color": 0.3, "count": 0.4, "relation": 0.6}  # how often a part of a scene is altered
TRUE_RELATION = 0.7  # how often a described scene's relation is one that holds, if there is any


@dataclass(frozen=True)
class Asked:
    """A question, the word that answers it, and the skill of the fact it is about."""

    question: str
    answer: str
    skill: str


def truth(atom: Atom, objects: Sequence[Found]) -> str:
    """The right answer to an atom's question in an image with these objects, whatever the atom claims."""
    holds, seen = check(atom, objects)
    if atom.skill in ("count", "scene"):
        return number_word(min(len(seen), MOST))
    return "Yes" if holds else "No"


def described(objects: Sequence[Found], rng: random.Random) -> SceneGraph | None:
    """A scene graph of up to three kinds of the objects there are, None if there is no known shape among them."""
    kinds = Counter((o.shape, o.color) for o in objects if o.shape is not None)
    chosen = rng.sample(sorted(kinds), min(len(kinds), rng.randint(1, 3)))
    if not chosen:
        return None
    entities = tuple(Entity(shape, min(kinds[shape, color], MOST), (color,)) for shape, color in chosen)
    relations = ()
    if len(chosen) > 1:
        a, b = ([o for o in objects if (o.shape, o.color) == kind] for kind in chosen[:2])
        true = [r for r in RELATIONS if all(beyond_by(r, p, q) > MARGIN for p in a for q in b)]
        word = rng.choice(true if true and rng.random() < TRUE_RELATION else RELATIONS)
        relations = (Relation(0, word, 1),)
    return SceneGraph(entities, relations, closed=True)


def altered(graph: SceneGraph, rng: random.Random) -> SceneGraph:
    """The scene graph with some of its shapes, colours, numbers and relations changed."""
    while True:
        entities = []
        for e in graph.entities:
            if rng.random() < ALTERED["noun"]:
                e = replace(e, noun=rng.choice(SHAPES))
            if rng.random() < ALTERED["color"]:
                e = replace(e, attributes=(rng.choice(COLORS),))
            if rng.random() < ALTERED["count"]:
                e = replace(e, count=max(1, e.count + rng.choice((-1, 1))))
            entities.append(e)
        relations = tuple(
            replace(r, predicate=rng.choice(RELATIONS)) if rng.random() < ALTERED["relation"] else r
            for r in graph.relations
        )
        if len({(e.noun, e.attributes) for e in entities}) == len(entities):
            return SceneGraph(tuple(entities), relations, closed=True)


def ask(
    prompt: SceneGraph, objects: Sequence[Found], questions: int, rng: random.Random
) -> tuple[list[Asked], SceneGraph]:
    """Up to ``questions`` different questions about an image, and the scene graph whose text is its caption.

    The facts are those of the image's prompt, of a description of what is there, and of altered versions of both.
    Within each skill true and false facts are asked equally often as far as there are both.
    """
    scene = described(objects, rng) or sample_graph(rng)
    graphs = [prompt, scene, altered(prompt, rng), altered(scene, rng), altered(scene, rng)]
    found: dict[str, tuple[str, Asked]] = {}
    for atom in (a for graph in graphs for a in graph.atoms()):
        if atom.question not in found:
            answer = truth(atom, objects)
            found[atom.question] = (f"{atom.skill} {answer == atom.answer}", Asked(atom.question, answer, atom.skill))
    candidates = list(found.values())
    kinds = Counter(kind for kind, _ in candidates)
    # Weighted sampling without replacement (Efraimidis & Spirakis 2006).
    keys = [rng.random() ** (kinds[kind] / SKILL_WEIGHTS[asked.skill]) for kind, asked in candidates]
    order = sorted(range(len(candidates)), key=keys.__getitem__, reverse=True)
    return [candidates[i][1] for i in order[:questions]], rng.choice([prompt, prompt, *graphs])
