"""The oracle against the renderer: what is there is found, what was changed is noticed."""

import random
from dataclasses import replace

import pytest
import torch

from cast_rl.judges.base import Judge
from cast_rl.miniature.oracle import Oracle, check, parse, unrequested
from cast_rl.miniature.render import SIZE, layouts, render, render_graphs
from cast_rl.miniature.vocabulary import COLORS, MAX_OBJECTS, SHAPES, sample_graphs
from cast_rl.relations import OPPOSITE
from cast_rl.scene_graph import Atom, Entity, SceneGraph

GRAPHS = sample_graphs(1000, 11, held_out=True)


@pytest.fixture(scope="module")
def images():
    return render_graphs(GRAPHS, seed=5)


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.1, 0.98)])
def test_renders_are_judged_right(images, noise, least):
    noisy = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    judged = Oracle()(noisy.clamp(0, 1), [g.atoms() for g in GRAPHS])
    right = ((judged.scores == 1) | ~judged.mask).all(1)
    clean = torch.tensor([unrequested(g.atoms(), o) == 0 for g, o in zip(GRAPHS, parse(noisy), strict=True)])
    assert (right & clean).float().mean() >= least


def change(graph: SceneGraph, skill: str, rng: random.Random) -> tuple[SceneGraph, Atom] | None:
    """The scene with one fact changed, and the atom that is wrong of it; None if that cannot be."""
    entities, atoms = list(graph.entities), graph.atoms()
    i = rng.randrange(len(entities))
    e = entities[i]
    if skill == "scene":
        extra = Entity(rng.choice(SHAPES), 1, (rng.choice(COLORS),))
        if any(extra.noun == f.noun for f in entities) or sum(f.count for f in entities) == MAX_OBJECTS:
            return None
        return SceneGraph((*entities, extra), graph.relations), atoms[-1]
    if skill == "position":
        if not graph.relations:
            return None
        flipped = replace(graph.relations[0], predicate=OPPOSITE[graph.relations[0].predicate])
        return replace(graph, relations=(flipped,)), next(a for a in atoms if a.skill == "position")
    if skill == "count":
        entities[i] = replace(e, count=e.count + rng.choice((-1, 1))) if e.count > 1 else replace(e, count=2)
        if sum(f.count for f in entities) > MAX_OBJECTS:
            return None
    elif skill == "attribute":
        entities[i] = replace(e, attributes=(rng.choice([c for c in COLORS if c not in e.attributes]),))
    elif skill == "object":
        others = {f.noun for f in entities}
        free = [s for s in SHAPES if s not in others]
        if not free or sum(f.noun == e.noun for f in entities) > 1:
            return None
        entities[i] = replace(e, noun=rng.choice(free))
    wrong = [a for a in atoms if a.skill == skill and a.entities == (e,)]
    try:
        return SceneGraph(tuple(entities), graph.relations), wrong[0]
    except ValueError:  # the change made two groups alike
        return None


@pytest.mark.parametrize("skill", ["object", "attribute", "count", "position", "scene"])
def test_one_changed_fact_is_noticed(skill):
    rng = random.Random(skill)
    pairs = [p for g in sample_graphs(4000, 23, held_out=False) if (p := change(g, skill, rng))][:1000]
    assert len(pairs) == 1000
    images = render_graphs([g for g, _ in pairs], seed=6)
    wrong = [not check(atom, objects)[0] for (_, atom), objects in zip(pairs, parse(images), strict=True)]
    assert sum(wrong) / len(wrong) >= 0.99


def test_masks_are_the_regions_that_were_drawn():
    g = torch.Generator().manual_seed(1)
    layout = layouts(GRAPHS[:100], g)
    image, coverage = render(layout, g)
    for b, objects in enumerate(parse(image)):
        drawn = [coverage[b, k] > 0.5 for k in range(MAX_OBJECTS) if layout.present[b, k]]
        assert len(objects) == len(drawn)
        for o in objects:
            mask = torch.from_numpy(o.mask)
            assert max(float((mask & d).sum() / (mask | d).sum()) for d in drawn) > 0.9


def test_evidence_is_the_objects_of_the_atom_and_zero_where_there_are_none(images):
    graph = SceneGraph((Entity("circle", 2, ("red",)),), closed=True)
    blank = torch.full((1, 3, SIZE, SIZE), 0.2)
    judged = Oracle()(torch.cat([render_graphs([graph], 0), blank]), [graph.atoms()] * 2)
    assert isinstance(Oracle(), Judge)
    assert judged.scores.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]] and judged.mask.all()
    assert torch.allclose(judged.evidence[0].mean((1, 2)), torch.ones(4))
    *facts, scene = judged.evidence[1]
    assert not torch.stack(facts).any() and (scene == 1).all()
    assert (judged.evidence[0, 3] == 1).all(), "an object too many can be anywhere"
    circles = torch.from_numpy(parse(render_graphs([graph], 0))[0][0].mask)
    assert (judged.evidence[0, 0][circles] > 0).all()


def test_fragments_and_speckles_count_as_unrequested(images):
    graph = GRAPHS[0]
    image = images[:1].clone()
    free = ~torch.from_numpy(sum(o.mask for o in parse(image)[0]) > 0)
    y, x = next((y, x) for y in range(4, 44) for x in range(4, 44) if free[y - 3 : y + 5, x - 3 : x + 5].all())
    image[0, :, y : y + 2, x : x + 2] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    objects = parse(image)[0]
    assert unrequested(graph.atoms(), objects) == 1
    assert not check(graph.atoms()[-1], objects)[0]
    assert any(o.shape is None for o in objects)


def test_a_judgement_does_not_depend_on_the_batch(images):
    atoms = [g.atoms() for g in GRAPHS[:8]]
    together = Oracle()(images[:8], atoms)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    permuted = Oracle()(images[order], [atoms[i] for i in order])
    assert torch.equal(together.scores[order], permuted.scores)
    assert torch.equal(together.evidence[order], permuted.evidence)


def test_bad_input_is_refused(images):
    with pytest.raises(ValueError, match="2 images but atoms for 1"):
        Oracle()(images[:2], [GRAPHS[0].atoms()])
    with pytest.raises(ValueError, match="parses images"):
        parse(images[0])
    with pytest.raises(ValueError, match="vision-language judge"):
        check(SceneGraph((Entity("cat"),)).atoms()[0], [])
