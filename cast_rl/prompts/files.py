"""This library's own files of prompts: JSON lines that keep everything, described by ``prompts.schema.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.jsonl import Problem, read_lines
from cast_rl.prompts.schema import check_schema
from cast_rl.prompts.spans import locate
from cast_rl.scene_graph import Atom, Entity, Relation, SceneGraph


def read_prompts(path: str | PathLike) -> PromptSet:
    """The prompts of a file as `write_prompts` writes it.

    Raises:
        PromptFileError: lists every bad line, with its field.
    """
    return PromptSet(read_lines(path, from_json))


def write_prompts(path: str | PathLike, prompts: Iterable[Prompt]) -> None:
    """Write prompts so that `read_prompts` gives equal ones.

    Atoms are written only where they are not those of the prompt's graph.

    Raises:
        ValueError: an atom belongs to another prompt's text.
    """
    lines = [json.dumps(to_json(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    Path(path).write_text("".join(lines), encoding="utf-8", newline="\n")


def to_json(prompt: Prompt) -> dict[str, Any]:
    """One line of a file, as a value of JSON."""
    row: dict[str, Any] = {"prompt": prompt.text}
    if prompt.graph is not None:
        row["graph"] = graph_to_json(prompt.graph)
        if prompt == Prompt.from_graph(prompt.graph):
            return row
    stray = [atom.question for atom in prompt.atoms if atom.prompt != prompt.text]
    if stray:
        raise ValueError(f"prompt {prompt.text!r}: its atom {stray[0]!r} indexes into another text")
    return row | {"atoms": [_atom_to_json(atom) for atom in prompt.atoms]}


def from_json(row: Any) -> Prompt:
    """The prompt of one line.

    Raises:
        Problem: names the field that is wrong.
    """
    check_schema(row, "prompts")
    text = row["prompt"]
    if "graph" not in row and "atoms" not in row:
        raise Problem("", "has neither a graph nor atoms: nothing to verify; plain texts go through a parser")
    graph = graph_from_json(row["graph"], "graph") if "graph" in row else None
    if "atoms" in row:
        return Prompt(text, tuple(_atom_from_json(atom, k, text) for k, atom in enumerate(row["atoms"])), graph)
    prompt = Prompt.from_graph(graph)
    if prompt.text != text:
        raise Problem(
            "prompt", f"the graph reads {prompt.text!r}; give the atoms, too, if the text is worded otherwise"
        )
    return prompt


def graph_to_json(graph: SceneGraph) -> dict[str, Any]:
    relations = [{"subject": r.subject, "predicate": r.predicate, "object": r.object} for r in graph.relations]
    entities = [_entity_to_json(e) for e in graph.entities]
    return {"entities": entities, "relations": relations, "closed": graph.closed}


def graph_from_json(value: dict[str, Any], name: str) -> SceneGraph:
    """The scene graph of a value that the schema allows.

    Raises:
        Problem: an impossible graph; names the field ``name``.
    """
    entities = tuple(map(_entity_from_json, value["entities"]))
    relations = tuple(Relation(**relation) for relation in value.get("relations", ()))
    try:
        return SceneGraph(entities, relations, value.get("closed", False))
    except ValueError as error:
        raise Problem(name, str(error)) from error


def _entity_to_json(e: Entity) -> dict[str, Any]:
    return {"noun": e.noun, "count": e.count, "attributes": list(e.attributes)}


def _entity_from_json(value: dict[str, Any]) -> Entity:
    return Entity(value["noun"], value.get("count", 1), tuple(value.get("attributes", ())))


def _atom_to_json(atom: Atom) -> dict[str, Any]:
    return {
        "skill": atom.skill,
        "question": atom.question,
        "answer": atom.answer,
        "spans": [list(span) for span in atom.spans],
        "parents": list(atom.parents),
        "entities": [_entity_to_json(e) for e in atom.entities],
        "value": atom.value,
        "qualified": atom.qualified,
    }


def _atom_from_json(value: dict[str, Any], k: int, text: str) -> Atom:
    parents, spans = tuple(value.get("parents", ())), tuple(map(tuple, value.get("spans", ())))
    late = [parent for parent in parents if parent >= k]
    if late:
        raise Problem(f"atoms[{k}].parents", f"{late[0]} is no earlier atom; parents come before what depends on them")
    outside = [span for span in spans if not span[0] < span[1] <= len(text)]
    if outside:
        raise Problem(f"atoms[{k}].spans", f"{list(outside[0])} is no part of the {len(text)} characters of the prompt")
    atom = Atom(
        value["skill"],
        value["question"],
        value["answer"],
        text,
        spans,
        parents,
        tuple(map(_entity_from_json, value.get("entities", ()))),
        value.get("value"),
        value.get("qualified", False),
    )
    if "spans" in value:
        return atom
    found = locate(text, atom.skill, atom.question, atom.answer)
    return replace(atom, spans=found.spans) if found else atom
