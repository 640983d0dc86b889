"""From the text of a rendered scene graph back to the graph."""

from __future__ import annotations

import re
from functools import cache

from cast_rl.prompts.vocabulary import Vocabulary
from cast_rl.scene_graph import Entity, Relation, SceneGraph
from cast_rl.wording import number_word, plural

_COUNTS = {"a": 1, "an": 1, "some": None} | {number_word(n): n for n in range(2, 21)}


class ParseError(ValueError):
    """A text is not one that a scene graph with these words renders to; names the place."""


def parse(text: str, vocabulary: Vocabulary) -> SceneGraph:
    """The scene graph that renders to ``text``, its entities in the order in which they are mentioned.

    Raises:
        ParseError: a word that is not known or not expected there; a text that its graph renders otherwise.
    """
    return _Parser(text, vocabulary).graph()


@cache
def _meanings(vocabulary: Vocabulary) -> tuple[re.Pattern[str], dict[str, str], dict[str, str]]:
    """What matches a token, the kind of each, and the singular of each form of a noun."""
    nouns = {noun: noun for noun in vocabulary.all_nouns} | {plural(noun): noun for noun in vocabulary.all_nouns}
    kinds = dict.fromkeys(_COUNTS, "count") | dict.fromkeys(nouns, "noun") | {"the": "the", "and": "and", ",": "comma"}
    kinds |= {word: "attribute" for words in vocabulary.attributes.values() for word in words}
    kinds |= {p.words: "predicate" for p in vocabulary.relations}
    # The longest first: "traffic light" is no "traffic", "on top of" no "on".
    longest_first = sorted(kinds, key=lambda word: (-len(word), word))
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})(?![\w-])"), kinds, nouns


class _Parser:
    """Tokens of a text, read from left to right."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.text, self.closed = text, vocabulary.closed
        pattern, self.kinds, self.nouns = _meanings(vocabulary)
        self.tokens: list[tuple[str, int]] = []
        at = 0
        while at < len(text):
            match = pattern.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                word = (text[at:].split() or [" "])[0]
                raise ParseError(f"{text!r}: character {at}: {word!r} is not in the vocabulary")
            self.tokens.append((match[1], match.start(1)))
            at = match.end()
        self.entities: list[Entity] = []
        self.at = 0

    def graph(self) -> SceneGraph:
        relations = []
        while True:
            subject = self.mention()
            if self.peek() == "predicate":
                predicate = self.take("predicate")
                relations.append(Relation(subject, predicate, self.mention()))
            if self.peek() is None:
                break
            if self.peek() == "comma":
                self.take("comma")
            if self.peek() == "and":
                self.take("and")
        try:
            graph = SceneGraph(tuple(self.entities), tuple(relations), self.closed)
        except ValueError as error:
            raise ParseError(f"{self.text!r}: {error}") from error
        if graph.render()[0] != self.text:
            raise ParseError(f"{self.text!r} is not worded as its graph, which reads {graph.render()[0]!r}")
        return graph

    def mention(self) -> int:
        """The number of the entity that the next words name."""
        again = self.peek() == "the"
        count = self.take("the" if again else "count")
        attributes = []
        while self.peek() == "attribute":
            attributes.append(self.take("attribute"))
        form = self.take("noun")
        if again:
            for i, e in enumerate(self.entities):
                if e.attributes == tuple(attributes) and e.noun_form() == form:
                    return i
            raise ParseError(f"{self.text!r}: 'the {' '.join((*attributes, form))}' has not been mentioned before")
        self.entities.append(Entity(self.nouns[form], _COUNTS[count], tuple(attributes)))
        return len(self.entities) - 1

    def peek(self) -> str | None:
        return self.kinds[self.tokens[self.at][0]] if self.at < len(self.tokens) else None

    def take(self, kind: str) -> str:
        if self.peek() != kind:
            if self.at == len(self.tokens):
                raise ParseError(f"{self.text!r} ends where a {kind} is expected")
            word, place = self.tokens[self.at]
            raise ParseError(f"{self.text!r}: character {place}: {word!r} where a {kind} is expected")
        word = self.tokens[self.at][0]
        self.at += 1
        return word
