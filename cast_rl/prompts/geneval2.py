"""Reading GenEval 2's benchmark data (arXiv 2512.16853): JSON lines of prompt, atom_count, vqa_list and skills."""

from __future__ import annotations

from os import PathLike
from typing import Any

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.jsonl import Problem, read_lines
from cast_rl.prompts.spans import Located, locate
from cast_rl.scene_graph import Atom, Entity

SKILLS = ("object", "attribute", "count", "position", "verb")


def read_geneval2(path: str | PathLike) -> PromptSet:
    """The prompts of a file in GenEval 2's format, with the words that state each atom recovered.

    Atoms come in causal order, as everywhere in this library: each thing's object atom, then its others in the file's
    order, then the relations. An atom whose words are not found has no spans; see `unlocated`.

    Raises:
        PromptFileError: lists every bad line.
    """
    return PromptSet(read_lines(path, _prompt))


def unlocated(prompts: PromptSet) -> list[tuple[int, Atom]]:
    """Prompt index and atom of every fact (but those about a whole scene) whose words were not found."""
    return [(i, a) for i, prompt in enumerate(prompts) for a in prompt.atoms if not a.spans and a.skill != "scene"]


def _prompt(row: Any) -> Prompt:
    _check(row)
    text = row["prompt"]
    asked = [(skill, *pair) for skill, pair in zip(row["skills"], row["vqa_list"], strict=True)]
    found = [locate(text, *question) for question in asked]
    entities = _entities(asked, found)
    order = sorted(range(len(asked)), key=lambda k: _causal_order(asked[k][0], found[k], list(entities)))
    object_of: dict[str, int] = {}
    atoms = []
    for k in order:
        (skill, question, answer), at = asked[k], found[k] or Located((), ())
        if skill == "object" and at.nouns:
            object_of.setdefault(at.nouns[0], len(atoms))
        parents = () if skill == "object" else tuple(object_of[noun] for noun in at.nouns if noun in object_of)
        about = tuple(entities[noun] for noun in at.nouns if noun in entities)
        atoms.append(Atom(skill, question, answer, text, at.spans, parents, about, at.value))
    return Prompt(text, tuple(atoms))


def _entities(asked: list[tuple[str, str, str]], found: list[Located | None]) -> dict[str, Entity]:
    """The things that a prompt's facts are about, by noun, in the order in which they are first asked about."""
    counts: dict[str, int | None] = {}
    attributes: dict[str, list[str]] = {}
    for (skill, _, _), at in zip(asked, found, strict=True):
        for noun in at.nouns if at else ():
            counts.setdefault(noun, None)
        if at and skill == "count":
            counts[at.nouns[0]] = at.value
        if at and skill == "attribute":
            attributes.setdefault(at.nouns[0], []).append(at.value)
    return {noun: Entity(noun, count, tuple(attributes.get(noun, ()))) for noun, count in counts.items()}


def _causal_order(skill: str, at: Located | None, nouns: list[str]) -> tuple[bool, int, bool]:
    """Sorts things as they are asked about, a thing's existence before its other facts, and relations last."""
    last = at is None or not at.nouns or skill in ("position", "verb")
    return last, 0 if last else nouns.index(at.nouns[0]), not last and skill != "object"


def _check(row: Any) -> None:
    if not isinstance(row, dict):
        raise Problem("", f"expected an object, got {type(row).__name__}")
    missing = [name for name in ("prompt", "atom_count", "vqa_list", "skills") if name not in row]
    if missing:
        raise Problem(missing[0], f"is missing; the line has {sorted(row) or 'no field'}")
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise Problem("prompt", f"expected text, got {row['prompt']!r}")
    if type(row["atom_count"]) is not int or row["atom_count"] < 1:
        raise Problem("atom_count", f"expected a whole number of at least 1, got {row['atom_count']!r}")
    for name in ("vqa_list", "skills"):
        if not isinstance(row[name], list) or not row[name]:
            raise Problem(name, f"expected a list that is not empty, got {row[name]!r}")
    for k, pair in enumerate(row["vqa_list"]):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) and x.strip() for x in pair)):
            raise Problem(f"vqa_list[{k}]", f"expected a question and an answer, got {pair!r}")
    for k, skill in enumerate(row["skills"]):
        if skill not in SKILLS:
            raise Problem(f"skills[{k}]", f"expected one of {', '.join(SKILLS)}; got {skill!r}")
    if len(row["skills"]) != len(row["vqa_list"]):
        raise Problem("skills", f"has {len(row['skills'])} entries for {len(row['vqa_list'])} of vqa_list")
