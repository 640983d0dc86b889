"""The unsure oracle: a probability that follows the exact one, and moves where that one jumps."""

import itertools
import math

import numpy as np
import pytest
import torch

from cast_rl.judges import load_judge
from cast_rl.miniature.oracle import Found, Oracle
from cast_rl.miniature.render import render_graphs
from cast_rl.miniature.soft_oracle import SoftOracle, chance, exactly
from cast_rl.miniature.vocabulary import SHAPES, sample_graphs
from cast_rl.scene_graph import Atom, Entity, Relation, SceneGraph

GRAPHS = sample_graphs(200, 12, held_out=True)


def test_it_agrees_with_the_exact_oracle_on_clear_scenes():
    images = render_graphs(GRAPHS, seed=3)
    # Scenes paired with each other's prompts, so that many facts do not hold.
    atoms = [g.atoms() for g in GRAPHS[1:] + GRAPHS[:1]]
    for asked in ([g.atoms() for g in GRAPHS], atoms):
        soft, exact = SoftOracle()(images, asked), Oracle()(images, asked)
        assert torch.equal(soft.mask, exact.mask)
        assert ((soft.scores > 0.5) == (exact.scores > 0.5))[exact.mask].float().mean() > 0.99
        assert soft.scores.min() >= 0 and soft.scores.max() <= 1
        mean = soft.evidence.mean((-2, -1))[exact.mask]
        assert ((mean - 1).abs().lt(1e-4) | (mean == 0)).all()


def test_a_score_moves_with_the_image():
    graph = SceneGraph((Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",))), closed=True)
    image = render_graphs([graph], seed=1)
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    images = torch.cat([image + level * noise for level in torch.linspace(0, 0.5, 11)]).clamp(0, 1)
    atoms = [graph.atoms()] * 11
    soft, exact = SoftOracle()(images, atoms).scores, Oracle()(images, atoms).scores
    assert len(soft.unique()) > 3 * len(exact.unique())
    assert ((soft > 0.05) & (soft < 0.95)).any()


def test_exactly_is_the_sum_over_all_outcomes():
    chances = [0.9, 0.2, 0.65, 0.0]
    for n in range(6):
        expected = sum(
            torch.tensor([p if hit else 1 - p for p, hit in zip(chances, outcome, strict=True)]).prod().item()
            for outcome in itertools.product((0, 1), repeat=4)
            if sum(outcome) == n
        )
        assert exactly(chances, n) == pytest.approx(expected, abs=1e-6)


def test_it_is_loaded_by_name():
    assert isinstance(load_judge("soft_oracle"), SoftOracle)
    with pytest.raises(ValueError, match="2 images but atoms for 1"):
        SoftOracle()(torch.zeros(2, 3, 48, 48), [GRAPHS[0].atoms()])


def patch(shape_chances, color="red", x=0.0):
    found = Found(None, color, x, 0.0, 60.0, 0.8, (0.0,) * 4, np.ones((4, 4), dtype=bool))
    return found, dict.fromkeys(SHAPES, 0.0) | shape_chances


def atom(graph, skill):
    return next(a for a in graph.atoms() if a.skill == skill)


RELATED = SceneGraph(
    (Entity("circle", 1, ("red",)), Entity("square", 1, ("blue",))), (Relation(0, "left of", 1),), closed=True
)


def test_a_wrong_colour_is_not_worth_more_for_being_blurred():
    colour = atom(RELATED, "attribute")
    for p in (0.3, 0.5, 1.0):
        assert chance(colour, [patch({"circle": p}, "blue")])[0] == 0
    both = [patch({"circle": 0.8}, "red"), patch({"circle": 0.4}, "blue")]
    assert chance(colour, both)[0] == pytest.approx(0.8 * 0.6)


def test_a_position_is_the_sum_over_what_the_patches_may_be():
    position = atom(RELATED, "position")
    far_right = [patch({"circle": 0.7}, x=40.0), patch({"square": 0.7}, x=0.0)]
    assert chance(position, far_right)[0] < 1e-6, "certainly on the wrong side, whatever the doubts about shapes"
    assert chance(position, [patch({"circle": 0.5, "square": 0.4})])[0] == 0, "one patch is not two objects"
    patches = [
        patch({"circle": 0.6, "square": 0.3}, x=0.0),
        patch({"square": 0.9}, x=3.0),
        patch({"circle": 0.5}, x=2.0),
    ]
    expected = 0.0
    for roles in itertools.product(("circle", "square", None), repeat=3):
        p = math.prod(
            c.get(r, 0.0) if r else 1 - c["circle"] - c["square"] for (_, c), r in zip(patches, roles, strict=True)
        )
        a, b = ([o.x for (o, _), r in zip(patches, roles, strict=True) if r == kind] for kind in ("circle", "square"))
        if a and b:
            expected += p * math.prod(1 / (1 + math.exp(-(y - x - 1.5) / 1.5)) for x in a for y in b)
    assert chance(position, patches)[0] == pytest.approx(expected, abs=1e-6)


def test_foreign_atoms_are_refused():
    with pytest.raises(ValueError, match="need a vision-language judge"):
        chance(Atom("object", "Is there a cat?", "Yes"), [])
