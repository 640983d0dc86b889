"""English word forms, by the inflect library; every form is worked out once."""

from __future__ import annotations

import re
from functools import cache

import inflect

# inflect fails on a word with an empty part, such as "-in-law" or "x--of-".
_INFLECTABLE = re.compile(r"[^\s-]+(?:[ -][^\s-]+)*-?")


@cache
def _inflect() -> inflect.engine:
    return inflect.engine()


@cache
def is_phrase(text: str) -> bool:
    """Whether a text is words with single spaces between them and none around them: not ``" red"``, not ``""``."""
    return bool(text) and " ".join(text.split()) == text


@cache
def plural(noun: str) -> str:
    """The plural of a noun: ``plural("cross") == "crosses"``, ``plural("sheep") == "sheep"``.

    What is no word, such as ``"-in-law"``, has no other form than itself; likewise for `singular`.
    """
    return _inflect().plural_noun(noun) if _INFLECTABLE.fullmatch(noun) else noun


@cache
def singular(noun: str) -> str:
    """The singular of a plural, and a noun that is not a plural as it is: ``singular("knives") == "knife"``."""
    return (_inflect().singular_noun(noun) or noun) if _INFLECTABLE.fullmatch(noun) else noun


@cache
def number_word(n: int) -> str:
    """A count as a word: ``number_word(3) == "three"``."""
    return _inflect().number_to_words(n)


@cache
def article(word: str) -> str:
    """The indefinite article before a word: ``article("orange") == "an"``, ``article("unicorn") == "a"``."""
    return _inflect().a(word).split()[0]
