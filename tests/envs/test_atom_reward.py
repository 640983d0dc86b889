from types import SimpleNamespace

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs
from toy import GRID, PROMPTS, ToyBackbone, ToyJudge, ToyPrompt, toy_env, toy_policy, toy_training_env

from cast_rl import scene_graph
from cast_rl.envs import AtomRewardTransform
from cast_rl.envs.atom_reward import reachable_atoms
from cast_rl.prompts import PromptSet
from cast_rl.scene_graph import Entity, Relation, SceneGraph


def judged_by(judge, prompts=None, **options):
    """The final step of a rollout scored by `judge`, and the transform."""
    backbone = ToyBackbone()
    reward = AtomRewardTransform(judge, PROMPTS if prompts is None else prompts, **({"grid": GRID} | options))
    env = TransformedEnv(toy_env(backbone), reward)
    with torch.no_grad():
        data = env.rollout(10, toy_policy(backbone))
    return data[:, -1], reward


class Fixed:
    """A judge that gives every image the same answer."""

    def __init__(self, scores, mask=None, evidence=None):
        self.scores, self.mask, self.evidence = torch.tensor(scores), mask, evidence

    def __call__(self, images, atoms):
        n = len(images)
        scores = self.scores.repeat(n, 1)
        mask = torch.ones_like(scores, dtype=torch.bool) if self.mask is None else torch.tensor(self.mask).repeat(n, 1)
        evidence = None if self.evidence is None else self.evidence.repeat(n, 1, 1, 1)
        return SimpleNamespace(scores=scores, mask=mask, evidence=evidence)


@pytest.mark.parametrize("keep_pixels", [False, True])
def test_specs(keep_pixels):
    reward = AtomRewardTransform(ToyJudge(), PROMPTS, grid=GRID, keep_pixels=keep_pixels)
    env = TransformedEnv(toy_env(), reward)
    check_env_specs(env, break_when_any_done="both")
    assert ("pixels" in env.full_reward_spec.keys()) == keep_pixels
    assert "atom_scores" not in env.observation_spec.keys()


def test_only_finished_images_are_judged():
    judge = ToyJudge()
    backbone = ToyBackbone()
    env = toy_training_env(backbone, judge)
    with torch.no_grad():
        data = env.rollout(10, toy_policy(backbone))
    assert judge.calls == [8]
    for key in ("reward", "atom_scores", "atom_mask", "atom_reachable", "atom_weight", "evidence"):
        assert (data["next", key][:, :-1] == 0).all()
        assert (data["next", key][:, -1] != 0).any()
        assert key not in data.keys()
    assert "pixels" not in data["next"].keys()


def test_what_is_written():
    final, reward = judged_by(ToyJudge(), keep_pixels=True)
    final = final["next"]
    atoms = [PROMPTS[i].atoms for i in final["prompt_id"].flatten().tolist()]
    expected = ToyJudge()(final["pixels"], atoms)
    most = expected.scores.shape[1]
    assert final["atom_scores"].shape == (8, 4)
    assert torch.equal(final["atom_scores"][:, :most], expected.scores)
    assert torch.equal(final["atom_mask"][:, :most], expected.mask)
    assert not final["atom_mask"][:, most:].any()
    for row in range(8):
        mean = sum(expected.scores[row, : len(atoms[row])]) / len(atoms[row])
        torch.testing.assert_close(final["reward"][row, 0], mean)
    assert final["evidence"].shape == (8, 4, *GRID)
    torch.testing.assert_close(final["evidence"].mean((-2, -1)), final["atom_mask"].float())
    # An 8x8 half image at twice its share, averaged to 4x4.
    left = torch.tensor([2.0, 2.0, 0.0, 0.0]).expand(4, 4)
    torch.testing.assert_close(final["evidence"][0, 0], left)
    assert reward.counts == {"judged": sum(map(len, atoms)), "failed": 0, "no_evidence": 0}


def test_rows_are_judged_on_their_own():
    together, _ = judged_by(ToyJudge(), keep_pixels=True)
    together = together["next"]
    for row in range(8):
        prompt = PROMPTS[int(together["prompt_id"][row])]
        alone = ToyJudge()(together["pixels"][row : row + 1], [prompt.atoms])
        assert torch.equal(together["atom_scores"][row, : len(prompt.atoms)], alone.scores[0])


def test_failures_are_masked_and_counted_never_scored_zero():
    final, reward = judged_by(
        Fixed([0.8, float("nan"), float("inf"), 0.4], mask=[True, True, True, False]),
        [ToyPrompt((1, 2, 3, 4))] * 5,
    )
    final = final["next"]
    assert final["atom_mask"].tolist() == [[True, False, False, False]] * 8
    assert final["atom_scores"].isfinite().all()
    torch.testing.assert_close(final["reward"], torch.full((8, 1), 0.8))
    assert reward.counts == {"judged": 32, "failed": 24, "no_evidence": 0}


def test_without_any_valid_atom_the_reward_is_zero_and_the_mask_says_so():
    final, _ = judged_by(Fixed([float("nan")]), [ToyPrompt((1,))] * 5, max_failed=1.0)
    assert (final["next", "reward"] == 0).all()
    assert not final["next", "atom_mask"].any()


def test_prompts_without_atoms_are_not_judged():
    judge = ToyJudge()
    final, _ = judged_by(judge, [ToyPrompt(())] * 5)
    assert judge.calls == []
    assert (final["next", "reward"] == 0).all()
    assert final["next", "atom_scores"].shape == (8, 1)
    some = [ToyPrompt(()) if i % 2 else ToyPrompt(((0, 0),)) for i in range(5)]
    final, _ = judged_by(judge, some)
    odd = final["prompt_id"].flatten() % 2 == 1
    assert torch.equal(final["next", "atom_mask"][:, 0], ~odd)
    assert judge.calls == ([int((~odd).sum())] if (~odd).any() else [])


def test_no_evidence_is_the_uniform_map():
    shown = torch.ones(3, 8, 8)
    shown[0] = 0
    shown[1, 0, 0] = torch.nan
    shown[2, :, :4] = 3
    final, reward = judged_by(Fixed([0.5] * 3, evidence=shown), [ToyPrompt((1, 2, 3))] * 5)
    evidence = final["next", "evidence"]
    assert (evidence[:, :2] == 1).all()
    torch.testing.assert_close(evidence[0, 2], torch.tensor([1.5, 1.5, 0.5, 0.5]).expand(4, 4))
    assert reward.counts["no_evidence"] == 16
    final, reward = judged_by(Fixed([0.5] * 3), [ToyPrompt((1, 2))] * 5)
    assert (final["next", "evidence"] == 1).all()
    assert reward.counts["no_evidence"] == 0


@pytest.mark.parametrize("size", [(3, 5), (2, 2), (16, 16)])
def test_evidence_of_any_size_keeps_unit_mean(size):
    evidence = torch.rand(1, *size)
    final, _ = judged_by(Fixed([0.5], evidence=evidence), [ToyPrompt((1,))] * 5)
    torch.testing.assert_close(final["next", "evidence"].mean((-2, -1)), torch.ones(8, 1))


def test_evidence_is_averaged_by_area():
    evidence = torch.rand(1, 12, 12)
    final, _ = judged_by(Fixed([0.5], evidence=evidence), [ToyPrompt((1,))] * 5)
    blocks = evidence.reshape(4, 3, 4, 3).mean((1, 3))
    torch.testing.assert_close(final["next", "evidence"][0, 0], blocks / blocks.mean())


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Fixed([1.5, 0.0]), "0 to 1.5"),
        (Fixed([0.5]), r"\(1, 1\).* up to 2 atoms"),
        (Fixed([0.5, 0.5], evidence=torch.ones(1, 8, 8)), r"evidence \(1, 1, 8, 8\)"),
        (Fixed([0.5, 0.5], evidence=-torch.ones(2, 8, 8)), "minimum of -1"),
    ],
)
def test_impossible_judgements_are_named(judge, message):
    with pytest.raises(ValueError, match=message):
        judged_by(judge, [ToyPrompt((1, 2))] * 5)


def test_prompts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="prompt 3 has 4 atoms, more than max_atoms=2"):
        AtomRewardTransform(ToyJudge(), PROMPTS, grid=GRID, max_atoms=2)
    with pytest.raises(ValueError, match="given 1 prompts"):
        judged_by(ToyJudge(), PROMPTS[:1])


def test_the_judge_may_sit_on_another_device():
    class Elsewhere(Fixed):
        device = torch.device("meta")

        def __call__(self, images, atoms):
            assert images.device.type == "meta"
            return super().__call__(images, atoms)

    final, _ = judged_by(Elsewhere([0.25]), [ToyPrompt((1,))] * 5)
    assert (final["next", "reward"] == 0.25).all()


def test_a_judge_that_is_a_module_stays_outside_the_environment():
    class Module(torch.nn.Linear):
        def forward(self, images, atoms):
            return ToyJudge()(images, atoms)

    _, reward = judged_by(Module(2, 2))
    assert list(reward.parameters()) == []


PAIR = SceneGraph(
    (Entity("circle", 2, ("red",)), Entity("square", 1, ("blue",))), (Relation(0, "left of", 1),), closed=True
)
# circle, red, two; square, blue, one; left of; three in all
SKILLS = ["object", "attribute", "count", "object", "attribute", "count", "position", "scene"]


def test_an_atom_is_reachable_where_what_it_depends_on_holds():
    atoms = PAIR.atoms()
    assert [a.skill for a in atoms] == SKILLS
    everything, nothing = [True] * 8, [True, False, False, True, False, False, False, False]
    no_square = [True, True, True, True, False, False, False, False]
    scores = torch.zeros(4, 9)
    scores[0, :8] = 0.9
    scores[1, [0, 1, 2]] = 0.9
    scores[3, :8] = 0.9
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[:, 8] = False
    mask[3, 3], scores[3, 3] = False, 0.0  # the judge failed: that does not say there is no square
    found = reachable_atoms(scores, mask, [atoms] * 4)
    assert found.tolist() == [row + [False] for row in (everything, no_square, nothing, everything)]


def test_a_chain_breaks_at_its_first_missing_link():
    class Link:
        def __init__(self, *parents):
            self.parents = parents

    scores = torch.tensor([[0.2, 0.9, 0.9]])
    found = reachable_atoms(scores, torch.ones(1, 3, dtype=torch.bool), [[Link(), Link(0), Link(1)]])
    assert found.tolist() == [[True, False, False]]


def test_the_reward_weighs_skills():
    prompts = PromptSet.from_graphs([PAIR] * 5)
    judge = Fixed([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    plain, _ = judged_by(judge, prompts)
    weighted, _ = judged_by(judge, prompts, skill_weights={"scene": 3})
    torch.testing.assert_close(plain["next", "reward"], torch.full((8, 1), 7 / 8))
    torch.testing.assert_close(weighted["next", "reward"], torch.full((8, 1), 7 / 10))
    assert weighted["next", "atom_weight"].tolist() == [[1.0] * 7 + [3.0]] * 8
    alone, _ = judged_by(judge, prompts, skill_weights=dict.fromkeys(SKILLS, 0) | {"scene": 1})
    assert (alone["next", "reward"] == 0).all()


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"colour": 2}, "'colour', which is no skill"),
        ({"count": -1}, r"\['count'\]=-1"),
        ({"count": float("inf")}, "=inf must be a number"),
        ({"count": None}, "=None must be a number"),
        (dict.fromkeys(scene_graph.SKILLS, 0), "nothing to reward"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        AtomRewardTransform(Fixed([1.0]), [ToyPrompt((1,))], grid=(4, 4), skill_weights=weights)


@pytest.mark.parametrize("parent", [-1, 1, 2])
def test_parents_come_before_their_children(parent):
    prompt = SimpleNamespace(atoms=(SimpleNamespace(parents=()), SimpleNamespace(parents=(parent,))))
    with pytest.raises(ValueError, match=f"atom 1 of prompt 0 depends on atom {parent}"):
        AtomRewardTransform(Fixed([1.0, 1.0]), [prompt], grid=(4, 4))
