"""Prompts with the atoms that verify them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import overload

from cast_rl.prompts.sampler import Balanced, sample_graphs
from cast_rl.prompts.vocabulary import Vocabulary, load_vocabulary
from cast_rl.scene_graph import Atom, SceneGraph


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, its atoms, and the scene graph it came from, if any."""

    text: str
    atoms: tuple[Atom, ...]
    graph: SceneGraph | None = None

    @property
    def atomicity(self) -> int:
        """How many facts the words state, as GenEval 2 counts: an article ("a cat") is none, a number is."""
        return sum(atom.skill != "scene" and not (atom.skill == "count" and atom.value == 1) for atom in self.atoms)

    @classmethod
    def from_graph(cls, graph: SceneGraph) -> Prompt:
        atoms = graph.atoms()
        return cls(atoms[0].prompt, atoms, graph)


class PromptSet(Sequence[Prompt]):
    """An immutable list of prompts. A prompt's position is its ``prompt_id`` everywhere in this library.

    Raises:
        ValueError: there is no prompt.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = tuple(prompts)
        if not self._prompts:
            raise ValueError("a PromptSet needs at least one prompt")

    @classmethod
    def from_graphs(cls, graphs: Iterable[SceneGraph]) -> PromptSet:
        return cls(Prompt.from_graph(g) for g in graphs)

    @classmethod
    def sample(
        cls,
        n: int,
        *,
        seed: int,
        atomicity: int | Iterable[int] = range(3, 11),
        skills: Iterable[str] | None = None,
        vocabulary: str | PathLike | Vocabulary = "common",
        held_out: bool | None = None,
    ) -> PromptSet:
        """``n`` different prompts; a function of the arguments.

        Every atomicity comes equally often. The facts besides the things themselves are divided among the skills as
        evenly as prompts allow.

        Args:
            n: how many.
            seed: of the draws.
            atomicity: how many facts a prompt states (see `SceneGraph.atomicity`): a number, or several.
            skills: what prompts may have facts of, of ``"object"`` (always), ``"attribute"``, ``"count"``,
                ``"position"`` and ``"verb"``; None for all that the vocabulary has. Without ``"count"``, numbers are
                left open ("some cats").
            vocabulary: ``"common"``, ``"miniature"``, a YAML file, or a vocabulary.
            held_out: True: every prompt has a pair of words that no prompt of ``held_out=False`` has, whatever the
                seed; None: anything.

        Raises:
            ValueError: a skill without words; no number of facts, or one below 1; fewer prompts exist than ``n``.
        """
        words = load_vocabulary(vocabulary)
        atomicities = [atomicity] if isinstance(atomicity, int) else list(atomicity)
        layout = Balanced(words, atomicities, tuple(skills) if skills is not None else words.skills)
        return cls.from_graphs(sample_graphs(random.Random(seed), n, words, layout, held_out))

    @property
    def texts(self) -> list[str]:
        return [p.text for p in self._prompts]

    @property
    def max_atoms(self) -> int:
        return max(len(p.atoms) for p in self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptSet: ...
    def __getitem__(self, index):
        return PromptSet(self._prompts[index]) if isinstance(index, slice) else self._prompts[index]
