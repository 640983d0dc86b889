"""Scene graphs and prompts for property tests."""

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from cast_rl.prompts import Prompt, load_vocabulary
from cast_rl.scene_graph import Atom, Entity, Relation, SceneGraph, told_apart

COMMON = load_vocabulary("common")
# A line in GenEval 2's format, about another prompt than any of its own.
ROW = {
    "prompt": "three sheeps chasing a red bus, and a box",
    "atom_count": 6,
    "vqa_list": [
        ["How many sheeps are in the image?", "three"],
        ["Are there any sheeps in the image?", "Yes"],
        ["Are the sheeps chasing the bus?", "Yes"],
        ["How many buses are in the image?", "one"],
        ["Is the bus red?", "Yes"],
        ["Are there any buses in the image?", "Yes"],
        ["Are there any boxes in the image?", "Yes"],
    ],
    "skills": ["count", "object", "verb", "count", "attribute", "object", "object"],
}

PREDICATES = ("left of", "under", "next to", "chasing", "on", "inside")


@st.composite
def entities(draw):
    attributes = [draw(st.sampled_from((None, *words))) for words in COMMON.attributes.values()]
    count = draw(st.one_of(st.none(), st.integers(1, 12)))
    return Entity(draw(st.sampled_from(COMMON.all_nouns)), count, tuple(filter(None, attributes)))


@st.composite
def graphs(draw, alike=False):
    """Graphs of one to five entities, mentioned in their order.

    No two have one noun; or, if ``alike``, at least two have, which their attributes tell apart.
    """
    things = tuple(draw(st.lists(entities(), min_size=2 if alike else 1, max_size=5, unique_by=lambda e: e.noun)))
    if alike:
        # All but the first few take the first one's noun.
        own = draw(st.integers(1, len(things) - 1))
        things = tuple(replace(e, noun=things[0].noun) if i >= own else e for i, e in enumerate(things))
        assume(told_apart(things))
    relations = []
    for new in range(1, draw(st.integers(1, len(things)))):
        old = draw(st.integers(0, new - 1))
        ends = (old, new) if new == 1 or draw(st.booleans()) else (new, old)
        relations.append(Relation(ends[0], draw(st.sampled_from(PREDICATES)), ends[1]))
    return SceneGraph(things, tuple(relations))


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)


@st.composite
def loose_prompts(draw):
    """Prompts with atoms of any text, and spans and parents that are possible."""
    text = draw(texts)
    atoms = []
    for k in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text) - 1))
        spans = draw(st.sampled_from(((), ((start, len(text)),))))
        parents = tuple(draw(st.sets(st.integers(0, k - 1)))) if k else ()
        value = draw(st.one_of(st.none(), st.integers(0, 9), texts))
        skill = draw(st.sampled_from(("object", "attribute", "count", "position", "verb", "scene")))
        about = tuple(draw(st.lists(entities(), max_size=2)))
        atoms.append(Atom(skill, draw(texts), draw(texts), text, spans, parents, about, value, draw(st.booleans())))
    return Prompt(text, tuple(atoms), draw(st.one_of(st.none(), graphs())))
