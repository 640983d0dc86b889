"""What a judge asks about one image: a question per atom, and the captions in which the atoms' words stand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from cast_rl.judges.answers import AnswerMode, answer_tokens
from cast_rl.judges.chat import Branch, Chat, tokens_of
from cast_rl.scene_graph import Atom


@dataclass(frozen=True)
class Asked:
    """The branches about one image with K atoms.

    Args:
        captions: one per different prompt among the atoms.
        questions: one per atom.
        answers: per atom the token ids whose probabilities are summed.
        words: per atom the index of its caption and the tokens there that stand for it; ``(None, ())`` without one.
    """

    captions: tuple[Branch, ...]
    questions: tuple[Branch, ...]
    answers: tuple[tuple[int, ...], ...]
    words: tuple[tuple[int | None, tuple[int, ...]], ...]

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Captions, then questions."""
        return self.captions + self.questions

    @property
    def lengths(self) -> list[int]:
        """Tokens of each branch."""
        return [len(branch.ids) for branch in self.branches]


class Asker:
    """Turns atoms into branches.

    Args:
        chat: the model's texts.
        mode: which spellings of an answer count, see `cast_rl.judges.answers`.
        query: which tokens stand for a word, see `cast_rl.judges.chat.tokens_of`; None for no captions.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, chat: Chat, mode: AnswerMode, query: str | None) -> None:
        self.chat, self.mode, self.query = chat, mode, query
        answer_tokens(chat.tokenizer, "", "Yes", mode)  # an unknown mode is refused now
        self._answers: dict[tuple[str, str], tuple[int, ...]] = {}
        self._said: set[str] = set()

    def __call__(self, atoms: Sequence[Atom]) -> Asked:
        """The branches of one image's atoms.

        Raises:
            ValueError: a special token in a question or prompt, or an answer that no token stands for.
        """
        prompts = [] if self.query is None else list(dict.fromkeys(atom.prompt for atom in atoms if atom.prompt))
        captions = tuple(map(self.chat.caption, prompts))
        words = []
        for atom in atoms:
            at = prompts.index(atom.prompt) if atom.prompt in prompts else None
            words.append((at, () if at is None else self._words(atom, captions[at])))
            if at is None and self.query is not None:
                self._say_once("prompt", f"the atom {atom.question!r} names no prompt, so it has no evidence")
        questions = tuple(self.chat.question(atom.question) for atom in atoms)
        return Asked(captions, questions, tuple(map(self._answer, atoms)), tuple(words))

    def _words(self, atom: Atom, caption: Branch) -> tuple[int, ...]:
        found = tokens_of(caption, atom.spans, self.query)
        if not found:
            self._say_once(
                "words",
                f"no words of the prompt {atom.prompt!r} state the atom {atom.question!r}; the whole prompt counts as "
                "its words, for this and all such atoms",
            )
            found = tokens_of(caption, ((0, len(atom.prompt)),), self.query)
        return tuple(found)

    def _answer(self, atom: Atom) -> tuple[int, ...]:
        key = (atom.question, atom.answer)
        if key not in self._answers:
            self._answers[key] = tuple(answer_tokens(self.chat.tokenizer, *key, self.mode))
        return self._answers[key]

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)
