"""F10: a judge that fails on some images costs those images, never a score of 0, and too many failures stop the run."""

import pytest
import torch
from toy import ToyBackbone, ToyJudge, toy_policy, toy_training_env

from cast_rl.judges import Judgement, ask
from cast_rl.objectives import AtomAdvantage, CASTLoss


class Failing(ToyJudge):
    """Raises whenever it sees one of the images ``down``, and gives NaN for those ``lost``."""

    def __init__(self, down=(), lost=()):
        super().__init__()
        self.down, self.lost = down, lost
        self.order = None

    def places(self, images):
        """Where each image is among the first ones seen."""
        if self.order is None:
            self.order = images.clone()
        return [int((self.order - image).flatten(1).abs().sum(1).argmin()) for image in images]

    def __call__(self, images, atoms):
        places = self.places(images)
        if any(place in self.down for place in places):
            raise TimeoutError("the reward server did not answer")
        judgement = super().__call__(images, atoms)
        for b, place in enumerate(places):
            if place in self.lost:
                judgement.scores[b] = torch.nan
        return judgement


def rollout(judge):
    """One batch of two groups of four images, with advantages."""
    torch.manual_seed(0)
    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    env = toy_training_env(backbone, judge)
    with torch.no_grad():
        data = env.rollout(10, policy)
    return data, env, policy


def test_f10_two_of_eight_are_masked_and_counted():
    with pytest.warns(UserWarning, match="failed on 1 of 8 images, which are masked: TimeoutError"):
        data, env, policy = rollout(Failing(down=(2,), lost=(5,)))
    whole, _, _ = rollout(ToyJudge())
    final, expected = data["next"][:, -1], whole["next"][:, -1]
    asked = expected["atom_mask"].sum(1)
    assert env.transform.counts["failed"] == asked[2] + asked[5]
    assert not final["atom_mask"][[2, 5]].any()
    rest = [0, 1, 3, 4, 6, 7]
    assert torch.equal(final["atom_mask"][rest], expected["atom_mask"][rest])
    torch.testing.assert_close(final["atom_scores"][rest], expected["atom_scores"][rest])

    # Group statistics are those of the images that were judged: the failed one pulls no mean towards 0.
    batch = AtomAdvantage().inv(data)
    advantage = batch["advantage"].reshape(8, -1)
    kept = AtomAdvantage().inv(whole[rest])["advantage"].reshape(6, -1)
    assert (advantage[[2, 5]] == 0).all()
    torch.testing.assert_close(advantage[rest], kept)
    assert CASTLoss(policy)(batch)["loss_objective"].isfinite()


def test_f10_too_few_left_is_an_error():
    with pytest.warns(UserWarning, match="failed on 3 of 8"), pytest.raises(RuntimeError, match="failed on 5 of 8"):
        rollout(Failing(down=(0, 1, 2), lost=(5, 6)))


def test_f10_a_judge_that_is_down_says_why():
    with pytest.raises(TimeoutError, match="reward server did not answer"):
        rollout(Failing(down=range(8)))


def test_f10_what_only_fails_together_is_judged_one_by_one():
    class OutOfMemory(ToyJudge):
        def __call__(self, images, atoms):
            if len(images) > 1:
                raise RuntimeError("out of memory")
            return super().__call__(images, atoms)

    images, atoms = torch.rand(3, 3, 8, 8), [[(0, 0)], [(1, 1), (2, 0)], [(2, 1)]]
    with pytest.warns(UserWarning, match="failed on 3 images together, though on none alone: RuntimeError"):
        split = ask(OutOfMemory(), images, atoms, 2)
    whole = ask(ToyJudge(), images, atoms, 2)
    assert torch.equal(split.scores, whole.scores) and torch.equal(split.mask, whole.mask)
    assert torch.equal(split.evidence, whole.evidence)


class Short(ToyJudge):
    """Drops the last of several images, and of a single one those that are dark."""

    def __init__(self, dark=0.0):
        super().__init__()
        self.dark = dark

    def __call__(self, images, atoms):
        keep = len(images) - 1 if len(images) > 1 else int(images.mean() >= self.dark)
        judgement = super().__call__(images, atoms)
        return Judgement(judgement.scores[:keep], judgement.mask[:keep], judgement.evidence[:keep])


def test_f10_after_a_short_list_images_are_judged_one_by_one():
    images, atoms = torch.rand(3, 3, 8, 8), [[(0, 0)], [(1, 1), (2, 0)], [(2, 1)]]
    images[1] *= 0.1
    whole = ask(ToyJudge(), images, atoms, 2)
    with pytest.warns(UserWarning, match="together, though on none alone: ValueError"):
        assert torch.equal(ask(Short(), images, atoms, 2).scores, whole.scores)
    with pytest.warns(UserWarning, match=r"failed on 1 of 3 images, which are masked: ValueError.*scores \(0, 2\)"):
        short = ask(Short(dark=0.2), images, atoms, 2)
    assert short.mask.any(1).tolist() == [True, False, True]
    assert torch.equal(short.scores[[0, 2]], whole.scores[[0, 2]])


def test_f10_lists_that_are_short_for_every_image_are_an_error():
    with pytest.raises(ValueError, match=r"scores \(0, \d\) .* for 1 images"):
        rollout(Short(dark=9.0))
