"""Finding the words of a prompt that state the fact a question asks about.

For questions that come without spans, as those of GenEval 2 (arXiv 2512.16853) do. The wordings that are understood are
its own, which scene graphs use too::

    Are there any cats in the image?       How many cats are in the image?       Are the cats red?
    Are the cats on top of the table?      Are the cats chasing the dog?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cast_rl.relations import AXES, UNORDERED
from cast_rl.scene_graph import Span
from cast_rl.wording import number_word, plural, singular

_EXISTS = re.compile(r"are there any (?P<things>.+) in the image\?", re.IGNORECASE)
_COUNT = re.compile(r"how many (?P<things>.+) are in the image\?", re.IGNORECASE)
_STATE = re.compile(r"(?:is|are) the (?P<rest>.+)\?", re.IGNORECASE)
NUMBERS = {"a": 1, "an": 1} | {form: n for n in range(1, 21) for form in (number_word(n), str(n))}
# Between a determiner and its noun there are only attributes: these words end the search for either.
_ENDS_PHRASE = {*NUMBERS, "the", "some", "and", "or", "with", "of"}


@dataclass(frozen=True)
class Located:
    """Where a prompt states a fact, and what it says.

    Args:
        spans: character spans ``[start, end)`` of the words.
        nouns: the things the fact is about, in the singular, subject first.
        value: the attribute, the count or the predicate; None for existence.
    """

    spans: tuple[Span, ...]
    nouns: tuple[str, ...]
    value: str | int | None = None


def locate(prompt: str, skill: str, question: str, answer: str) -> Located | None:
    """The words of ``prompt`` that state what ``question`` asks, or None where they are not found.

    Args:
        prompt: the whole prompt.
        skill: ``"object"``, ``"count"``, ``"attribute"``, ``"position"`` or ``"verb"``.
        question: in one of the wordings above.
        answer: the right answer; for a count, its word.
    """
    question = question.strip()
    if skill == "object":
        match = _EXISTS.fullmatch(question)
        return _existence(prompt, match["things"].split()) if match else None
    if skill == "count":
        match = _COUNT.fullmatch(question)
        return _count(prompt, match["things"].split(), answer) if match else None
    match = _STATE.fullmatch(question)
    if match and skill == "attribute":
        return _attribute(prompt, match["rest"].split())
    if match and skill in ("position", "verb"):
        return _relation(prompt, match["rest"].split())
    return None


def _existence(prompt: str, words: list[str]) -> Located | None:
    for span in _mentions(prompt, " ".join(words)):
        return Located((span,), (_name(prompt, span),))
    return None


def _count(prompt: str, words: list[str], answer: str) -> Located | None:
    for span in _mentions(prompt, " ".join(words)):
        for word in _phrase_before(prompt, span[0]):
            if NUMBERS.get(word.group().lower(), -1) == NUMBERS.get(answer.lower()):
                return Located((word.span(), span), (_name(prompt, span),), NUMBERS[answer.lower()])
    return None


def _attribute(prompt: str, words: list[str]) -> Located | None:
    """``cats red``: cut where the prompt has the second part in front of the first, within one noun phrase."""
    for cut in range(len(words) - 1, 0, -1):
        things, attribute = " ".join(words[:cut]), " ".join(words[cut:])
        for noun in _mentions(prompt, things):
            phrase = [word.start() for word in _phrase_before(prompt, noun[0])]
            for found in _whole_words(attribute).finditer(prompt, min(phrase, default=noun[0]), noun[0]):
                if found.start() in phrase:
                    return Located((found.span(), noun), (_name(prompt, noun),), attribute)
    return None


def _relation(prompt: str, words: list[str]) -> Located | None:
    """``cats on top of the table``: cut so that the prompt has both ends and, best between them, the predicate."""
    cuts = [
        (" ".join(words[:i]), " ".join(words[i:j]), " ".join(words[j + 1 :]))
        for j in range(2, len(words) - 1)
        if words[j] == "the"
        for i in range(1, j)
    ]
    # "the teddy bear next to the dog" can be cut in the wrong place; a predicate that is known is the right one.
    cuts.sort(key=lambda cut: not (cut[1] in AXES or cut[1] in UNORDERED or cut[1].split()[0].endswith("ing")))
    for subject, predicate, other in cuts:
        subjects, others = list(_mentions(prompt, subject)), list(_mentions(prompt, other))
        found = [match.span() for match in _whole_words(predicate).finditer(prompt)]
        triples = [(s, p, o) for p in found for s in subjects for o in others if s != o]
        if triples:
            spans = min(triples, key=lambda spans: (not spans[0] < spans[1] < spans[2], abs(spans[1][0] - spans[0][1])))
            return Located(spans, (_name(prompt, spans[0]), _name(prompt, spans[2])), predicate)
    return None


def _name(prompt: str, mention: Span) -> str:
    """The noun of a mention in the singular."""
    noun = prompt[slice(*mention)].lower()
    determiners = [NUMBERS.get(word.group().lower()) for word in _phrase_before(prompt, mention[0])]
    # What one is of is in the singular: "a bus" is no plural of "bu".
    return noun if 1 in determiners else singular(noun)


def _mentions(prompt: str, things: str) -> Iterator[Span]:
    """Spans of ``things`` in the prompt, in the singular or plural, first mention first; none of ``""``."""
    if not things:  # a question with blanks where its noun should be
        return
    forms = {things, singular(things.lower()), plural(singular(things.lower()))}
    for match in _whole_words(*forms).finditer(prompt):
        yield match.span()


def _whole_words(*phrases: str) -> re.Pattern[str]:
    longest_first = sorted(phrases, key=lambda phrase: (-len(phrase), phrase))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)


def _phrase_before(prompt: str, end: int) -> Iterator[re.Match[str]]:
    """The words in front of a noun that starts at ``end``, nearest first, up to and including its determiner."""
    at = end
    for word in reversed(list(re.finditer(r"[\w'-]+", prompt[:end]))):
        if prompt[word.end() : at].strip(" ,"):
            return
        yield word
        if word.group().lower() in _ENDS_PHRASE:
            return
        at = word.start()
