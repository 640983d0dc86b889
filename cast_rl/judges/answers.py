"""Which tokens count as the right answer to an atom's question (Soft-TIFA, GenEval 2, arXiv 2512.16853).

The score of an atom is the probability of these tokens, summed, as the first token of the answer.

``official`` is GenEval 2's published protocol to the letter. It takes the *first* token of every spelling, so " 3", two
tokens in Qwen's vocabulary, counts the lone space, and "10" counts "1"; a token that two spellings begin with counts
twice; a number beyond ten stands for the digit string "other"; whatever is no count question is right if it is "Yes",
whatever its answer.

``robust`` counts each token once, and a spelling only if it is one token.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedTokenizerBase

from cast_rl.scene_graph import number_word

AnswerMode = Literal["official", "robust"]
MODES: tuple[str, ...] = ("official", "robust")
DIGITS = {number_word(n): str(n) for n in range(1, 11)}
YES = ("Yes", "yes", " yes", " Yes")


def official_spellings(question: str, answer: str) -> list[str]:
    """GenEval 2's list for a question, in its order (``tifa`` in facebookresearch/GenEval2, evaluation.py)."""
    if not question.startswith("How many"):
        return list(YES)
    digits = DIGITS.get(answer, "other")
    return [answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", digits, f" {digits}"]


def robust_spellings(answer: str) -> list[str]:
    """An answer in lower case, capitalised and in capitals, and its digits up to ten; with and without a space."""
    words = [answer.lower(), answer.capitalize(), answer.upper()]
    if answer.lower() in DIGITS:
        words.append(DIGITS[answer.lower()])
    return list(dict.fromkeys(spelling for word in words for spelling in (word, f" {word}")))


def answer_tokens(tokenizer: PreTrainedTokenizerBase, question: str, answer: str, mode: AnswerMode) -> list[int]:
    """The token ids whose probabilities are summed; ``official`` keeps duplicates, which count as often.

    Raises:
        ValueError: an unknown mode; an empty answer; in ``robust`` mode an answer no spelling of which is one token.
    """
    if mode not in MODES:
        raise ValueError(f"answers={mode!r} is no answer mode; use one of {', '.join(MODES)}")
    if not answer.strip():
        raise ValueError(f"the atom {question!r} has the empty answer {answer!r}; give the word that means it holds")
    if mode == "official":
        return [tokenizer.encode(s, add_special_tokens=False)[0] for s in official_spellings(question, answer)]
    spellings = robust_spellings(answer)
    encoded = [tokenizer.encode(s, add_special_tokens=False) for s in spellings]
    ids = list(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1))
    if not ids:
        raise ValueError(
            f"no spelling of the answer {answer!r} to {question!r} is one token of this tokenizer (tried {spellings}); "
            "word the question so that one token answers it, or use answers='official', which reads first tokens"
        )
    return ids
