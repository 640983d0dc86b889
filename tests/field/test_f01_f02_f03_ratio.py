"""F1, F2 and F3: training recomputes the rollout's log-probabilities, whatever else is in the batch."""

import pytest
import torch
from toy import ToyBackbone, toy_policy, toy_training_env

from cast_rl.objectives import AtomAdvantage, CASTLoss

KINDS = ["cps", "flow_sde", "dance_sde"]
CLIP = 0.01


def rollout(kind, dtype=torch.float32):
    """(policy, window steps (8, 2)) of one iteration."""
    backbone = ToyBackbone(dtype=dtype)
    policy = toy_policy(backbone, transition=kind, a=0.5)
    with torch.no_grad():
        data = toy_training_env(backbone, transition=kind, a=0.5).rollout(10, policy)
    return policy, AtomAdvantage().inv(data).reshape(8, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 1])
def test_f01_float32_ratio_is_exactly_one(kind, step):
    policy, data = rollout(kind)
    assert data["latent"].dtype == data["action"].dtype == data["action_log_prob"].dtype == torch.float32
    out = CASTLoss(policy, clip_epsilon=CLIP)(data[:, step])
    assert out["max_abs_log_ratio"] == 0
    assert out["max_ratio"] == out["mean_ratio"] == 1
    assert out["clip_fraction"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_f01_bfloat16_ratio_is_logged_and_far_inside_the_clip_range(kind):
    policy, data = rollout(kind, torch.bfloat16)
    assert data["latent"].dtype == data["action"].dtype == torch.float32
    loss = CASTLoss(policy, clip_epsilon=CLIP)
    for batch in (data.reshape(-1), data[:3, 0], data[:1, 1]):
        assert loss(batch)["max_abs_log_ratio"] < CLIP / 10


@pytest.mark.parametrize("kind", KINDS)
def test_f01_is_able_to_fail(kind):
    policy, data = rollout(kind)
    data["latent"] = data["latent"].bfloat16().float()
    assert CASTLoss(policy, clip_epsilon=CLIP)(data.reshape(-1))["max_abs_log_ratio"] > CLIP / 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_f02_the_batch_size_does_not_matter(kind, size):
    policy, data = rollout(kind)
    loss = CASTLoss(policy)
    for step in range(2):
        for batch in data[:, step].split(size):
            assert loss(batch)["max_abs_log_ratio"] <= 1e-5


@pytest.mark.parametrize("ratio", ["position", "sample"])
def test_f03_a_row_s_loss_is_its_own(ratio):
    policy, data = rollout("cps")
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    first = data[:, 0].clone().set("ref_loc", torch.randn(8, 3, 4, 4))
    other = first.clone()
    for key in ("latent", "action", "advantage_map", "action_log_prob", "ref_loc"):
        other[key][1:] = torch.randn_like(other[key][1:])
    loss = CASTLoss(policy, kl_coeff=0.5, ratio=ratio, reduction="none", clip_epsilon=CLIP)
    ours, theirs = loss(first), loss(other)
    for key in ("loss_objective", "loss_kl_to_ref"):
        assert torch.equal(ours[key][0], theirs[key][0])
        assert not torch.equal(ours[key][1], theirs[key][1])
    order = torch.randperm(8)
    permuted = loss(first[order])
    torch.testing.assert_close(permuted["loss_objective"], ours["loss_objective"][order], rtol=0, atol=1e-5)
