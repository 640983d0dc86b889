"""Files of prompts: nothing is lost, every bad line is named, and no file crashes the reader."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import ROW, loose_prompts

from cast_rl.prompts import Prompt, PromptFileError, PromptSet, load_prompts, read_geneval2, read_prompts, write_prompts
from cast_rl.prompts.__main__ import main
from cast_rl.prompts.geneval2 import unlocated
from cast_rl.scene_graph import Entity, SceneGraph

GENEVAL2 = Path(os.environ.get("GENEVAL2", Path(__file__).parents[3] / "shared/geneval2/geneval2_data.jsonl"))
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def words(atom):
    return [atom.prompt[start:end] for start, end in atom.spans]


def test_geneval2s_atoms_get_words_and_parents(tmp_path):
    path = tmp_path / "benchmark.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    (prompt,) = read_geneval2(path)
    assert [(a.skill, words(a), a.parents, a.value) for a in prompt.atoms] == [
        ("object", ["sheeps"], (), None),
        ("count", ["three", "sheeps"], (0,), 3),
        ("object", ["bus"], (), None),
        ("count", ["a", "bus"], (2,), 1),
        ("attribute", ["red", "bus"], (2,), "red"),
        ("object", ["box"], (), None),
        ("verb", ["sheeps", "chasing", "bus"], (0, 2), "chasing"),
    ]
    assert prompt.atomicity == ROW["atom_count"]
    assert prompt.atoms[-1].entities == (Entity("sheep", 3), Entity("bus", 1, ("red",)))


def test_facts_that_a_prompt_does_not_state_are_listed(tmp_path):
    path = tmp_path / "benchmark.jsonl"
    path.write_text(json.dumps(ROW | {"prompt": "three sheeps chasing a blue bus"}) + "\n")
    prompts = read_geneval2(path)
    assert [(i, a.question) for i, a in unlocated(prompts)] == [
        (0, "Is the bus red?"), (0, "Are there any boxes in the image?"),
    ]  # fmt: skip


@pytest.mark.skipif(not GENEVAL2.is_file(), reason="GenEval 2's data is not there; GENEVAL2 names its path")
def test_all_of_geneval2_is_read_and_its_words_are_found():
    rows = [json.loads(line) for line in GENEVAL2.read_text().splitlines()]
    prompts = read_geneval2(GENEVAL2)
    atoms = [a for p in prompts for a in p.atoms]
    assert len(prompts) == 800 and len(atoms) == 6012
    assert [p.atomicity for p in prompts] == [row["atom_count"] for row in rows]
    lost = unlocated(prompts)
    print(*lost, sep="\n")
    assert len(lost) <= 0.02 * len(atoms)
    for prompt, row in zip(prompts, rows, strict=True):
        assert sorted((a.question, a.answer) for a in prompt.atoms) == sorted(map(tuple, row["vqa_list"]))
        for atom in prompt.atoms:
            if atom.skill in ("attribute", "position", "verb"):
                assert atom.value in words(atom) and atom.value in atom.question
            assert len(atom.parents) == {"object": 0, "position": 2, "verb": 2}.get(atom.skill, 1)
    assert load_prompts(GENEVAL2, 20, seed=1).texts != prompts[:20].texts


@few
@given(prompts=st.lists(loose_prompts(), min_size=1, max_size=3))
def test_write_then_read_is_the_identity(prompts, tmp_path):
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, prompts)
    assert list(read_prompts(path)) == prompts
    assert list(load_prompts(path)) == prompts


def test_sampled_prompts_are_written_without_their_atoms_and_read_with_them(tmp_path):
    prompts = PromptSet.sample(40, seed=0)
    write_prompts(tmp_path / "a.jsonl", prompts)
    assert "atoms" not in (tmp_path / "a.jsonl").read_text()
    assert list(read_prompts(tmp_path / "a.jsonl")) == list(prompts)


def test_a_line_by_hand_needs_neither_spans_nor_a_graph(tmp_path):
    atoms = [
        {"skill": "object", "question": "Are there any foxes in the image?", "answer": "Yes"},
        {"skill": "attribute", "question": "Is the fox sad?", "answer": "Yes", "parents": [0]},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a very sad fox", "atoms": atoms}))
    (prompt,) = read_prompts(tmp_path / "a.jsonl")
    assert [words(a) for a in prompt.atoms] == [["fox"], ["sad", "fox"]]


NONE = {"entities": [{"noun": "cat", "count": 0}]}
GRAPH = {"entities": [{"noun": "cat"}]}
ATOM = {"skill": "object", "question": "Are there any cats in the image?", "answer": "Yes"}
BAD = [
    ('{"prompt": "a cat"', "not JSON"),
    ("[1]", "not of type 'object'"),
    ('"a cat"', "not of type 'object'"),
    (json.dumps({"prompt": "a cat"}), "neither a graph nor atoms"),
    (json.dumps({"prompt": 3, "graph": GRAPH}), "prompt: 3 is not of type 'string'"),
    (json.dumps({"prompt": "a dog", "graph": GRAPH}), "prompt: the graph reads 'a cat'"),
    (json.dumps({"prompt": "a cat", "graph": {"entities": [{"noun": "cat"}] * 2}}), "graph: nothing tells"),
    (json.dumps({"prompt": "a cat", "graph": NONE}), r"graph.entities\[0\].count"),
    (json.dumps({"prompt": "a cat", "graph": GRAPH, "seed": 3}), "'seed' was unexpected"),
    (json.dumps({"prompt": "a cat", "atoms": [ATOM | {"answer": 5}]}), r"atoms\[0\].answer: 5 is not"),
    (json.dumps({"prompt": "a cat", "atoms": [ATOM | {"spans": [[2, 9]]}]}), r"atoms\[0\].spans: \[2, 9\] is no part"),
    (json.dumps({"prompt": "a cat", "atoms": [ATOM | {"parents": [0]}]}), r"atoms\[0\].parents: 0 is no earlier atom"),
    ('{"prompt": "a cat", "prompt": "a dog"}', "prompt: is given twice"),
    ('{"prompt": "a cat", "graph": NaN}', "NaN is not a value"),
    ('{"prompt": "\\ud800", "atoms": []}', "half of a surrogate pair"),
    ("[" * 100_000, "too deeply nested"),
    ("9" * 5000, "cannot|can be read"),
    (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    (b'{"prompt": "' + b"x" * 10_000_000 + b'", "atoms": []}', "bytes long"),
]  # fmt: skip


def test_every_bad_line_is_named_at_once_with_its_field(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    good = json.dumps({"prompt": "a cat", "graph": GRAPH}).encode()
    lines = [text.encode() if isinstance(text, str) else text for text, _ in BAD]
    path.write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, b"", *lines, good]))
    with pytest.raises(PromptFileError) as error:
        read_prompts(path)
    assert [number for number, _ in error.value.problems] == list(range(3, 3 + len(BAD)))
    for (_, problem), (_, message) in zip(error.value.problems, BAD, strict=True):
        with pytest.raises(ValueError, match=message):
            raise problem
    assert str(path) in str(error.value) and f"{len(BAD)} bad lines" in str(error.value)
    assert len(str(error.value)) < 400 * len(BAD), "a long value is not printed whole"
    assert main(["check", str(path)]) == 1
    assert "line 3: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "prompt: expected text"),
        ({"atom_count": True}, "atom_count: expected a whole number"),
        ({"vqa_list": [["How many?"]] * 7}, r"vqa_list\[0\]: expected a question and an answer"),
        ({"skills": ["verb"]}, "skills: has 1 entries for 7"),
        ({"skills": ["colour"] * 7}, r"skills\[0\]: expected one of"),
        ({"skills": [[]] * 7}, r"skills\[0\]: expected one of"),
        ({"vqa_list": {}}, "vqa_list: expected a list"),
    ],
)
def test_bad_lines_of_geneval2_are_named(tmp_path, change, message):
    path = tmp_path / "benchmark.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n" + json.dumps({"prompt": "a"}))
    with pytest.raises(
        PromptFileError, match=f"2 bad lines(.|\n)*line 2: {message}(.|\n)*line 3: atom_count: is missing"
    ):
        read_geneval2(path)


def test_empty_and_missing_files(tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="no prompt in it"):
        load_prompts(path)
    assert main(["check", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_atoms_of_another_text_are_not_written(tmp_path):
    stray = Prompt("a dog", SceneGraph((Entity("cat"),)).atoms())
    with pytest.raises(ValueError, match="indexes into another text"):
        write_prompts(tmp_path / "a.jsonl", [stray])


def test_loading_says_what_it_needs(tmp_path):
    (tmp_path / "a.txt").write_text("two cats\n\na dog\n")
    made = load_prompts(tmp_path / "a.txt", parser=lambda texts: PromptSet(Prompt(t, ()) for t in texts))
    assert made.texts == ["two cats", "a dog"]
    for arguments, message in [
        (("common",), "say how many"),
        ((tmp_path / "a.txt",), "pass a parser"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_prompts(*arguments)
    write_prompts(tmp_path / "a.jsonl", PromptSet.sample(3, seed=0))
    with pytest.raises(ValueError, match="has 3 prompts, fewer than the 4"):
        load_prompts(tmp_path / "a.jsonl", 4)
    with pytest.raises(ValueError, match="atomicity is only for"):
        load_prompts(tmp_path / "a.jsonl", atomicity=3)
    write_prompts(tmp_path / "one.jsonl", PromptSet.sample(1, seed=0))
    with pytest.raises(ValueError, match="none of the 1 prompts of .*one.jsonl is (held out|to train on)"):
        [load_prompts(tmp_path / "one.jsonl", held_out=held_out) for held_out in (True, False)]


def test_a_files_held_out_prompts_do_not_depend_on_what_else_is_in_it(tmp_path):
    whole = PromptSet.sample(300, seed=0)
    write_prompts(tmp_path / "whole.jsonl", whole)
    write_prompts(tmp_path / "half.jsonl", PromptSet(whole[:150]))
    train, held_out = (load_prompts(tmp_path / "whole.jsonl", held_out=held) for held in (False, True))
    assert not set(train.texts) & set(held_out.texts) and set(train.texts) | set(held_out.texts) == set(whole.texts)
    assert 0.1 < len(held_out) / len(whole) < 0.3
    half = load_prompts(tmp_path / "half.jsonl", held_out=True)
    assert set(half.texts) == set(held_out.texts) & set(whole.texts[:150])
    with pytest.raises(ValueError, match="held-out prompts, fewer than the 200"):
        load_prompts(tmp_path / "whole.jsonl", 200, held_out=True)
