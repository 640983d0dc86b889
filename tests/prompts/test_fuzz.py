"""No file of prompts, however broken, ends ``check`` or ``show`` with a traceback: each bad line is named instead."""

import json
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import ROW

from cast_rl.prompts import PromptFileError, PromptSet, load_prompts, read_geneval2, read_prompts
from cast_rl.prompts.__main__ import main
from cast_rl.prompts.files import to_json
from cast_rl.scene_graph import Entity, Relation, SceneGraph
from cast_rl.wording import article, plural, singular

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_CATS = (Entity("cat", 2, ("red", "wooden")), Entity("dog"), Entity("cat", None, ("blue",)))
(_PROMPT,) = PromptSet.from_graphs([SceneGraph(_CATS, (Relation(0, "left of", 1),))])
OURS = to_json(_PROMPT)
# As by hand, so that every field is there to be spoiled.
WHOLE = OURS | {
    "atoms": [
        {"skill": a.skill, "question": a.question, "answer": a.answer, "parents": list(a.parents), "value": a.value}
        | ({"spans": [list(span) for span in a.spans]} if k % 2 else {})
        for k, a in enumerate(_PROMPT.atoms)
    ]
}


def nested(depth):
    """Lists in lists. Those about as deep as Python's stack get through its JSON reader, and fail behind it."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


def spoiled(row, path, value):
    """``row`` with ``value`` at ``path``, a list of names and positions."""
    row = deepcopy(row)
    *way, last = path
    inner = row
    for step in way:
        inner = inner[step]
    inner[last] = value
    return row


def paths(value, path=()):
    """Every way into a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in inside:
        yield (*path, step)
        yield from paths(inner, (*path, step))


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["prompt", "graph", "atoms", "entities", "noun", "skills"]), inner, max_size=4),
    ),
    max_leaves=12,
)
# What once came through, or nearly: whole numbers written as fractions, blank words, and what inflection trips over.
odd = st.one_of(
    st.integers(-1, 4).map(float),
    st.sampled_from(["", " ", " red", "cat\n", "cat\r", "a  b", "\x85", "-in-law", "x--of-", "\u200b", "Yes", "two"]),
    st.sampled_from(["Are there any   in the image?", "How many  in the image?", "Are the cats on the  ?"]),
    st.sampled_from([[[0.0, 3.0]], [[0, 3]], [[3, 3]], [0, 0], [0.0]]),
)


def run(path, capsys):
    """Exit status and messages of ``check`` and ``show``, which must agree."""
    ends = []
    for command in ("check", "show"):
        ends.append((main([command, str(path)]), capsys.readouterr().err))
    assert ends[0] == ends[1]
    return ends[0]


@few
@given(row=values, change=st.tuples(st.sampled_from(sorted(ROW)), values), cut=st.integers(0, 300),
       junk=st.binary(max_size=8))  # fmt: skip
def test_no_file_crashes_the_readers(row, change, cut, junk, tmp_path, capsys):
    path = tmp_path / "any.jsonl"
    lines = [json.dumps(value).encode() for value in (row, ROW | dict([change]))]
    for data in (*lines, lines[1][:cut] + junk + lines[1][cut:], lines[1][:cut]):
        path.write_bytes(data)
        status, message = run(path, capsys)
        assert (status == 1) == message.startswith(f"error: {path} has ")
        for read in (read_prompts, read_geneval2, load_prompts):
            try:
                assert isinstance(read(path), PromptSet)
            except ValueError as error:
                assert str(path) in str(error)


@settings(few, max_examples=200)
@given(data=st.data())
def test_a_good_line_with_one_odd_value_is_read_or_named(data, tmp_path, capsys):
    row = data.draw(st.sampled_from([OURS, WHOLE, ROW]))
    row = spoiled(row, data.draw(st.sampled_from(list(paths(row)))), data.draw(st.one_of(odd, values)))
    path = tmp_path / "any.jsonl"
    path.write_text(json.dumps(row))
    status, message = run(path, capsys)
    assert status == 0 or message.startswith(f"error: {path} has 1 bad line; mend or remove them:\n  line 1: ")


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("abinoflwsy-' é.\x001\u0301"), min_size=1, max_size=9).filter(str.strip))
def test_every_word_has_forms(text):
    assert plural(text) and singular(text)
    if text.split(" ")[0]:
        assert article(text.split(" ")[0]) in ("a", "an")


BAD = [
    (spoiled(OURS, ("graph", "relations", 0, "subject"), 0.0), "graph.relations[0].subject: 0.0 is not of type"),
    (spoiled(OURS, ("graph", "entities", 0, "count"), 2.0), "graph.entities[0].count: 2.0 is not of type 'integer'"),
    (spoiled(WHOLE, ("atoms", 1, "spans"), [[0, 3.0]]), "atoms[1].spans[0][1]: 3.0 is not of type 'integer'"),
    (spoiled(WHOLE, ("atoms", 1, "parents"), [0.0]), "atoms[1].parents[0]: 0.0 is not of type 'integer'"),
    (spoiled(OURS, ("graph", "entities", 0, "attributes", 0), " red"), "graph.entities[0].attributes[0]: ' red' is"),
    (spoiled(OURS, ("graph", "entities", 1, "noun"), " cat"), "graph.entities[1].noun: ' cat' is not words with"),
    (spoiled(OURS, ("graph", "entities", 1, "noun"), "cat\n"), r"graph.entities[1].noun: 'cat\n' is not words"),
    (spoiled(OURS, ("graph", "entities", 1, "noun"), ""), "graph.entities[1].noun: '' is not words"),
    (spoiled(OURS, ("graph", "relations", 0, "predicate"), "on "), "graph.relations[0].predicate: 'on ' is not words"),
    (spoiled(OURS, ("prompt",), " "), "prompt: ' ' is not text with something in it"),
]  # fmt: skip


def test_words_and_numbers_that_are_none_are_named_all_at_once(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row, _ in [*BAD, (OURS, "")]))
    status, message = run(path, capsys)
    assert status == 1 and f"{path} has {len(BAD)} bad lines" in message
    for number, (_, what) in enumerate(BAD, start=1):
        assert f"line {number}: {what}" in message


def test_lines_nested_as_deep_as_the_stack_are_named(tmp_path, capsys):
    path = tmp_path / "deep.jsonl"
    for row, field in ((WHOLE, ("graph",)), (WHOLE, ("atoms", 0, "value")), (ROW, ("skills",)), (ROW, ("prompt",))):
        depths = range(940, 1000, 3)
        text = [json.dumps(spoiled(row, field, 0)).replace('": 0,', '": %s,' % ("[" * d + "]" * d), 1) for d in depths]
        path.write_text("\n".join(text))
        status, message = run(path, capsys)
        assert status == 1 and f"{path} has {len(depths)} bad lines" in message
    with pytest.raises(PromptFileError, match="line 1: too deeply nested"):
        path.write_text("[" * 5000 + "]" * 5000)
        read_prompts(path)


def test_a_question_about_nothing_has_no_words(tmp_path, capsys):
    path = tmp_path / "blank.jsonl"
    questions = ["Are there any   in the image?", "How many   are in the image?", "Is the   ?", "Is the on the  ?"]
    skills = ["object", "count", "attribute", "position"]
    row = {"prompt": "a cat", "atom_count": 4, "vqa_list": [[q, "one"] for q in questions], "skills": skills}
    path.write_text(json.dumps(row))
    assert run(path, capsys) == (0, "")
    assert not any(atom.spans for atom in read_geneval2(path)[0].atoms)


def test_a_long_chain_of_atoms_is_shown(tmp_path, capsys):
    path = tmp_path / "chain.jsonl"
    fact = {"skill": "object", "question": "Are there any cats in the image?", "answer": "Yes"}
    atoms = [fact | {"parents": [k - 1] if k else []} for k in range(1000)]
    path.write_text(json.dumps({"prompt": "a cat", "atoms": atoms}))
    assert main(["show", str(path)]) == 0
    assert "999 object" in capsys.readouterr().out.splitlines()[-1]
