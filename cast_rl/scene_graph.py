"""Causal scene graphs: what a prompt states, the words that state it, and the question that verifies it.

A :class:`SceneGraph` has entities (noun, count, attributes) and relations between them. It renders to a prompt in
which the character span of every fact is known, and to one :class:`Atom` per fact. An atom's *parents* are the
atoms that must hold before it can: an attribute or a count depends on its object, a relation on both of its ends.

The wording of questions and answers follows GenEval 2 (arXiv 2512.16853).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, lru_cache

import inflect

Span = tuple[int, int]

SKILLS = ("object", "attribute", "count", "position", "scene")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@lru_cache(maxsize=1)
def _inflect() -> inflect.engine:
    return inflect.engine()


@cache
def plural(noun: str) -> str:
    """The plural of a noun: ``plural("cross") == "crosses"``."""
    return _inflect().plural_noun(noun)


@cache
def number_word(n: int) -> str:
    """A count as a word: ``number_word(3) == "three"``."""
    return _inflect().number_to_words(n)


@cache
def article(phrase: str) -> str:
    """The indefinite article of a phrase: ``article("orange cross") == "an"``."""
    return _inflect().a(phrase).split()[0]


@dataclass(frozen=True)
class Entity:
    """``count`` things of one kind: ``Entity("circle", 2, ("red",))`` is "two red circles".

    ``count=None`` leaves the number open ("some red circles") and yields no count atom.
    """

    noun: str
    count: int | None = 1
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"an entity's count is at least 1 (or None for an open number), got {self.count}")

    @property
    def is_plural(self) -> bool:
        return self.count != 1

    def noun_form(self) -> str:
        """The noun as it appears in the prompt: singular for one, plural otherwise."""
        return plural(self.noun) if self.is_plural else self.noun


@dataclass(frozen=True)
class Relation:
    """``subject predicate object``, ends given as indices into the graph's entities."""

    subject: int
    predicate: str
    object: int


@dataclass(frozen=True)
class Atom:
    """One verifiable fact of a prompt.

    Args:
        skill: one of :data:`SKILLS`.
        question: what a vision-language model is asked about the image.
        answer: the answer that means the fact holds.
        prompt: the whole prompt, which ``spans`` index into.
        spans: character spans ``[start, end)`` of the words that state the fact; empty for a fact about the
            scene as a whole, which no word states.
        parents: indices, within the prompt's atoms, of the facts this one depends on.
        entities: the entities the fact is about (subject first).
        value: the attribute, the count, the predicate, or the total that is claimed; None for existence.
        qualified: whether the entity is told apart from another one of the same noun by its attributes.
    """

    skill: str
    question: str
    answer: str
    prompt: str = ""
    spans: tuple[Span, ...] = ()
    parents: tuple[int, ...] = ()
    entities: tuple[Entity, ...] = ()
    value: str | int | None = None
    qualified: bool = False


@dataclass
class _Writer:
    """Builds a text and remembers where each piece went."""

    text: str = ""
    spans: dict[tuple, Span] = field(default_factory=dict)

    def add(self, piece: str, key: tuple | None = None) -> None:
        """Append ``piece``, separated by a space unless it is punctuation; record its span under a new ``key``."""
        if self.text and not piece.startswith(","):
            self.text += " "
        start = len(self.text)
        self.text += piece
        if key is not None and key not in self.spans:
            self.spans[key] = (start, len(self.text))


@dataclass(frozen=True)
class SceneGraph:
    """Entities and relations that one prompt states.

    Args:
        entities: at least one.
        relations: between different entities.
        closed: the prompt lists everything there is, so that the number of objects in the image is itself a fact
            (one atom of skill ``"scene"``). Needs every count.

    Raises:
        ValueError: no entity; a relation that names a missing entity, or relates one to itself; two relations
            between one pair; two entities that no word of the prompt tells apart; ``closed`` with an open count.
    """

    entities: tuple[Entity, ...]
    relations: tuple[Relation, ...] = ()
    closed: bool = False

    def __post_init__(self) -> None:
        if not self.entities:
            raise ValueError("a scene graph needs at least one entity")
        kinds = Counter((e.noun, frozenset(e.attributes)) for e in self.entities)
        for kind, times in kinds.items():
            if times > 1:
                raise ValueError(f"{times} entities are all {sorted(kind[1])} {kind[0]}: nothing tells them apart")
        for noun, times in Counter(e.noun for e in self.entities).items():
            if times > 1 and not all(e.attributes for e in self.entities if e.noun == noun):
                raise ValueError(f"{times} entities are called {noun!r}: each needs an attribute that tells it apart")
        pairs = set()
        for r in self.relations:
            if not (0 <= r.subject < len(self.entities) and 0 <= r.object < len(self.entities)):
                raise ValueError(f"{r} names an entity that is not there; the graph has {len(self.entities)}")
            if r.subject == r.object:
                raise ValueError(f"{r} relates an entity to itself")
            pair = frozenset((r.subject, r.object))
            if pair in pairs:
                raise ValueError(f"{r} is the second relation between the same two entities")
            pairs.add(pair)
        if self.closed and any(e.count is None for e in self.entities):
            raise ValueError("a closed graph states every count; set closed=False or give the counts")

    def render(self) -> tuple[str, dict[tuple, Span]]:
        """The prompt, and the character span of each fact's words.

        Keys are ``("noun", i)``, ``("count", i)``, ``("attribute", i, word)`` and ``("predicate", j)`` for entity
        ``i`` and relation ``j``. Relations come first, in their order; what no relation mentions is listed after.
        """
        w = _Writer()
        mentioned: set[int] = set()
        related = {i for r in self.relations for i in (r.subject, r.object)}
        clauses: list[int | Relation] = [
            *self.relations,
            *(i for i in range(len(self.entities)) if i not in related),
        ]
        for n, clause in enumerate(clauses):
            if n:
                # "A left of B and C" could place A left of C as well, so a comma closes a relation.
                last = n == len(clauses) - 1
                if len(clauses) > 2 or self.relations:
                    w.add(",")
                if last:
                    w.add("and")
            if isinstance(clause, Relation):
                self._mention(w, clause.subject, mentioned)
                w.add(clause.predicate, ("predicate", self.relations.index(clause)))
                self._mention(w, clause.object, mentioned)
            else:
                self._mention(w, clause, mentioned)
        return w.text, w.spans

    def _mention(self, w: _Writer, i: int, mentioned: set[int]) -> None:
        e = self.entities[i]
        rest = " ".join((*e.attributes, e.noun_form()))
        if i in mentioned:
            w.add("the")
        elif e.count is None:
            w.add("some")
        else:
            w.add(article(rest) if e.count == 1 else number_word(e.count), ("count", i))
        for word in e.attributes:
            w.add(word, ("attribute", i, word))
        w.add(e.noun_form(), ("noun", i))
        mentioned.add(i)

    def _phrase(self, e: Entity, qualified: bool) -> str:
        return " ".join((*(e.attributes if qualified else ()), e.noun_form()))

    def atoms(self) -> tuple[Atom, ...]:
        """One atom per fact: entities in order (object, attributes, count), then relations, then the scene."""
        text, spans = self.render()
        shared = {n for n, k in Counter(e.noun for e in self.entities).items() if k > 1}
        out: list[Atom] = []
        object_atom: dict[int, int] = {}
        for i, e in enumerate(self.entities):
            noun, qualified = spans["noun", i], e.noun in shared
            common = {"prompt": text, "entities": (e,), "qualified": qualified}
            object_atom[i] = len(out)
            out.append(Atom("object", f"Are there any {plural(e.noun)} in the image?", "Yes", spans=(noun,), **common))
            parent = (object_atom[i],)
            for word in e.attributes:
                if qualified:
                    question = f"Are there any {word} {plural(e.noun)} in the image?"
                else:
                    question = f"{'Are' if e.is_plural else 'Is'} the {e.noun_form()} {word}?"
                words = (spans["attribute", i, word], noun)
                out.append(Atom("attribute", question, "Yes", spans=words, parents=parent, value=word, **common))
            if e.count is not None:
                things = " ".join((*(e.attributes if qualified else ()), plural(e.noun)))
                out.append(
                    Atom("count", f"How many {things} are in the image?", number_word(e.count),
                         spans=(spans["count", i], noun), parents=parent, value=e.count, **common)
                )  # fmt: skip
        for j, r in enumerate(self.relations):
            a, b = self.entities[r.subject], self.entities[r.object]
            question = (
                f"{'Are' if a.is_plural else 'Is'} the {self._phrase(a, a.noun in shared)} {r.predicate} "
                f"the {self._phrase(b, b.noun in shared)}?"
            )
            words = (spans["noun", r.subject], spans["predicate", j], spans["noun", r.object])
            out.append(
                Atom("position", question, "Yes", text, words, (object_atom[r.subject], object_atom[r.object]),
                     (a, b), r.predicate, a.noun in shared or b.noun in shared)
            )  # fmt: skip
        if self.closed:
            total = sum(e.count for e in self.entities)
            out.append(
                Atom("scene", "How many objects are in the image?", number_word(total), text,
                     parents=tuple(object_atom.values()), entities=self.entities, value=total)
            )  # fmt: skip
        return tuple(out)
