import numpy as np
import pytest
import torch

from cast_rl.masked import masked_mean
from cast_rl.objectives.functional import (
    advantage_map,
    group_mean_std,
    group_relative_advantage,
    others_evidence,
    temper_evidence,
)


def by_hand(scores, mask, groups, delta):
    """The advantage by NumPy, one group and one atom at a time."""
    scores, mask, groups = scores.double().numpy(), mask.numpy(), groups.numpy()
    out = np.zeros_like(scores)
    for group in np.unique(groups):
        for k in range(scores.shape[1]):
            rows = (groups == group) & mask[:, k]
            if rows.sum() and np.ptp(scores[rows, k]) > 0:
                values = scores[rows, k]
                out[rows, k] = (values - values.mean()) / (values.std() + delta)
    return torch.tensor(out)


@pytest.fixture
def data():
    """Ragged groups in no order, some entries masked and NaN behind the mask."""
    groups = torch.tensor([7, 2**40, 7, 3, 2**40, 7, 7, 3, 2**40, 9])
    scores, mask = torch.rand(10, 4), torch.rand(10, 4) < 0.8
    scores[~mask] = torch.nan
    return scores, mask, groups


def test_advantage_matches_numpy(data):
    scores, mask, groups = data
    advantage = group_relative_advantage(scores, mask, groups)
    torch.testing.assert_close(advantage.double(), by_hand(scores, mask, groups, 1e-4), rtol=1e-5, atol=1e-5)
    assert (advantage[~mask] == 0).all()


def test_mean_and_std_are_repeated_over_the_group(data):
    scores, mask, groups = data
    mean, std, varies = group_mean_std(scores, mask, groups)
    rows = groups == 7
    for k in range(4):
        values = scores[rows & mask[:, k], k]
        if len(values):
            torch.testing.assert_close(mean[rows, k], values.mean().expand(4))
            torch.testing.assert_close(std[rows, k], values.std(correction=0).expand(4))
        assert (varies[rows, k] == (len(values.unique()) > 1)).all()


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 0.7, 1.0, 1e-12, 12345.678])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 48])
def test_a_constant_score_is_exactly_zero(constant, size):
    scores = torch.full((size, 2), constant)
    scores[:, 1] = torch.linspace(0, 1, size)
    advantage = group_relative_advantage(scores, torch.ones(size, 2).bool(), torch.zeros(size, dtype=torch.long))
    assert (advantage[:, 0] == 0).all()
    assert (advantage[:, 1] != 0).any() == (size > 1)


def test_groups_do_not_see_each_other(data):
    scores, mask, groups = data
    advantage = group_relative_advantage(scores, mask, groups)
    rows = groups == 7
    alone = group_relative_advantage(scores[rows], mask[rows], groups[rows])
    torch.testing.assert_close(advantage[rows], alone, rtol=0, atol=1e-6)
    order = torch.randperm(10)
    permuted = group_relative_advantage(scores[order], mask[order], groups[order])
    torch.testing.assert_close(permuted, advantage[order], rtol=0, atol=1e-5)


def test_groups_are_keyed_by_integers():
    with pytest.raises(ValueError, match="integer group_id"):
        group_relative_advantage(torch.rand(4, 1), torch.ones(4, 1).bool(), torch.zeros(4))
    with pytest.raises(ValueError, match=r"torch.int64 \(3,\)"):
        group_relative_advantage(torch.rand(4, 1), torch.ones(4, 1).bool(), torch.zeros(3, dtype=torch.long))


def test_masked_mean():
    values = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_mean(values, mask).tolist() == [[2.0], [0.0]]


def test_the_map_is_the_mean_of_advantage_times_evidence():
    advantage, mask = torch.randn(3, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    evidence = torch.rand(3, 4, 5, 6)
    evidence[~mask] = torch.nan
    result = advantage_map(advantage, mask, evidence)
    expected = (advantage[0, 0] * evidence[0, 0] + advantage[0, 1] * evidence[0, 1]) / 2
    torch.testing.assert_close(result[0], expected)
    torch.testing.assert_close(result[1], sum(advantage[1, k] * evidence[1, k] for k in range(4)) / 4)
    assert (result[2] == 0).all()
    shared = advantage_map(advantage[:, :1], mask, evidence)
    torch.testing.assert_close(shared[1], advantage[1, 0] * evidence[1].mean(0))


def test_tempering_keeps_the_mean():
    evidence = torch.rand(3, 2, 8, 8) ** 8
    evidence = evidence / evidence.mean((-2, -1), keepdim=True)
    assert evidence.max() > 4
    for options in ({}, {"uniform": 0.5}, {"map_cap": 2.0}, {"uniform": 0.3, "map_cap": 1.5}):
        tempered = temper_evidence(evidence, **options)
        torch.testing.assert_close(tempered.mean((-2, -1)), torch.ones(3, 2))
    assert torch.equal(temper_evidence(evidence), evidence)
    assert (temper_evidence(evidence, uniform=1.0) == 1).all()
    torch.testing.assert_close(temper_evidence(evidence, uniform=0.25), 0.75 * evidence + 0.25)
    capped = evidence.clamp(max=2.0)
    torch.testing.assert_close(temper_evidence(evidence, map_cap=2.0), capped / capped.mean((-2, -1), keepdim=True))


def test_others_evidence_matches_a_loop():
    groups = torch.tensor([5, 5, 9, 5, 9, 2**40])
    evidence, mask = torch.rand(6, 3, 4, 4), torch.rand(6, 3) < 0.7
    evidence[0, 1] = 0.0
    evidence = evidence / evidence.mean((-2, -1), keepdim=True).clamp_min(1e-6)
    evidence[~mask] = torch.nan
    found = others_evidence(evidence, mask, groups)
    for i in range(6):
        for k in range(3):
            rows = [j for j in range(6) if j != i and groups[j] == groups[i] and mask[j, k]]
            expected = sum((evidence[j, k] for j in rows), torch.zeros(4, 4))
            expected = expected / expected.mean() if expected.any() else torch.ones(4, 4)
            torch.testing.assert_close(found[i, k], expected, rtol=1e-4, atol=1e-4)


def test_others_evidence_does_not_depend_on_the_image_itself():
    evidence, mask, groups = torch.rand(4, 2, 3, 3), torch.ones(4, 2).bool(), torch.zeros(4, dtype=torch.long)
    changed = evidence.clone()
    changed[1] = torch.rand(2, 3, 3) * 5
    torch.testing.assert_close(others_evidence(changed, mask, groups)[1], others_evidence(evidence, mask, groups)[1])
