"""Scene graphs drawn from a vocabulary: what kind of graph is asked for, filled with words that go together.

A *layout* draws the skeleton of a graph, how many things with which kinds of facts; `draw` fills it. `Mixture` draws
skeletons by weights of the number of things; `Balanced` for a number of facts, with skills in equal shares.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cast_rl.prompts.balance import Balance, Link, Skeleton
from cast_rl.prompts.vocabulary import Vocabulary
from cast_rl.scene_graph import Entity, Relation, SceneGraph, told_apart


class Thing(NamedTuple):
    """An entity to be: its count, its kinds of attributes, and the nouns it may have."""

    count: int | None
    kinds: tuple[str, ...]
    nouns: tuple[str, ...]


class Layout(Protocol):
    """Draws skeletons of graphs. ``links`` is asked once the words of ``things`` are drawn and taken."""

    def things(self, rng: random.Random) -> list[Thing]: ...

    def links(self, rng: random.Random, count: int) -> list[Link]: ...

    def taken(self) -> None:
        """The graph drawn last is part of the set."""
        ...


@dataclass
class Mixture:
    """So many things with so much probability, each with an attribute of every kind and a count.

    Args:
        vocabulary: the words.
        sizes: weights of one, two, three, ... things.
        counts: weights of one, two, three, ... of a thing, where there are several things.
        counts_alone: the same, where there is one thing.
        related: how often the first two things are related.
    """

    vocabulary: Vocabulary
    sizes: Sequence[float]
    counts: Sequence[float]
    counts_alone: Sequence[float]
    related: float

    def things(self, rng: random.Random) -> list[Thing]:
        size = rng.choices(range(1, len(self.sizes) + 1), self.sizes)[0]
        weights = self.counts if size > 1 else self.counts_alone
        counts = [rng.choices(range(1, len(weights) + 1), weights)[0] for _ in range(size)]
        kinds, nouns = tuple(self.vocabulary.attributes), self.vocabulary.all_nouns
        return [Thing(count, kinds, nouns) for count in counts]

    def links(self, rng: random.Random, count: int) -> list[Link]:
        return [(0, "position", 1)] if count > 1 and rng.random() < self.related else []

    def taken(self) -> None:
        """Every graph is drawn alike."""


class Balanced:
    """Equally many prompts of each atomicity, in which every skill has as equal a share of the facts as they allow.

    Args:
        vocabulary: the words.
        atomicities: numbers of facts; see `SceneGraph.atomicity`.
        skills: the skills that prompts may have facts of.

    Raises:
        ValueError: a skill that the vocabulary has no words for; no number of facts, or one below 1.
    """

    def __init__(self, vocabulary: Vocabulary, atomicities: Sequence[int], skills: Sequence[str]) -> None:
        missing = [skill for skill in skills if skill not in vocabulary.skills]
        if missing:
            raise ValueError(f"skill {missing[0]!r}: this vocabulary has words for {', '.join(vocabulary.skills)}")
        self.vocabulary = vocabulary
        self.counted = "count" in skills
        self.balance = Balance(atomicities, skills, kinds=len(vocabulary.attributes))
        self._skeleton: Skeleton | None = None

    def things(self, rng: random.Random) -> list[Thing]:
        self._skeleton = skeleton = self.balance.next(rng)
        kinds = tuple(self.vocabulary.attributes)
        things = []
        for i, (several, attributes) in enumerate(skeleton.things):
            # Not everything can act: nouns are drawn from those that fit the thing's parts in actions.
            parts = [(skill, "subject") for s, skill, _ in skeleton.links if s == i and skill == "verb"]
            parts += [(skill, "object") for _, skill, o in skeleton.links if o == i and skill == "verb"]
            count = rng.choice(self.vocabulary.counts) if several else 1 if self.counted else None
            chosen = attributes and sorted(rng.sample(range(len(kinds)), attributes))
            nouns = self.vocabulary.nouns_for(tuple(parts))
            things.append(Thing(count, tuple(kinds[k] for k in chosen or ()), nouns))
        return things

    def links(self, rng: random.Random, count: int) -> list[Link]:
        return self._skeleton.links

    def taken(self) -> None:
        self.balance.take()


def draw(rng: random.Random, vocabulary: Vocabulary, layout: Layout) -> SceneGraph | None:
    """One scene graph, or None where the words that were drawn do not go together."""
    things = layout.things(rng)
    entities = []
    for thing in things:
        if not thing.nouns:
            return None
        attributes = tuple(rng.choice(vocabulary.attributes[kind]) for kind in thing.kinds)
        entities.append(Entity(rng.choice(thing.nouns), thing.count, attributes))
    if vocabulary.max_objects and sum(e.count or 1 for e in entities) > vocabulary.max_objects:
        return None
    if not told_apart(entities):
        return None
    relations = []
    for subject, skill, other in layout.links(rng, len(things)):
        predicates = vocabulary.predicates(skill, entities[subject].noun, entities[other].noun)
        if not predicates:
            return None
        relations.append(Relation(subject, rng.choice(predicates), other))
    return SceneGraph(tuple(entities), tuple(relations), vocabulary.closed)


def _facts(graph: SceneGraph) -> Hashable:
    """What a graph states, in whatever order: "a cat and a dog" is the same prompt as "a dog and a cat"."""
    things = graph.entities  # no two are equal: their words tell them apart
    return frozenset(things), frozenset((things[r.subject], r.predicate, things[r.object]) for r in graph.relations)


def sample_graphs(
    rng: random.Random, n: int, vocabulary: Vocabulary, layout: Layout, held_out: bool | None
) -> Iterator[SceneGraph]:
    """``n`` scene graphs without duplicates; the same facts in another order are one.

    Args:
        rng: the source of randomness.
        n: how many.
        vocabulary: the words.
        layout: what graphs are asked for.
        held_out: all held out (True), none (False), or whatever is drawn (None).

    Raises:
        ValueError: so few prompts exist that ``n`` different ones were not found.
    """
    seen: set[Hashable] = set()
    for _ in range(200 * n + 1000):
        if len(seen) == n:
            return
        graph = draw(rng, vocabulary, layout)
        if graph is None or (held_out is not None and vocabulary.is_held_out(graph) != held_out):
            continue
        facts = _facts(graph)
        if facts not in seen:
            seen.add(facts)
            layout.taken()
            yield graph
    if len(seen) < n:
        raise ValueError(
            f"found only {len(seen)} different prompts of the {n} asked for; ask for "
            "fewer, or for other numbers of facts (atomicity): every number asked for has to be met equally often"
        )
