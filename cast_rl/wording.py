"""English word forms, by the inflect library; every form is worked out once."""

from __future__ import annotations

from functools import cache

import inflect


@cache
def _inflect() -> inflect.engine:
    return inflect.engine()


@cache
def plural(noun: str) -> str:
    """The plural of a noun: ``plural("cross") == "crosses"``, ``plural("sheep") == "sheep"``."""
    return _inflect().plural_noun(noun)


@cache
def singular(noun: str) -> str:
    """The singular of a plural, and a noun that is not a plural as it is: ``singular("knives") == "knife"``."""
    return _inflect().singular_noun(noun) or noun


@cache
def number_word(n: int) -> str:
    """A count as a word: ``number_word(3) == "three"``."""
    return _inflect().number_to_words(n)


@cache
def article(word: str) -> str:
    """The indefinite article before a word: ``article("orange") == "an"``, ``article("unicorn") == "a"``."""
    return _inflect().a(word).split()[0]
