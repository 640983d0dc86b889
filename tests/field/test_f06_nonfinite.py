"""F6: one NaN costs one step, and a run of them stops the run."""

import pytest
import torch
from toy import ToyBackbone, ToyJudge, toy_policy, toy_training_env

from cast_rl.objectives import AtomAdvantage, CASTLoss
from cast_rl.optim import GuardedStep


def train(iterations, poison, max_bad_steps=5):
    """A short run in which ``poison(iteration, batch)`` may spoil the data; yields (policy, report)."""
    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    env, advantage, loss = toy_training_env(backbone), AtomAdvantage(), CASTLoss(policy)
    guard = GuardedStep(torch.optim.AdamW(policy.parameters(), lr=1e-3), max_bad_steps=max_bad_steps)
    for iteration in range(iterations):
        with torch.no_grad():
            batch = advantage.inv(env.rollout(10, policy))
        poison(iteration, batch)
        objective = loss(batch)["loss_objective"]
        objective.backward()
        yield policy, guard.step(objective)


def test_f06_one_nan_is_skipped_and_counted():
    def poison(iteration, batch):
        if iteration == 3:
            batch["advantage_map"][5, 1, 1] = torch.nan

    weights, reports = [], []
    for policy, report in train(6, poison):
        weights.append(torch.cat([p.detach().flatten().clone() for p in policy.parameters()]))
        reports.append(report)
    assert [report.stepped for report in reports] == [True, True, True, False, True, True]
    assert reports[-1].skipped == 1
    assert all(w.isfinite().all() for w in weights)
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])


def test_f06_a_run_of_them_is_an_error():
    def poison(iteration, batch):
        if iteration >= 1:
            batch["advantage_map"][0] = torch.inf

    seen = []
    with pytest.raises(RuntimeError, match="2 steps in a row"):
        for _, report in train(10, poison, max_bad_steps=2):
            seen.append(report.stepped)
    assert seen == [True, False]


def test_f06_a_nan_score_is_masked_before_it_reaches_the_loss():
    class Failing(ToyJudge):
        def __call__(self, images, atoms):
            judgement = super().__call__(images, atoms)
            judgement.scores[2, 0] = torch.nan
            judgement.evidence[3, 0, 0, 0] = torch.nan
            return judgement

    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    env = toy_training_env(backbone, Failing())
    with torch.no_grad():
        batch = AtomAdvantage().inv(env.rollout(10, policy))
    assert batch["advantage_map"].isfinite().all()
    assert env.transform.counts["failed"] == 1
    assert env.transform.counts["no_evidence"] == 1
    assert CASTLoss(policy)(batch)["loss_objective"].isfinite()
