"""Skeletons of scene graphs, so that a set has every number of facts equally often and every skill in equal shares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

MOST_THINGS = 4  # in a prompt, unless its number of facts takes more
MOST_ATTRIBUTES = 2  # of a thing
_TRIES = 20  # words for a skeleton before another one is made

Link = tuple[int, str, int]  # subject, skill, object


class Skeleton(NamedTuple):
    """For each thing, whether there are several of it and how many attributes it has; and its relations."""

    things: list[tuple[bool, int]]
    links: list[Link]
    skills: list[str]


class Balance:
    """Draws skeletons; a skill that has had fewer facts than another becomes more likely.

    Args:
        atomicities: numbers of facts, each as often as any other.
        skills: what there may be facts of; things (``"object"``) there always are.
        kinds: how many kinds of attributes a thing can have.

    Raises:
        ValueError: no number of facts, or one below 1.
    """

    def __init__(self, atomicities: Sequence[int], skills: Sequence[str], kinds: int) -> None:
        if not atomicities or min(atomicities) < 1:
            raise ValueError(f"atomicity: numbers of facts from 1 up, got {list(atomicities)}")
        self.atomicities = list(atomicities)
        self.totals = {skill: 0 for skill in skills if skill != "object"}
        self._attributes = min(kinds, MOST_ATTRIBUTES) if "attribute" in self.totals else 0
        self._sizes = {atomicity: self._sizes_for(atomicity) for atomicity in self.atomicities}
        self._deck: list[int] = []
        self._skeleton: Skeleton | None = None
        self._tries = 0

    def next(self, rng: random.Random) -> Skeleton:
        """The skeleton of the next prompt; now and then another one until it is taken."""
        if not self._deck:
            self._deck = rng.sample(self.atomicities, len(self.atomicities))
        if self._skeleton is None or self._tries == _TRIES:
            self._skeleton, self._tries = self._draw(rng, self._deck[-1]), 0
        self._tries += 1
        return self._skeleton

    def take(self) -> None:
        """The skeleton drawn last is part of the set."""
        for skill in self._skeleton.skills:
            self.totals[skill] += 1
        self._skeleton = None
        self._deck.pop()

    def _room(self, size: int) -> dict[str, int]:
        """How many facts of each skill a prompt of ``size`` things can have; relations share theirs."""
        return {"attribute": size * self._attributes, "count": size, "position": size - 1, "verb": size - 1}

    def _sizes_for(self, atomicity: int) -> list[int]:
        sizes = []
        for size in range(1, atomicity + 1):
            room = self._room(size)
            related = max((room[skill] for skill in ("position", "verb") if skill in self.totals), default=0)
            room = sum(room[skill] for skill in ("attribute", "count") if skill in self.totals) + related
            if size + room >= atomicity:
                sizes.append(size)
        return [size for size in sizes if size <= MOST_THINGS] or sizes[:1]

    def _draw(self, rng: random.Random, atomicity: int) -> Skeleton:
        # Relations need several things, of which there would be too few for equal shares otherwise.
        sizes = self._sizes[atomicity]
        size = rng.choices(sizes, [size * size for size in sizes])[0]
        skills = self._draw_skills(rng, size, atomicity - size)
        several = set(rng.sample(range(size), skills.count("count")))
        attributes = [0] * size
        for i in rng.sample([*range(size)] * self._attributes, skills.count("attribute")):
            attributes[i] += 1
        links = _links(rng, size, [skill for skill in skills if skill in ("position", "verb")])
        return Skeleton([(i in several, attributes[i]) for i in range(size)], links, skills)

    def _draw_skills(self, rng: random.Random, size: int, number: int) -> list[str]:
        """The skills of the facts besides the things themselves."""
        room, totals = self._room(size), dict(self.totals)
        skills = []
        for _ in range(number):
            able = [skill for skill in totals if room[skill]]
            most = max(totals.values())
            skill = rng.choices(able, [1 + most - totals[skill] for skill in able])[0]
            for other in ("position", "verb") if skill in ("position", "verb") else (skill,):
                room[other] -= 1
            totals[skill] += 1
            skills.append(skill)
        return skills


def _links(rng: random.Random, size: int, skills: list[str]) -> list[Link]:
    """Relations without a circle, in which things come up in the order of their numbers."""
    links: list[Link] = []
    known = 0
    for at, skill in enumerate(skills):
        left = len(skills) - at - 1
        if not known or (known + 2 + left <= size and rng.random() < 0.5):
            links.append((known, skill, known + 1))
            known += 2
        else:
            old = rng.randrange(known)
            links.append((known, skill, old) if rng.random() < 0.5 else (old, skill, known))
            known += 1
    return links
