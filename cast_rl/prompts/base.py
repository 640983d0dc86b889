"""Prompts with the atoms that verify them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from cast_rl.scene_graph import Atom, SceneGraph


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, its atoms, and the scene graph it came from, if any."""

    text: str
    atoms: tuple[Atom, ...]
    graph: SceneGraph | None = None

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
