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
    # What is still to be written, next one last. Not by recursion: a file may chain a thousand atoms.
    ahead: list[tuple[int, str, bool]] = []

    def put(below: list[int], indent: str) -> None:
        ahead.extend((k, indent, k == below[-1]) for k in reversed(below))

    put(children[None], "")
    while ahead:
        k, indent, last = ahead.pop()
        atom = atoms[k]
        words = " ".join(repr(prompt.text[start:end]) for start, end in atom.spans) or "(no words)"
        after = f"  after {', '.join(map(str, atom.parents))}" if len(atom.parents) > 1 else ""
        lines.append(
            f"{indent}{'└─' if last else '├─'} {k} {atom.skill}: {atom.question} {atom.answer}  {words}{after}"
        )
        put(children.get(k, []), indent + ("   " if last else "│  "))
    return "\n".join(lines)
