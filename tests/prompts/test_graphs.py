"""Properties of scene graphs: every fact has its atom, every atom its words, and the text its graph."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COMMON, graphs

from cast_rl.prompts import ParseError, parse
from cast_rl.prompts.spans import locate
from cast_rl.relations import AXES, contradiction, relation_skill
from cast_rl.scene_graph import Entity, Relation, SceneGraph
from cast_rl.wording import article, number_word, plural

few = settings(max_examples=60, deadline=None)


def words(atom):
    return [atom.prompt[start:end] for start, end in atom.spans]


@few
@given(st.one_of(graphs(), graphs(alike=True)))
def test_every_node_and_edge_has_exactly_its_atoms_and_every_span_states_its_fact(graph):
    atoms = graph.atoms()
    expected = []
    for e in graph.entities:
        noun, count = e.noun_form(), [] if e.count is None else [e.count]
        expected += [("object", None, [noun])]
        expected += [("attribute", word, [word, noun]) for word in e.attributes]
        first = (e.attributes or (noun,))[0]
        expected += [("count", n, [article(first.split()[0]) if n == 1 else number_word(n), noun]) for n in count]
    for r in graph.relations:
        ends = [graph.entities[i].noun_form() for i in (r.subject, r.object)]
        expected.append((relation_skill(r.predicate), r.predicate, [ends[0], r.predicate, ends[1]]))
    assert [(a.skill, a.value, words(a)) for a in atoms] == expected
    for k, atom in enumerate(atoms):
        assert all(parent < k and atoms[parent].skill == "object" for parent in atom.parents)
        assert [atoms[p].entities[0] for p in atom.parents] == list(atom.entities if atom.skill != "object" else ())


@few
@given(graphs())
def test_the_words_of_a_rendered_graph_are_found_from_its_questions(graph):
    text = graph.render()[0]
    for atom in graph.atoms():
        found = locate(text, atom.skill, atom.question, atom.answer)
        # A relation's ends may be found where they are mentioned again, next to its predicate.
        assert [text[slice(*span)] for span in found.spans] == words(atom) and found.value == atom.value
        assert len(atom.entities) > 1 or found.spans == atom.spans
        assert len(atom.entities) > 1 or found.nouns == (atom.entities[0].noun,)


@few
@given(st.one_of(graphs(), graphs(alike=True)))
def test_parsing_a_rendered_graph_gives_it_back(graph):
    assert parse(graph.render()[0], COMMON) == graph


@few
@given(graphs(alike=True))
def test_a_question_about_one_of_several_of_a_noun_can_mean_no_other(graph):
    nouns = [e.noun for e in graph.entities]
    for atom in graph.atoms():
        shared = [e for e in atom.entities if nouns.count(e.noun) > 1]
        assert atom.qualified == bool(shared)
        for e in shared if atom.skill != "object" else ():
            # Every word but the one that is asked for singles the thing out; or all of them do, if it is said to exist.
            said = set(re.findall(r"[\w-]+", atom.question)) & set(e.attributes)
            if atom.question.startswith(("Is the ", "Are the ")):
                said -= {atom.value}
            assert said and [o for o in graph.entities if o.noun == e.noun and said <= set(o.attributes)] == [e]


def test_of_three_of_a_noun_the_right_one_is_asked_about():
    looks = ("red", "metal"), ("red", "paper"), ("blue", "metal")
    graph = SceneGraph(tuple(Entity("cup", 1, look) for look in looks))
    assert graph.atoms()[1].question == "Are there any red metal cups in the image?"
    assert graph.atoms()[5].question == "Is the paper cup red?"


def test_nouns_articles_and_numbers_are_english():
    forms = {"sheep": "sheep", "knife": "knives", "child": "children", "mouse": "mice", "bus": "buses", "box": "boxes"}
    assert {noun: plural(noun) for noun in forms} == forms
    assert [article(word) for word in ("hourglass", "umbrella", "unicorn", "orange", "one-eyed")] == [
        "an", "an", "a", "an", "a",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="tells two entities apart"):
        SceneGraph((Entity("owl"), Entity("owl", 2, ("huge", "white"))))
    graph = SceneGraph(
        (Entity("owl", 1, ("tiny",)), Entity("owl", 2, ("huge", "white")), Entity("traffic light", None))
    )
    assert graph.render()[0] == "a tiny owl, two huge white owls, and some traffic lights"
    assert graph.atomicity == 3 + 3 + 1 and graph.order == (0, 1, 2)


def test_an_attribute_that_two_of_a_noun_share_is_asked_of_the_right_one():
    graph = SceneGraph((Entity("cup", 1, ("red", "metal")), Entity("cup", 2, ("red", "paper"))))
    questions = [a.question for a in graph.atoms() if a.skill == "attribute"]
    assert questions == [
        "Is the metal cup red?", "Are there any metal cups in the image?",
        "Are the paper cups red?", "Are there any paper cups in the image?",
    ]  # fmt: skip


def test_a_circle_along_an_axis_contradicts_itself():
    assert contradiction([(0, "above", 1), (1, "on", 2), (0, "beneath", 2)]) is not None
    assert contradiction([(0, "above", 1), (1, "left of", 2), (2, "above", 0)]) is None
    assert contradiction([(0, "next to", 1), (1, "next to", 2), (2, "chasing", 0)]) is None
    assert all(relation_skill(predicate) == "position" for predicate in AXES)


@pytest.mark.parametrize("predicate", ["left of", "behind", "above", "under", "on"])
def test_what_is_inside_a_thing_is_where_that_thing_is(predicate):
    assert contradiction([(0, "inside", 1), (0, predicate, 1)]) is not None
    assert contradiction([(0, "in", 1), (1, "inside", 2), (2, predicate, 0)]) is not None
    assert contradiction([(0, "inside", 1), (0, predicate, 2), (2, predicate, 1)]) is not None
    assert contradiction([(0, "inside", 1), (2, "inside", 1), (0, predicate, 2)]) is None
    assert contradiction([(0, "inside", 1), (0, predicate, 2), (1, predicate, 2)]) is None
    assert contradiction([(0, "inside", 1), (1, "inside", 0)]) is not None
    assert contradiction([(0, "inside", 1), (0, "next to", 1), (0, "chasing", 1)]) is None


def test_a_relation_closes_with_a_comma_and_comes_before_what_is_unrelated():
    graph = SceneGraph((Entity("cat"), Entity("dog"), Entity("owl")), (Relation(2, "chasing", 0),))
    assert graph.render()[0] == "an owl chasing a cat, and a dog" and graph.order == (2, 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two purple gnus", "character 11: 'gnus' is not in the vocabulary"),
        ("cats", "not in the vocabulary|where a count"),
        ("a cat left of", "ends where a count"),
        ("a cat and the dog", "'the dog' has not been mentioned"),
        ("two cat", "reads 'two cats'"),
        ("an cat", "reads 'a cat'"),
        ("a cat, a cat", "nothing tells"),
        ("", "ends where"),
    ],
)
def test_texts_that_no_graph_renders_to_are_refused(text, message):
    with pytest.raises(ParseError, match=message):
        parse(text, COMMON)
