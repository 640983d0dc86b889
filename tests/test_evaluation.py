"""Figures and pictures of an evaluation."""

import pytest
import torch
from PIL import Image

from cast_rl.evaluation import Evaluation
from cast_rl.pictures import before_after, choose_examples, learning_curve
from cast_rl.prompts import PromptSet
from cast_rl.scene_graph import Entity, SceneGraph

PROMPTS = PromptSet.from_graphs(
    SceneGraph((Entity("circle", n, (color,)),)) for n in (1, 2) for color in ("red", "green", "blue", "yellow")
)


def run(scores, mask=None):
    scores = torch.tensor(scores)
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Evaluation(torch.rand(len(scores), 3, 8, 8), scores, mask, PROMPTS[: len(scores)])


def test_figures_leave_out_what_was_not_judged():
    result = run([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [[True, True, False], [True] * 3, [False] * 3])
    figures = result.figures()
    assert figures["atom_score"] == 1.0
    assert result.all_correct.tolist() == [True, True, False]
    assert figures["all_correct"] == pytest.approx(2 / 3)
    assert figures["skill_object"] == figures["skill_attribute"] == figures["skill_count"] == 1.0


def test_examples_have_the_proportions_of_the_run():
    wrong, right = [0.0] * 3, [1.0] * 3
    before = run([wrong] * 6 + [right] * 2)
    after = run([right] * 4 + [wrong] * 2 + [right, wrong])
    chosen = choose_examples(before, after, 4)
    assert len(chosen) == len(set(chosen)) == 4
    assert sum(i < 4 for i in chosen) >= 2, "half of the prompts were gained, so half of the pictures are"


def test_pictures_are_written(tmp_path):
    before, after = run([[0.0, 1.0, 0.0]] * 8), run([[1.0] * 3] * 8)
    before_after(before, after, tmp_path / "pairs.png", count=6)
    learning_curve([0.1, 0.2, 0.4], tmp_path / "curve.png")
    for name in ("pairs.png", "curve.png"):
        image = Image.open(tmp_path / name)
        assert min(image.size) > 200 and len(set(image.convert("L").getdata())) > 20
