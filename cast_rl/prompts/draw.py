"""A prompt's atoms as a tree of text for the terminal."""

from __future__ import annotations

from cast_rl.prompts.base import Prompt


def tree(prompt: Prompt) -> str:
    """The prompt and, below, its atoms: each under the one it depends on, with question, answer and words.

    An atom that depends on several stands on its own and names them.
    """
    atoms = prompt.atoms
    children: dict[int | None, list[int]] = {None: []}
    for k, atom in enumerate(atoms):
        children.setdefault(atom.parents[0] if len(atom.parents) == 1 else None, []).append(k)
    lines = [prompt.text]

    def add(k: int, indent: str, last: bool) -> None:
        atom = atoms[k]
        words = " ".join(repr(prompt.text[start:end]) for start, end in atom.spans) or "(no words)"
        after = f"  after {', '.join(map(str, atom.parents))}" if len(atom.parents) > 1 else ""
        lines.append(
            f"{indent}{'└─' if last else '├─'} {k} {atom.skill}: {atom.question} {atom.answer}  {words}{after}"
        )
        below = children.get(k, [])
        for child in below:
            add(child, indent + ("   " if last else "│  "), child == below[-1])

    for k in children[None]:
        add(k, "", k == children[None][-1])
    return "\n".join(lines)
