"""Figures and pictures of an evaluation."""

import pytest
import torch
from PIL import Image
from toy import ToyBackbone, ToyBank

from cast_rl.evaluation import Evaluation, compare, evaluate, table
from cast_rl.judges import Judgement
from cast_rl.pictures import before_after, choose_examples, learning_curve
from cast_rl.prompts import Prompt, PromptSet
from cast_rl.report import summary
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


def test_the_hard_third_is_that_with_most_atoms():
    prompts = PromptSet.from_graphs(
        SceneGraph(tuple(Entity("circle", 1, (color,)) for color in colors))
        for colors in (("red", "green"), ("red",), ("blue",), ("red", "blue"), ("green",), ("yellow",))
    )
    K = max(len(p.atoms) for p in prompts)
    mask = torch.tensor([[k < len(p.atoms) for k in range(K)] for p in prompts])
    scores = torch.zeros(6, K)
    scores[[0, 3]] = torch.tensor([[1.0] * K, [0.5] * K])
    result = Evaluation(torch.rand(6, 3, 8, 8), scores, mask, prompts)
    figures = result.figures()
    assert sorted(result.hard) == [0, 3]
    assert figures["hard_atom_score"] == pytest.approx(0.75) and figures["hard_all_correct"] == 0.5


def test_a_comparison_pairs_the_prompts():
    before, after = run([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]] * 4), run([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]] * 4)
    comparison = compare(before, after)
    assert comparison["gain"]["atom_score"] == pytest.approx(1 / 3)
    assert comparison["gain"]["atom_score_se"] == pytest.approx(0, abs=1e-6), "every prompt gains the same"
    assert comparison["gain"]["all_correct_se"] == pytest.approx((0.25 * 8 / 7 / 8) ** 0.5)
    assert len(table(comparison).splitlines()) == 1 + len(before.figures())
    # What is judged only once says nothing: neither a gain, nor a skill to subtract.
    partly = run([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.5]])
    later = run(partly.scores.tolist(), [[True, True, False], [False] * 3, [True, True, False]])
    gain = compare(partly, later)["gain"]
    assert gain["atom_score"] == gain["all_correct"] == 0 and "skill_count" not in gain
    assert "nan" in table(compare(partly, later))
    with pytest.raises(ValueError, match="different prompts"):
        compare(before, run([[1.0, 0.0, 0.0]] * 4))


def test_a_summary_keeps_the_largest_of_what_is_a_maximum():
    logs = [{"max_ratio": 1.5, "loss": 1.0}, {"max_ratio": 1.1, "loss": 3.0}]
    assert summary(logs) == {"max_ratio": 1.5, "loss": 2.0}


def test_examples_have_the_proportions_of_the_run():
    wrong, right = [0.0] * 3, [1.0] * 3
    before = run([wrong] * 6 + [right] * 2)
    after = run([right] * 4 + [wrong] * 2 + [right, wrong])
    chosen = choose_examples(before, after, 4)
    assert len(chosen) == len(set(chosen)) == 4
    assert sum(i < 4 for i in chosen) >= 2, "half of the prompts were gained, so half of the pictures are"


def test_as_many_examples_as_asked_for_however_small_the_run():
    wrong, right = [0.0] * 3, [1.0] * 3
    before, after = run([wrong, right, right, wrong]), run([right, wrong, right, wrong])
    for count in range(5):
        assert len(set(choose_examples(before, after, count))) == count


def test_pictures_are_written(tmp_path):
    before, after = run([[0.0, 1.0, 0.0]] * 8), run([[1.0] * 3] * 8)
    before_after(before, after, tmp_path / "pairs.png", count=6)
    learning_curve([0.1, 0.2, 0.4], tmp_path / "curve.png")
    for name in ("pairs.png", "curve.png"):
        image = Image.open(tmp_path / name)
        assert min(image.size) > 200 and len(set(image.convert("L").getdata())) > 20


class Bank(ToyBank):
    def __init__(self, texts):
        super().__init__()
        self.texts = tuple(texts)


TEXTS = ["a", "b", "c"]
ATOMS = [Prompt(text, PROMPTS[0].atoms[:count]) for text, count in zip(TEXTS, (2, 0, 3), strict=True)]


def test_evaluation_takes_of_a_judge_what_the_reward_takes():
    """On its own device, for images with atoms, and no score that is not finite or was not asked for."""

    class Judge:
        device = torch.device("meta")

        def __call__(self, images, atoms):
            assert images.device.type == "meta" and [len(row) for row in atoms] == [2, 3]
            scores = torch.tensor([[0.5, torch.nan, 1.0, 1.0]]).repeat(2, 1)
            return Judgement(scores, torch.ones(2, 4, dtype=torch.bool))

    result = evaluate(ToyBackbone(), Judge(), ATOMS, Bank(TEXTS), height=8, width=8, steps=3)
    assert result.mask.tolist() == [[True, False, False], [False] * 3, [True, False, True]]
    assert result.scores.tolist() == [[0.5, 0, 0], [0, 0, 0], [0.5, 0, 1]]
    assert result.atom_means[[0, 2]].tolist() == [0.5, 0.75] and result.atom_means[1].isnan()


def test_the_noise_of_an_evaluation_belongs_to_the_prompt_and_not_to_the_batch():
    def judge(images, atoms):
        most = max(map(len, atoms))
        return Judgement(torch.zeros(len(images), most), torch.ones(len(images), most, dtype=torch.bool))

    size = {"height": 8, "width": 8, "steps": 3}
    runs = [evaluate(ToyBackbone(), judge, ATOMS, Bank(TEXTS), **size, batch_size=n) for n in (1, 2, 64)]
    for run in runs[1:]:
        torch.testing.assert_close(run.images, runs[0].images, rtol=0, atol=1e-6)
    other = evaluate(ToyBackbone(), judge, ATOMS, Bank(TEXTS), **size, seed=1)
    assert not torch.equal(other.images, runs[0].images)


def test_a_bank_of_other_prompts_is_refused():
    with pytest.raises(ValueError, match="must encode these 3 prompts"):
        evaluate(ToyBackbone(), None, ATOMS, Bank(["a", "c", "b"]), height=8, width=8, steps=3)
