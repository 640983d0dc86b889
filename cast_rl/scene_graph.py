"""Causal scene graphs: what a prompt states, the words that state it, and the question that verifies it.

A :class:`SceneGraph` has entities (noun, count, attributes) and relations between them. It renders to a prompt in
which the character span of every fact is known, and to one :class:`Atom` per fact. An atom's *parents* are the
atoms that must hold before it can: an attribute or a count depends on its object, a relation on both of its ends.

The wording of questions and answers follows GenEval 2 (arXiv 2512.16853).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from cast_rl.relations import contradiction, relation_skill
from cast_rl.wording import article, is_phrase, number_word, plural

Span = tuple[int, int]

SKILLS = ("object", "attribute", "count", "position", "verb", "scene")


@dataclass(frozen=True)
class Entity:
    """``count`` things of one kind: ``Entity("circle", 2, ("red",))`` is "two red circles".

    ``count=None`` leaves the number open ("some red circles") and yields no count atom.

    Raises:
        ValueError: a count below 1; a noun or attribute that is not words with single spaces between them.
    """

    noun: str
    count: int | None = 1
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"an entity's count is at least 1 (or None for an open number), got {self.count}")
        for name, words in (("noun", self.noun), *(("attribute", word) for word in self.attributes)):
            if not is_phrase(words):
                raise ValueError(f"an entity's {name} is words with single spaces and none around them, got {words!r}")

    @property
    def is_plural(self) -> bool:
        return self.count != 1

    @property
    def be(self) -> str:
        """How a question about it begins: "Is" or "Are"."""
        return "Are" if self.is_plural else "Is"

    def noun_form(self) -> str:
        """The noun as it appears in the prompt: singular for one, plural otherwise."""
        return plural(self.noun) if self.is_plural else self.noun


@dataclass(frozen=True)
class Relation:
    """``subject predicate object``, ends given as indices into the graph's entities.

    Raises:
        ValueError: a predicate that is not words with single spaces between them.
    """

    subject: int
    predicate: str
    object: int

    def __post_init__(self) -> None:
        if not is_phrase(self.predicate):
            raise ValueError(
                f"a relation's predicate is words with single spaces and none around them, got {self.predicate!r}"
            )

    @property
    def skill(self) -> str:
        """``"verb"`` for an action ("chasing"), ``"position"`` otherwise."""
        return relation_skill(self.predicate)


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
            between one pair; relations that cannot all hold (see `cast_rl.relations.contradiction`); two entities
            that no word of the prompt tells apart; ``closed`` with an open count.
    """

    entities: tuple[Entity, ...]
    relations: tuple[Relation, ...] = ()
    closed: bool = False

    def __post_init__(self) -> None:
        if not self.entities:
            raise ValueError("a scene graph needs at least one entity")
        if not told_apart(self.entities):
            things = ", ".join(repr(" ".join((*e.attributes, e.noun))) for e in self.entities)
            raise ValueError(
                f"nothing tells two entities apart among {things}: of one noun, each needs an attribute that the other "
                "does not have"
            )
        if self.relations:
            _check_relations(self.relations, self.entities)
        if self.closed and any(e.count is None for e in self.entities):
            raise ValueError("a closed graph states every count; set closed=False or give the counts")

    @property
    def atomicity(self) -> int:
        """How many facts the words state, as GenEval 2 counts: things, attributes, relations, counts above one."""
        facts = sum(1 + len(e.attributes) + (e.count is not None and e.count > 1) for e in self.entities)
        return facts + len(self.relations)

    @property
    def order(self) -> tuple[int, ...]:
        """The entities in the order in which the prompt mentions them: relations come first."""
        related = [i for r in self.relations for i in (r.subject, r.object)]
        return tuple(dict.fromkeys([*related, *range(len(self.entities))]))

    def render(self) -> tuple[str, dict[tuple, Span]]:
        """The prompt, and the character span of each fact's words.

        Keys are ``("noun", i)``, ``("count", i)``, ``("attribute", i, word)`` and ``("predicate", j)`` for entity
        ``i`` and relation ``j``. Relations come first, in their order; what no relation mentions is listed after.
        """
        pieces: list[tuple[str, tuple | None]] = []
        mentioned: set[int] = set()
        order = self.order
        unrelated = order[len({i for r in self.relations for i in (r.subject, r.object)}) :]
        last = len(self.relations) + len(unrelated) - 1
        # "A left of B and C" could place A left of C as well, so a comma closes a relation.
        comma = last > 1 or bool(self.relations)
        for j, r in enumerate(self.relations):
            pieces += _between(j, last, comma)
            pieces += self._mention(r.subject, mentioned)
            pieces.append((r.predicate, ("predicate", j)))
            pieces += self._mention(r.object, mentioned)
        for n, i in enumerate(unrelated, start=len(self.relations)):
            pieces += _between(n, last, comma)
            pieces += self._mention(i, mentioned)
        return _write(pieces)

    def _mention(self, i: int, mentioned: set[int]) -> list[tuple[str, tuple | None]]:
        """The words that name entity ``i``, each with the key of the fact it states."""
        e = self.entities[i]
        noun = e.noun_form()
        if i in mentioned:
            return [("the", None), *((word, None) for word in e.attributes), (noun, None)]
        mentioned.add(i)
        if e.count is None:
            first = ("some", None)
        elif e.count == 1:
            first = (article((e.attributes[0] if e.attributes else noun).split(" ", 1)[0]), ("count", i))
        else:
            first = (number_word(e.count), ("count", i))
        return [first, *((word, ("attribute", i, word)) for word in e.attributes), (noun, ("noun", i))]

    def atoms(self) -> tuple[Atom, ...]:
        """One atom per fact: entities in order (object, attributes, count), then relations, then the scene."""
        text, spans = self.render()
        nouns = [e.noun for e in self.entities]
        shared = {noun for noun in nouns if nouns.count(noun) > 1} if len(set(nouns)) < len(nouns) else set()
        out: list[Atom] = []
        object_atom: list[int] = []
        for i, e in enumerate(self.entities):
            noun, qualified, about = spans["noun", i], e.noun in shared, (e,)
            parent = (len(out),)
            object_atom.append(len(out))
            question = f"Are there any {plural(e.noun)} in the image?"
            out.append(Atom("object", question, "Yes", text, (noun,), (), about, None, qualified))
            for word in e.attributes:
                question = self._attribute_question(e, word) if qualified else f"{e.be} the {e.noun_form()} {word}?"
                words = (spans["attribute", i, word], noun)
                out.append(Atom("attribute", question, "Yes", text, words, parent, about, word, qualified))
            if e.count is not None:
                things = " ".join((*e.attributes, plural(e.noun))) if qualified else plural(e.noun)
                question, words = f"How many {things} are in the image?", (spans["count", i], noun)
                out.append(
                    Atom("count", question, number_word(e.count), text, words, parent, about, e.count, qualified)
                )
        for j, r in enumerate(self.relations):
            a, b = self.entities[r.subject], self.entities[r.object]
            ends = [" ".join((*e.attributes, e.noun_form())) if e.noun in shared else e.noun_form() for e in (a, b)]
            words = (spans["noun", r.subject], spans["predicate", j], spans["noun", r.object])
            parents = (object_atom[r.subject], object_atom[r.object])
            question, qualified = f"{a.be} the {ends[0]} {r.predicate} the {ends[1]}?", bool({a.noun, b.noun} & shared)
            out.append(Atom(r.skill, question, "Yes", text, words, parents, (a, b), r.predicate, qualified))
        if self.closed:
            total = sum(e.count for e in self.entities)
            question, parents = "How many objects are in the image?", tuple(object_atom)
            out.append(Atom("scene", question, number_word(total), text, (), parents, self.entities, total))
        return tuple(out)

    def _attribute_question(self, e: Entity, word: str) -> str:
        """Whether ``e`` has an attribute, where other entities have its noun."""
        others = [set(other.attributes) for other in self.entities if other != e and other.noun == e.noun]
        if not any(word in attributes for attributes in others):
            return f"Are there any {word} {plural(e.noun)} in the image?"
        rest = [w for w in e.attributes if w != word]
        if any(attributes.issuperset(rest) for attributes in others):
            # The rest of its attributes does not tell which of several is meant, only all of them do.
            return f"Are there any {' '.join(e.attributes)} {plural(e.noun)} in the image?"
        return f"{e.be} the {' '.join(rest)} {e.noun_form()} {word}?"


def told_apart(entities: Sequence[Entity]) -> bool:
    """Whether, of any two entities of one noun, each has an attribute that the other lacks."""
    if len({e.noun for e in entities}) == len(entities):
        return True
    pairs = ((set(a.attributes), set(b.attributes)) for a, b in combinations(entities, 2) if a.noun == b.noun)
    return not any(ours <= theirs or theirs <= ours for ours, theirs in pairs)


def _check_relations(relations: tuple[Relation, ...], entities: tuple[Entity, ...]) -> None:
    pairs = set()
    for r in relations:
        if not (0 <= r.subject < len(entities) and 0 <= r.object < len(entities)):
            raise ValueError(f"{r} names an entity that is not there; the graph has {len(entities)}")
        if r.subject == r.object:
            raise ValueError(f"{r} relates an entity to itself")
        pair = frozenset((r.subject, r.object))
        if pair in pairs:
            raise ValueError(f"{r} is the second relation between the same two entities")
        pairs.add(pair)
    if len(relations) > 2:  # fewer cannot close a circle
        circle = contradiction((r.subject, r.predicate, r.object) for r in relations)
        if circle:
            nouns = [repr(entities[i].noun) for i in circle]
            steps = ", ".join(f"{a} before {b}" for a, b in zip(nouns, nouns[1:] + nouns[:1], strict=True))
            raise ValueError(f"the relations contradict each other: along one axis they put {steps}")


def _between(n: int, last: int, comma: bool) -> list[tuple[str, None]]:
    """What stands in front of clause ``n`` of ``last + 1``."""
    if n == 0:
        return []
    return [(",", None)] * comma + [("and", None)] * (n == last)


def _write(pieces: list[tuple[str, tuple | None]]) -> tuple[str, dict[tuple, Span]]:
    """The pieces with spaces between them, none in front of a comma, and the spans of those that have a key."""
    spans: dict[tuple, Span] = {}
    words: list[str] = []
    at = 0
    for piece, key in pieces:
        if at and piece != ",":
            words.append(" ")
            at += 1
        words.append(piece)
        end = at + len(piece)
        if key is not None:
            spans[key] = (at, end)
        at = end
    return "".join(words), spans
