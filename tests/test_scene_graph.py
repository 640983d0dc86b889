"""Scene graphs: words, spans, questions, parents, and what is refused."""

import random

import pytest

from cast_rl.miniature.vocabulary import sample_graph
from cast_rl.prompts import Prompt, PromptSet
from cast_rl.scene_graph import Entity, Relation, SceneGraph
from cast_rl.wording import plural

TWO_RED_LEFT_OF_ONE = SceneGraph(
    (Entity("circle", 2, ("red",)), Entity("square", 1, ("orange",)), Entity("cross", 3, ("green",))),
    (Relation(0, "left of", 1),),
    closed=True,
)


def words(atom) -> list[str]:
    return [atom.prompt[a:b] for a, b in atom.spans]


def test_prompt_reads_as_english():
    assert TWO_RED_LEFT_OF_ONE.render()[0] == "two red circles left of an orange square, and three green crosses"
    assert SceneGraph((Entity("knife", 3), Entity("sheep", 2))).render()[0] == "three knives and two sheep"
    assert SceneGraph((Entity("apple"), Entity("dog", None, ("big",)))).render()[0] == "an apple and some big dogs"
    three = SceneGraph((Entity("cat"), Entity("dog"), Entity("pig")))
    assert three.render()[0] == "a cat, a dog, and a pig"


def test_an_entity_mentioned_twice_is_definite_the_second_time():
    chain = SceneGraph(
        (Entity("cat"), Entity("dog"), Entity("pig")), (Relation(0, "left of", 1), Relation(1, "above", 2))
    )
    assert chain.render()[0] == "a cat left of a dog, and the dog above a pig"


def test_atoms_name_their_words_questions_answers_and_parents():
    atoms = TWO_RED_LEFT_OF_ONE.atoms()
    got = [(a.skill, a.question, a.answer, words(a), a.parents) for a in atoms]
    assert got[:3] == [
        ("object", "Are there any circles in the image?", "Yes", ["circles"], ()),
        ("attribute", "Are the circles red?", "Yes", ["red", "circles"], (0,)),
        ("count", "How many circles are in the image?", "two", ["two", "circles"], (0,)),
    ]
    assert got[4][:4] == ("attribute", "Is the square orange?", "Yes", ["orange", "square"])
    assert got[-2] == (
        "position", "Are the circles left of the square?", "Yes", ["circles", "left of", "square"], (0, 3),
    )  # fmt: skip
    assert got[-1] == ("scene", "How many objects are in the image?", "six", [], (0, 3, 6))


def test_groups_of_one_noun_are_told_apart_by_their_attribute():
    graph = SceneGraph((Entity("circle", 2, ("red",)), Entity("circle", 1, ("blue",))))
    questions = [a.question for a in graph.atoms()]
    assert "How many red circles are in the image?" in questions
    assert "Are there any blue circles in the image?" in questions
    assert all(a.qualified for a in graph.atoms())


def test_every_fact_of_sampled_graphs_has_exactly_one_atom_and_its_words():
    rng = random.Random(3)
    for _ in range(500):
        graph = sample_graph(rng)
        atoms = graph.atoms()
        expected = sum(1 + len(e.attributes) + 1 for e in graph.entities) + len(graph.relations) + 1
        assert len(atoms) == expected
        for k, atom in enumerate(atoms):
            assert all(p < k for p in atom.parents), "a parent comes before its child"
            if atom.skill == "object":
                assert words(atom) in ([atom.entities[0].noun], [plural(atom.entities[0].noun)])
            elif atom.skill in ("attribute", "position"):
                assert atom.value in words(atom)
            elif atom.skill == "count":
                assert words(atom)[0] in ("a", "an") if atom.value == 1 else words(atom)[0] == atom.answer


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SceneGraph(()), "at least one entity"),
        (lambda: SceneGraph((Entity("cat"), Entity("cat"))), "tells two entities apart"),
        (lambda: SceneGraph((Entity("cat"), Entity("cat", 1, ("red",)))), "each needs an attribute"),
        (lambda: SceneGraph((Entity("cat", 1, ("red", "big")), Entity("cat", 2, ("red",)))), "red big cat"),
        (
            lambda: SceneGraph(
                (Entity("cat"), Entity("dog"), Entity("pig")),
                (Relation(0, "left of", 1), Relation(2, "to the right of", 1), Relation(2, "left of", 0)),
            ),
            "put 'cat' before 'dog', 'dog' before 'pig', 'pig' before 'cat'",
        ),
        (
            lambda: SceneGraph(
                (Entity("cat"), Entity("box"), Entity("pig")),
                (Relation(0, "inside", 1), Relation(1, "left of", 2), Relation(0, "right of", 2)),
            ),
            "along one axis they put 'pig' before 'cat', 'cat' before 'pig'",
        ),
        (lambda: SceneGraph((Entity("cat"),), (Relation(0, "above", 1),)), "not there"),
        (lambda: SceneGraph((Entity("cat"),), (Relation(0, "above", 0),)), "to itself"),
        (
            lambda: SceneGraph((Entity("cat"), Entity("dog")), (Relation(0, "above", 1), Relation(1, "above", 0))),
            "second relation",
        ),
        (lambda: SceneGraph((Entity("cat", None),), closed=True), "states every count"),
        (lambda: Entity("cat", 0), "at least 1"),
        (lambda: Entity(" cat"), "entity's noun is words .* got ' cat'"),
        (lambda: Entity("cat", 1, ("red", "")), "entity's attribute is words .* got ''"),
        (lambda: Relation(0, "left\nof", 1), r"predicate is words .* got 'left\\nof'"),
    ],
)
def test_impossible_graphs_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_prompt_set_indexes_slices_and_refuses_nothing():
    prompts = PromptSet.from_graphs([TWO_RED_LEFT_OF_ONE, SceneGraph((Entity("cat"),))])
    assert prompts[0] == Prompt.from_graph(TWO_RED_LEFT_OF_ONE)
    assert prompts.max_atoms == 11 and prompts.texts[1] == "a cat" and len(prompts[1:]) == 1
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSet([])
