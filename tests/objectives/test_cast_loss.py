import pytest
import torch
from torch.distributions import Normal
from torchrl.objectives import ClipPPOLoss
from toy import GRID, ToyBackbone, toy_policy, toy_training_env

from cast_rl.objectives import AtomAdvantage, CASTLoss


def perturb(policy, scale=0.1):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)


@pytest.fixture
def setup():
    """(policy moved off the rollout's weights, its data (16,), the backbone)."""
    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    with torch.no_grad():
        data = AtomAdvantage().inv(toy_training_env(backbone).rollout(10, policy))
    perturb(policy)
    return policy, data, backbone


def gradient(loss, policy):
    policy.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("key", ["advantage_map", "advantage"])
@pytest.mark.parametrize("clip", [0.02, (0.01, 0.05)])
@pytest.mark.parametrize("functional", [False, True])
def test_equals_clip_ppo(setup, key, clip, functional):
    policy, data, _ = setup
    theirs = ClipPPOLoss(policy, None, clip_epsilon=clip, entropy_bonus=False, functional=False)
    theirs_in = data.copy()
    theirs_in["advantage"] = data[key].unsqueeze(-1) if key == "advantage_map" else data[key]
    expected = theirs(theirs_in)
    expected_gradient = gradient(expected["loss_objective"], policy)

    loss = CASTLoss(policy, clip_epsilon=clip, functional=functional)
    loss.set_keys(advantage=key)
    out = loss(data)
    torch.testing.assert_close(out["loss_objective"], expected["loss_objective"], rtol=0, atol=1e-6)
    # A functional loss holds the same parameters in a TensorDict.
    torch.testing.assert_close(gradient(out["loss_objective"], policy), expected_gradient, rtol=0, atol=1e-6)
    assert (loss.actor_network_params is not None) == functional
    for name in ("clip_fraction", "max_ratio", "mean_ratio"):
        torch.testing.assert_close(out[name], expected[name], rtol=1e-5, atol=1e-6)

    # The comparison is worth something only if ratios leave the clip range on both sides, with both signs.
    log_ratio = policy.get_dist(data.copy()).log_prob(data["action"]) - data["action_log_prob"]
    low, high = (clip, clip) if isinstance(clip, float) else clip
    sign = data[key].expand(16, 1).unsqueeze(-1) if key == "advantage" else data[key]
    for positive in (True, False):
        rows = (sign > 0) == positive
        assert (log_ratio.exp() > 1 + high)[rows.expand_as(log_ratio)].any()
        assert (log_ratio.exp() < 1 - low)[rows.expand_as(log_ratio)].any()
    assert 0.05 < out["clip_fraction"] < 0.95


def test_the_formula_by_hand(setup):
    policy, data, _ = setup
    out = CASTLoss(policy, clip_epsilon=(0.01, 0.03))(data)
    with torch.no_grad():
        dist = policy.get_dist(data.copy())
    ratio = (Normal(dist.loc, dist.scale).log_prob(data["action"]).mean(1) - data["action_log_prob"]).exp()
    advantage = data["advantage_map"]
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.99, 1.03) * advantage).mean()
    torch.testing.assert_close(out["loss_objective"], expected, rtol=0, atol=1e-5)
    assert out["max_abs_log_ratio"] == pytest.approx(ratio.log().abs().max().item(), abs=1e-5)
    assert out["kl_approx"] == pytest.approx(-ratio.log().mean().item(), abs=1e-5)
    assert out["ESS"] == pytest.approx((ratio.sum() ** 2 / (ratio**2).sum() / ratio.numel()).item(), rel=1e-4)


def test_one_ratio_per_sample_is_flow_grpo(setup):
    policy, data, _ = setup
    loss = CASTLoss(policy, clip_epsilon=1e-3, ratio="sample")
    loss.set_keys(advantage="advantage")
    out = loss(data)
    # Flow-GRPO: scalar log-probabilities, PPO's clipped objective, mean over samples.
    log_prob = policy.get_dist(data.copy()).log_prob(data["action"]).mean((1, 2))
    ratio = torch.exp(log_prob - data["action_log_prob"].mean((1, 2)))
    advantages = data["advantage"].flatten()
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - 1e-3, 1.0 + 1e-3)
    expected = torch.mean(torch.maximum(unclipped, clipped))
    torch.testing.assert_close(out["loss_objective"], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient(out["loss_objective"], policy), gradient(expected, policy), rtol=0, atol=1e-6)
    # With maps, each image's ratio weights its whole map.
    out = CASTLoss(policy, clip_epsilon=0.9, ratio="sample")(data)
    expected = -(ratio * data["advantage_map"].mean((1, 2))).mean()
    torch.testing.assert_close(out["loss_objective"], expected, rtol=0, atol=1e-5)


def test_at_the_rollout_s_weights_the_gradient_is_the_policy_gradient(setup):
    policy, data, _ = setup
    with torch.no_grad():
        data["action_log_prob"] = policy.get_dist(data.copy()).log_prob(data["action"])
    out = CASTLoss(policy)(data)
    assert out["loss_objective"].item() == pytest.approx(-data["advantage_map"].mean().item(), abs=1e-6)
    assert out["clip_fraction"] == 0
    assert out["ESS"] == pytest.approx(1.0)
    log_prob = policy.get_dist(data.copy()).log_prob(data["action"])
    expected = gradient(-(log_prob * data["advantage_map"]).mean(), policy)
    torch.testing.assert_close(gradient(out["loss_objective"], policy), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ratio", ["position", "sample"])
@pytest.mark.parametrize("key", ["advantage_map", "advantage"])
def test_masked_rows_do_not_count(setup, ratio, key):
    policy, data, _ = setup
    loss = CASTLoss(policy, clip_epsilon=0.02, ratio=ratio, kl_coeff=0.1)
    loss.set_keys(advantage=key)
    loss.loss_mask_key = "valid"
    data["ref_loc"] = torch.zeros_like(data["latent"])
    kept = data[:10]
    expected = loss(kept)
    expected_gradient = gradient(expected["loss_objective"] + expected["loss_kl_to_ref"], policy)
    data["valid"] = (torch.arange(16) < 10).unsqueeze(-1)
    data[key][10:] = torch.nan
    data["action_log_prob"][10:] = -1e4
    out = loss(data)
    for name in expected.keys():
        torch.testing.assert_close(out[name], expected[name], rtol=1e-5, atol=1e-6)
    actual = gradient(out["loss_objective"] + out["loss_kl_to_ref"], policy)
    torch.testing.assert_close(actual, expected_gradient, rtol=1e-4, atol=1e-6)


def test_a_mask_per_position(setup):
    policy, data, _ = setup
    data["valid"] = torch.rand(16, *GRID) < 0.5
    for ratio in ("position", "sample"):
        loss = CASTLoss(policy, clip_epsilon=0.9, ratio=ratio)
        loss.loss_mask_key = "valid"
        with torch.no_grad():
            out = loss(data)
            log_ratio = policy.get_dist(data.copy()).log_prob(data["action"]) - data["action_log_prob"]
        if ratio == "sample":
            log_ratio = torch.stack([row[valid].mean() for row, valid in zip(log_ratio, data["valid"], strict=True)])
            log_ratio = log_ratio.reshape(16, 1, 1).expand(16, *GRID)
        gain = (log_ratio.exp() * data["advantage_map"])[data["valid"]]
        torch.testing.assert_close(out["loss_objective"], -gain.mean(), rtol=0, atol=1e-5)


def test_kl_to_the_reference(setup):
    policy, data, backbone = setup
    loss = CASTLoss(policy, kl_coeff=0.3, reference=backbone.reference)
    out = loss(data)
    dist = policy.get_dist(data.copy())
    with torch.no_grad(), backbone.reference():
        reference = policy.get_dist(data.copy())
    expected = ((dist.loc - reference.loc) ** 2 / (2 * dist.scale**2)).mean()
    torch.testing.assert_close(out["kl_to_ref"], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out["loss_kl_to_ref"], 0.3 * out["kl_to_ref"], rtol=1e-6, atol=0)
    assert expected > 0
    # The same from stored means.
    data["ref_loc"] = reference.loc
    stored = CASTLoss(policy, kl_coeff=0.3)(data)
    torch.testing.assert_close(stored["kl_to_ref"], out["kl_to_ref"])
    assert not out["kl_to_ref"].requires_grad


def test_reductions(setup):
    policy, data, _ = setup
    with torch.no_grad():
        each = CASTLoss(policy, reduction="none")(data)["loss_objective"]
        assert each.shape == (16, *GRID)
        torch.testing.assert_close(CASTLoss(policy)(data)["loss_objective"], each.mean())
        torch.testing.assert_close(CASTLoss(policy, reduction="sum")(data)["loss_objective"], each.sum())


def test_keys_can_be_renamed_and_passed_by_name(setup):
    policy, data, _ = setup
    expected = CASTLoss(policy)(data)["loss_objective"]
    loss = CASTLoss(policy)
    loss.set_keys(advantage="A", action="y", sample_log_prob="logp")
    renamed = data.clone().rename_key_("advantage_map", "A").rename_key_("action", "y")
    assert torch.equal(loss(renamed.rename_key_("action_log_prob", "logp"))["loss_objective"], expected)
    loss = CASTLoss(policy)
    out = loss(**{key: data[key] for key in loss.in_keys})
    assert len(out) == len(loss.out_keys)
    assert torch.equal(out[0], expected)


def test_out_keys(setup):
    policy, data, backbone = setup
    for loss in (CASTLoss(policy), CASTLoss(policy, kl_coeff=0.1, reference=backbone.reference)):
        out = loss(data)
        assert set(out.keys()) == set(loss.out_keys)
        assert all(out[key].shape == () for key in out.keys())
        assert [key for key in out.keys() if out[key].requires_grad] == [
            k for k in loss.out_keys if k.startswith("loss_")
        ]


def test_the_input_is_left_alone(setup):
    policy, data, _ = setup
    before = data.clone()
    CASTLoss(policy)(data)
    assert set(data.keys()) == set(before.keys())
    assert (data == before).all()


def test_coefficients_can_be_scheduled(setup):
    policy, data, backbone = setup
    loss = CASTLoss(policy, kl_coeff=0.1, reference=backbone.reference)
    loss.kl_coeff = 0.2
    loss.clip_epsilon_high = 0.5
    out = loss(data)
    torch.testing.assert_close(out["loss_kl_to_ref"].detach(), 0.2 * out["kl_to_ref"])
    assert loss.clip_epsilon_high == 0.5


def test_missing_keys_are_listed_beside_those_there(setup):
    policy, data, _ = setup
    with pytest.raises(KeyError, match=r"\['advantage_map'\]; there are \['action', 'action_log_prob'"):
        CASTLoss(policy)(data.exclude("advantage_map"))
    with pytest.raises(KeyError, match="ref_loc"):
        CASTLoss(policy, kl_coeff=0.1)(data)


def test_an_advantage_of_another_shape_is_refused(setup):
    policy, data, _ = setup
    for wrong in (torch.ones(16), torch.ones(16, 4, 1), torch.ones(16, 2, 2)):
        with pytest.raises(ValueError, match="the advantage has shape"):
            CASTLoss(policy)(data.clone().set("advantage_map", wrong))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "pixel"}, "ratio='pixel'"),
        ({"kl_coeff": -1.0}, "kl_coeff=-1.0"),
        ({"clip_epsilon": -0.1}, "-0.1"),
        ({"clip_epsilon": (0.1, 0.2, 0.3)}, "length 2"),
        ({"functional": True, "reference": ToyBackbone().reference, "kl_coeff": 1.0}, "functional=False"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CASTLoss(toy_policy(ToyBackbone()), **options)


@pytest.mark.parametrize("options", [{"transition": "ode"}, {"transition": "cps", "a": 0.0}])
def test_a_policy_without_noise_cannot_be_trained(options):
    backbone = ToyBackbone()
    policy = toy_policy(backbone, **options)
    with torch.no_grad():
        data = AtomAdvantage().inv(toy_training_env(backbone, **options).rollout(10, policy))
    with pytest.raises(ValueError, match="no row of the batch is a stochastic step"):
        CASTLoss(policy)(data)
