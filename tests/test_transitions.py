import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from cast_rl.transitions import (
    KINDS,
    FlowTransition,
    coefficients,
    log_prob_map,
    noise_left,
    ode_step,
    transition_mean_std,
    tweedie,
    usable_steps,
)

STOCHASTIC = [kind for kind in KINDS if kind != "ode"]


def shifted(steps: int, shift: float = 3.0) -> torch.Tensor:
    """The schedule of `FlowMatchEulerDiscreteScheduler(shift=shift)`, float64 (steps + 1,)."""
    sigma = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    return torch.cat([shift * sigma / (1 + (shift - 1) * sigma), sigma.new_zeros(1)])


@pytest.fixture
def step():
    """(x, v, sigma (B,), sigma_next (B,), s_1) in float64, rows at the first steps of a schedule."""
    sigmas = shifted(10)
    x = torch.randn(4, 3, 2, 5, dtype=torch.float64)
    return x, torch.randn_like(x), sigmas[:4], sigmas[1:5], sigmas[1]


def flow_grpo_step(x, v, sigma, sigma_next, a, sigma_max):
    """`sde_step_with_logprob` of Flow-GRPO's code, in its own variables."""
    dt = sigma_next - sigma
    std_dev_t = torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))) * a
    mean = x * (1 + std_dev_t**2 / (2 * sigma) * dt) + v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std_dev_t * torch.sqrt(-1 * dt)


def dance_grpo_step(x, v, sigma, sigma_next, eta):
    """`flux_step` of DanceGRPO's code: the ODE mean with the score correction."""
    dsigma = sigma_next - sigma
    mean = x + dsigma * v
    clean = x - sigma * v
    score = -(x - clean * (1 - sigma)) / sigma**2
    return mean + -0.5 * eta**2 * score * dsigma, eta * torch.sqrt(-dsigma)


def rows(value):
    return value.reshape(-1, 1, 1, 1)


def test_flow_sde_is_flow_grpo(step):
    x, v, sigma, sigma_next, cap = step
    mean, std = transition_mean_std("flow_sde", x, v, sigma, sigma_next, 0.7, cap)
    expected = flow_grpo_step(x, v, rows(sigma), rows(sigma_next), 0.7, cap)
    torch.testing.assert_close(mean, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(std, expected[1], rtol=0, atol=1e-12)
    assert mean.dtype == std.dtype == torch.float64


def test_dance_sde_is_dance_grpo(step):
    x, v, sigma, sigma_next, cap = step
    mean, std = transition_mean_std("dance_sde", x, v, sigma, sigma_next, 0.3, cap)
    expected = dance_grpo_step(x, v, rows(sigma), rows(sigma_next), 0.3)
    torch.testing.assert_close(mean, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(std, expected[1], rtol=0, atol=1e-12)


def test_cps_closed_form(step):
    x, v, sigma, sigma_next, cap = step
    mean, std = transition_mean_std("cps", x, v, sigma, sigma_next, 0.4, cap)
    clean, noise = x - rows(sigma) * v, x + (1 - rows(sigma)) * v
    angle = 0.4 * math.pi / 2
    torch.testing.assert_close(mean, (1 - rows(sigma_next)) * clean + rows(sigma_next) * math.cos(angle) * noise)
    torch.testing.assert_close(std, rows(sigma_next) * math.sin(angle))


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_every_kind_is_the_ode(kind, step):
    x, v, sigma, sigma_next, cap = step
    mean, std = transition_mean_std(kind, x, v, sigma, sigma_next, 0.0, cap)
    torch.testing.assert_close(mean, x + (rows(sigma_next) - rows(sigma)) * v, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean, ode_step(x, v, sigma, sigma_next), rtol=0, atol=1e-12)
    assert (std == 0).all()


def test_cps_leaves_the_ode_s_marginal_variance():
    sigmas = shifted(10)
    c, std = coefficients("cps", sigmas[:-1], sigmas[1:], 0.7, sigmas[1])
    ode_c, _ = coefficients("ode", sigmas[:-1], sigmas[1:], 0.7, sigmas[1])
    torch.testing.assert_close(c**2 + std**2, ode_c**2)
    # ... and so does a sample: x0 = 0 and unit noise in, variance s'^2 out.
    noise = torch.randn(200_000, 1, 1, 1, dtype=torch.float64)
    mean, std = transition_mean_std("cps", sigmas[2] * noise, noise, sigmas[2], sigmas[3], 0.7, sigmas[1])
    sample = mean + std * torch.randn_like(mean)
    assert sample.std().item() == pytest.approx(sigmas[3].item(), rel=0.01)


def test_tweedie_inverts_the_interpolation():
    clean, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    sigma = torch.tensor([0.9, 0.2])
    x = (1 - rows(sigma)) * clean + rows(sigma) * noise
    torch.testing.assert_close(tweedie(x, noise - clean, sigma), clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_is_raised_to_float32(kind):
    x = torch.randn(2, 3, 4, 4).bfloat16()
    sigma, sigma_next = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.4])
    mean, std = transition_mean_std(kind, x, x, sigma, sigma_next, 0.5, 0.95)
    expected, _ = transition_mean_std(kind, x.double(), x.double(), sigma.double(), sigma_next.double(), 0.5, 0.95)
    assert mean.dtype == std.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)


def test_log_prob_map_is_flow_grpo_s_scalar_and_torch_s_normal():
    y, mean, std = torch.randn(4, 3, 2, 5), torch.randn(4, 3, 2, 5), torch.rand(4, 1, 1, 1) + 0.1
    # Flow-GRPO: one scalar per sample, the mean over all dimensions but the batch.
    scalar = (
        -((y.detach() - mean) ** 2) / (2 * (std**2)) - torch.log(std) - torch.log(torch.sqrt(2 * torch.tensor(math.pi)))
    ).mean(dim=(1, 2, 3))
    logp = log_prob_map(y, mean, std)
    assert logp.shape == (4, 2, 5)
    torch.testing.assert_close(logp.mean((1, 2)), scalar, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logp, Normal(mean, std.expand_as(mean)).log_prob(y).mean(1), rtol=1e-6, atol=1e-6)


def test_noise_left_separates_sound_from_unsound_steps():
    # Qwen-Image stretches its schedule to end at 0.02, then 0: the step into 0.02 is far too long for an SDE.
    sigmas = shifted(20)[:-1]
    sigmas = torch.cat([1 - (1 - sigmas) * 0.98 / (1 - sigmas[-1]), sigmas.new_zeros(1)])
    left = noise_left("flow_sde", sigmas, 0.7)
    c, std = coefficients("flow_sde", sigmas[18], sigmas[19], 0.7, sigmas[1])
    assert c < 0
    assert left[18] > 4
    assert left[18] == pytest.approx(float((c**2 + std**2).sqrt() / sigmas[19]))
    usable = usable_steps("flow_sde", sigmas, 0.7)
    assert usable[:15].all()
    assert not usable[18:].any()
    assert left[19] == torch.inf
    # CPS leaves the right amount everywhere, but has no noise to inject into sigma 0.
    torch.testing.assert_close(noise_left("cps", sigmas, 0.7), torch.ones(20, dtype=torch.float64))
    assert usable_steps("cps", sigmas, 0.7).tolist() == [True] * 19 + [False]
    assert not usable_steps("ode", sigmas, 0.7).any()
    assert not usable_steps("cps", sigmas, 0.0).any()
    assert usable_steps("flow_sde", sigmas, 0.7, tolerance=100.0)[18]


@pytest.mark.parametrize(
    ("kind", "a", "message"),
    [("sde", 0.5, "'sde'"), ("cps", 1.5, "1.5"), ("flow_sde", -1.0, "-1.0"), ("cps", math.nan, "nan")],
)
def test_unknown_kinds_and_noise_levels_are_named(kind, a, message):
    with pytest.raises(ValueError, match=message):
        coefficients(kind, torch.tensor(0.5), torch.tensor(0.4), a, 0.9)


@pytest.fixture
def dist():
    """Two rows inside the window, one outside."""
    loc, ode = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    return FlowTransition(loc, torch.full((3, 1, 1, 1), 0.3), ode, torch.tensor([[True], [False], [True]]))


def test_distribution_is_a_gated_normal(dist):
    sample = dist.sample()
    assert torch.equal(sample[1], dist.ode[1])
    assert not torch.equal(sample[0], dist.ode[0])
    normal = Normal(dist.loc[0], 0.3)
    torch.testing.assert_close(dist.log_prob(sample)[0], normal.log_prob(sample[0]).mean(0))
    torch.testing.assert_close(dist.entropy()[0], normal.entropy().mean(0))
    assert (dist.log_prob(torch.randn_like(sample))[1] == 0).all()
    assert (dist.entropy()[1] == 0).all()
    assert dist.log_prob(sample).shape == (3, 4, 5)
    assert torch.equal(dist.deterministic_sample, dist.ode)
    assert torch.equal(dist.mean, dist.loc)
    assert torch.equal(dist.mean[1], dist.ode[1])
    assert dist.variance[0].unique().item() == pytest.approx(0.09)
    assert (dist.variance[1] == 0).all()


def test_samples_have_the_stated_spread():
    shape = (20_000, 1, 1, 1)
    dist = FlowTransition(
        torch.full(shape, 2.0), torch.full(shape, 0.3), torch.zeros(shape), torch.ones(20_000, 1).bool()
    )
    sample = dist.sample()
    assert sample.mean().item() == pytest.approx(2.0, abs=0.01)
    assert sample.std().item() == pytest.approx(0.3, abs=0.01)


def test_kl_is_the_channel_average(dist):
    other = FlowTransition(dist.loc + 0.1, dist.scale * 2, dist.ode, dist.active)
    kl = kl_divergence(dist, other)
    expected = kl_divergence(Normal(dist.loc, dist.scale), Normal(other.loc, other.scale)).mean(1)
    torch.testing.assert_close(kl[0], expected[0])
    assert (kl[1] == 0).all()
    assert kl.shape == (3, 4, 5)
    with pytest.raises(ValueError, match="same rows"):
        kl_divergence(dist, FlowTransition(dist.loc, dist.scale, dist.ode, torch.ones(3, 1).bool()))


def test_point_masses_keep_gradients_finite():
    loc = torch.randn(2, 2, 3, 3, requires_grad=True)
    scale = torch.tensor([0.3, 0.0]).reshape(2, 1, 1, 1)
    dist = FlowTransition(loc, scale, torch.zeros(2, 2, 3, 3), torch.tensor([True, False]))
    dist.log_prob(torch.randn(2, 2, 3, 3)).sum().backward()
    assert loc.grad.isfinite().all()
    assert (loc.grad[1] == 0).all()
    assert (loc.grad[0] != 0).any()
