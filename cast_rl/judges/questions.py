"""What a judge asks about one image: a question per atom, and the captions in which the atoms' words stand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

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
        words: per atom the index of its caption and the tokens there that stand for it; None without a prompt.
    """

    captions: tuple[Branch, ...]
    questions: tuple[Branch, ...]
    answers: tuple[tuple[int, ...], ...]
    words: tuple[tuple[int, tuple[int, ...]] | None, ...]

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Captions, then questions."""
        return self.captions + self.questions

    @property
    def lengths(self) -> list[int]:
        return [len(branch.ids) for branch in self.branches]


class Asker:
    """Turns atoms into branches.

    Args:
        chat: the model's texts.
        tokenizer: its tokenizer.
        mode: which spellings of an answer count.
        query: which tokens stand for a word, see `cast_rl.judges.chat.tokens_of`; None for no captions.
    """

    def __init__(self, chat: Chat, tokenizer: PreTrainedTokenizerBase, mode: AnswerMode, query: str | None) -> None:
        self.chat, self.tokenizer, self.mode, self.query = chat, tokenizer, mode, query
        self._answers: dict[tuple[str, str], tuple[int, ...]] = {}
        self._said: set[str] = set()

    def __call__(self, atoms: Sequence[Atom]) -> Asked:
        """The branches of one image's atoms.

        Raises:
            ValueError: a special token in a question or prompt, or an answer that no token stands for.
        """
        prompts = [] if self.query is None else list(dict.fromkeys(a.prompt for a in atoms if a.prompt))
        captions = [self.chat.caption(prompt) for prompt in prompts]
        words = []
        for atom in atoms:
            at = prompts.index(atom.prompt) if atom.prompt in prompts else None
            words.append(None if at is None else (at, self._words(atom, captions[at])))
        if self.query is not None and None in words:
            self._say_once("an atom names no prompt to look for its words in; its evidence is zero everywhere")
        questions = tuple(self.chat.question(atom.question) for atom in atoms)
        return Asked(tuple(captions), questions, tuple(map(self._answer, atoms)), tuple(words))

    def _words(self, atom: Atom, caption: Branch) -> tuple[int, ...]:
        found = tokens_of(caption, atom.spans, self.query)
        if not found:
            self._say_once(
                f"no words of the prompt {atom.prompt!r} state the atom {atom.question!r}; the whole prompt counts as its "
                "words, for this and all such atoms"
            )
            found = tokens_of(caption, ((0, len(atom.prompt)),), self.query)
        return tuple(found)

    def _answer(self, atom: Atom) -> tuple[int, ...]:
        key = (atom.question, atom.answer)
        if key not in self._answers:
            self._answers[key] = tuple(answer_tokens(self.tokenizer, *key, self.mode))
        return self._answers[key]

    def _say_once(self, message: str) -> None:
        kind = message.split()[0]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)
