"""The words that prompts are sampled from, which of them go together, and which pairs are kept for evaluation."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from cast_rl.prompts.jsonl import Problem
from cast_rl.prompts.schema import check_schema
from cast_rl.relations import relation_skill
from cast_rl.scene_graph import SceneGraph
from cast_rl.wording import number_word, plural

_DETERMINERS = {"a", "an", "the", "some", "and", *map(number_word, range(1, 21))}


@dataclass(frozen=True)
class Predicate:
    """Words of a relation, and the groups of nouns that may stand on either side (None: any)."""

    words: str
    subject: tuple[str, ...] | None = None
    object: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What there is to say.

    Args:
        nouns: countable nouns in the singular, by group.
        attributes: by kind, in the order in which they stand before the noun; a thing has at most one of a kind.
        relations: predicates of place, and of action (those that begin with a present participle).
        counts: how many of a thing a prompt may ask for, besides one.
        max_objects: how many objects a prompt may ask for in all; None for any number.
        closed: whether a prompt lists everything there is (see `cast_rl.scene_graph.SceneGraph`).
        held_out_pairs: what is held out for evaluation: ``"words"``, pairs of an attribute and the noun it describes,
            or of the nouns of two things; ``"kinds"``, pairs of two things with their attributes.
        held_out_percent: how many of these pairs, in percent.

    Raises:
        Problem: words that make prompts ambiguous, or groups that are not there; it names the field.
    """

    nouns: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    relations: tuple[Predicate, ...] = ()
    counts: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    max_objects: int | None = None
    closed: bool = False
    held_out_pairs: str = "words"
    held_out_percent: int = 10

    def __post_init__(self) -> None:
        self._check_words()
        for predicate in self.relations:
            for name in (*(predicate.subject or ()), *(predicate.object or ())):
                if name not in self.nouns:
                    raise Problem("relations", f"{predicate.words!r} names {name!r}, no group of {sorted(self.nouns)}")

    @cached_property
    def all_nouns(self) -> tuple[str, ...]:
        return tuple(noun for group in self.nouns.values() for noun in group)

    @cached_property
    def skills(self) -> tuple[str, ...]:
        """The skills that these words have facts of."""
        has = {"object": True, "attribute": self.attributes, "count": self.counts}
        has |= dict.fromkeys((relation_skill(p.words) for p in self.relations), True)
        return tuple(skill for skill in ("object", "attribute", "count", "position", "verb") if has.get(skill))

    def predicates(self, skill: str, subject: str, other: str) -> tuple[str, ...]:
        """The predicates of a skill that may stand between two nouns."""
        key = (skill, self._group[subject], self._group[other])
        if key not in self._predicates:
            fitting = (p for p in self._of_skill(skill) if _fits(key[1], p.subject) and _fits(key[2], p.object))
            self._predicates[key] = tuple(p.words for p in fitting)
        return self._predicates[key]

    def nouns_for(self, parts: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
        """The nouns that may play some parts at once.

        Args:
            parts: pairs of a skill and ``"subject"`` or ``"object"``: to be that of some predicate of the skill.
        """
        if parts not in self._nouns_for:
            allowed = [[getattr(p, end) for p in self._of_skill(skill)] for skill, end in parts]
            self._nouns_for[parts] = tuple(
                n for n in self.all_nouns if all(any(_fits(self._group[n], g) for g in groups) for groups in allowed)
            )
        return self._nouns_for[parts]

    def is_held_out(self, graph: SceneGraph) -> bool:
        """Whether a prompt has a pair that never occurs in a training prompt. Depends on nothing but the words."""
        things = [(e.noun, e.attributes) for e in graph.entities]
        if self.held_out_pairs == "kinds":
            kinds = sorted(" ".join((*attributes, noun)) for noun, attributes in things if attributes)
            return any(self._holds_out(pair) for pair in combinations(kinds, 2))
        nouns = sorted(noun for noun, _ in things)
        return any(self._holds_out(pair) for pair in combinations(nouns, 2)) or any(
            self._holds_out((word, noun)) for noun, attributes in things for word in attributes
        )

    def _holds_out(self, pair: tuple[str, str]) -> bool:
        if pair not in self._held_out:
            self._held_out[pair] = zlib.crc32("|".join(pair).encode()) % 100 < self.held_out_percent
        return self._held_out[pair]

    def _of_skill(self, skill: str) -> list[Predicate]:
        return [p for p in self.relations if relation_skill(p.words) == skill]

    @cached_property
    def _group(self) -> dict[str, str]:
        return {noun: name for name, group in self.nouns.items() for noun in group}

    # What has been looked up before, by the arguments of the method that keeps it.

    @cached_property
    def _predicates(self) -> dict[tuple[str, str, str], tuple[str, ...]]:
        return {}

    @cached_property
    def _nouns_for(self) -> dict[tuple[tuple[str, str], ...], tuple[str, ...]]:
        return {}

    @cached_property
    def _held_out(self) -> dict[tuple[str, str], bool]:
        return {}

    def _check_words(self) -> None:
        """Every word has one meaning: else a prompt could be read in two ways."""
        if not self.all_nouns:
            raise Problem("nouns", "there is none")
        uses = Counter(_DETERMINERS)
        for noun in self.all_nouns:
            uses.update({noun, plural(noun)})
        uses.update(word for words in self.attributes.values() for word in words)
        uses.update(p.words for p in self.relations)
        double = sorted(word for word, times in uses.items() if times > 1)
        if double:
            raise Problem("", f"{', '.join(map(repr, double))} would have two meanings; every word may have one")
        split = [noun for noun in self.all_nouns if " " in noun and noun.split()[0] in uses]
        if split:
            raise Problem("nouns", f"{split[0]!r} begins with a word that has a meaning of its own")


def _fits(group: str, allowed: tuple[str, ...] | None) -> bool:
    return allowed is None or group in allowed


def load_vocabulary(source: str | PathLike | Vocabulary) -> Vocabulary:
    """A vocabulary: as it is, ``"common"`` (the one that ships), ``"miniature"``, or read from a YAML file.

    Raises:
        ValueError: names the file and the field that is wrong.
        FileNotFoundError: there is no such file.
    """
    if isinstance(source, Vocabulary):
        return source
    if source == "miniature":
        from cast_rl.miniature.vocabulary import VOCABULARY  # the miniature builds on this module

        return VOCABULARY
    path = files("cast_rl.prompts").joinpath("vocabulary.yaml") if source == "common" else Path(source)
    try:
        return _from_yaml(yaml.safe_load(path.read_text("utf-8")))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no vocabulary {source}: give 'common', 'miniature' or a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError, Problem) as error:
        raise ValueError(f"vocabulary {source}: {error}") from error


def _from_yaml(value: Any) -> Vocabulary:
    for kind in (value.get("relations") or {}).values() if isinstance(value, dict) else ():
        if isinstance(kind, dict) and True in kind:
            raise Problem("relations", 'YAML reads an unquoted on as "true"; write "on"')
    check_schema(value, "vocabulary")
    relations = []
    for skill, predicates in value.get("relations", {}).items():
        for words, ends in predicates.items():
            if relation_skill(words) != skill:
                rule = "verbs, and only they, begin with a present participle such as 'chasing'"
                raise Problem(f"relations.{skill}", f"{words!r} is of skill {relation_skill(words)}: {rule}")
            relations.append(Predicate(words, **{end: tuple(groups) for end, groups in (ends or {}).items()}))
    groups = {name: {k: tuple(words) for k, words in value.get(name, {}).items()} for name in ("nouns", "attributes")}
    held_out = {f"held_out_{name}": setting for name, setting in value.get("held_out", {}).items()}
    others = {name: value[name] for name in ("max_objects", "closed") if name in value}
    counts = {"counts": tuple(value["counts"])} if "counts" in value else {}
    return Vocabulary(**groups, relations=tuple(relations), **counts, **others, **held_out)
