"""The transitions against each other in their limits, and against a Gaussian whose marginals are known; in float64.

For scalar data ``x0 ~ N(MEAN, VARIANCE)`` the true velocity is affine in x, so a step maps one Gaussian onto another
and the law after any number of steps is computed exactly, without sampling.
"""

import math

import pytest
import torch
from torch import Tensor

from cast_rl.transitions import KINDS, coefficients, ode_step, transition_mean_std

MEAN, VARIANCE = 0.7, 0.25
STOCHASTIC = [kind for kind in KINDS if kind != "ode"]


def grid(steps: int, first: float = 0.9, last: float = 0.2) -> Tensor:
    return torch.linspace(first, last, steps + 1, dtype=torch.float64)


def marginal(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``(1 - sigma) x0 + sigma eps``."""
    return (1 - sigma) * MEAN, (1 - sigma) ** 2 * VARIANCE + sigma**2


def true_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """``E[eps - x0 | x]``."""
    mean, variance = marginal(sigma)
    return (sigma - (1 - sigma) * VARIANCE) / variance * (x - mean) - MEAN


def law_at_the_end(kind: str, sigmas: Tensor, noise) -> tuple[Tensor, Tensor]:
    """Mean and variance after all steps from the right marginal; ``noise(s, s')`` is the level a of a step."""
    mean, variance = marginal(sigmas[0])
    for s, s_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = torch.stack([mean, mean + 1]).reshape(2, 1, 1, 1)
        loc, std = transition_mean_std(kind, x, true_velocity(x, s), s, s_next, noise(s, s_next), sigmas[1])
        here, one_further = loc.flatten()
        mean, variance = here, (one_further - here) ** 2 * variance + std.flatten()[0] ** 2
    return mean, variance


def errors(kind: str, noise, first: float = 0.9, last: float = 0.2) -> list[float]:
    """Of the variance at the end, for 50, 100, 200 and 400 steps; the mean is exact."""
    found = []
    for steps in (50, 100, 200, 400):
        sigmas = grid(steps, first, last)
        mean, variance = law_at_the_end(kind, sigmas, noise)
        true_mean, true_variance = marginal(sigmas[-1])
        assert abs(mean - true_mean) < 1e-12
        found.append(abs(float(variance - true_variance)))
    return found


@pytest.mark.parametrize("last", [0.2, 0.0])
@pytest.mark.parametrize(("kind", "a"), [("ode", 0.0), ("flow_sde", 0.7), ("dance_sde", 0.7)])
def test_halving_the_steps_halves_the_distance_to_the_true_law(kind, a, last):
    coarse = errors(kind, lambda s, s_next: a, last=last)
    assert coarse[0] < 0.02
    for before, after in zip(coarse[:-1], coarse[1:], strict=True):
        assert 0.45 < after / before < 0.6


def matched(k: float):
    """The CPS level that injects as much as an SDE of strength k, ``s' sin(a pi / 2) = k sqrt(D)``."""
    return lambda s, s_next: 2 / math.pi * math.asin(k * math.sqrt(s - s_next) / s_next)


def test_cps_converges_to_the_same_law_when_its_noise_shrinks_as_an_sde_s():
    found = errors("cps", matched(0.7))
    assert found[0] < 0.02
    assert all(0.45 < after / before < 0.55 for before, after in zip(found[:-1], found[1:], strict=True))


def test_cps_at_a_fixed_level_has_no_limit_of_fine_steps():
    """It injects as much per step however short the step: coefficients are preserved, the law is not."""
    found = errors("cps", lambda s, s_next: 0.6)
    assert all(error > 0.03 for error in found) and found[-1] > 0.8 * found[0]


def test_dance_sde_is_flow_sde_at_the_strength_of_the_step():
    sigmas = grid(10)
    for s, s_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        strength = 0.7 * math.sqrt(s / (1 - min(s, sigmas[1])))
        flow = coefficients("flow_sde", s, s_next, 0.7, sigmas[1])
        dance = coefficients("dance_sde", s, s_next, strength, sigmas[1])
        torch.testing.assert_close(torch.stack(flow), torch.stack(dance), rtol=0, atol=1e-14)


def test_cps_and_dance_sde_with_equal_noise_differ_to_second_order():
    gaps = []
    for step in (0.04, 0.02, 0.01, 0.005):
        s, s_next = torch.tensor([0.6, 0.6 - step], dtype=torch.float64)
        dance, std = coefficients("dance_sde", s, s_next, 0.5, 0.9)
        cps, cps_std = coefficients("cps", s, s_next, matched(0.5)(s, s_next), 0.9)
        assert abs(std - cps_std) < 1e-15
        gaps.append(abs(float(dance - cps)))
    assert all(3.5 < coarse / fine < 5 for coarse, fine in zip(gaps[:-1], gaps[1:], strict=True))


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_little_noise_is_the_ode_with_a_drift_of_second_order(kind):
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    v = torch.randn_like(x)
    s, s_next = torch.tensor([0.8, 0.65], dtype=torch.float64)
    ode = ode_step(x, v, s, s_next)
    drifts, stds = [], []
    for a in (0.1, 0.05, 0.025):
        mean, std = transition_mean_std(kind, x, v, s, s_next, a, 0.9)
        drifts.append(float((mean - ode).abs().max()))
        stds.append(float(std))
    assert [drifts[i] / drifts[i + 1] for i in (0, 1)] == pytest.approx([4, 4], rel=0.01)
    assert [stds[i] / stds[i + 1] for i in (0, 1)] == pytest.approx([2, 2], rel=0.01)
    mean, std = transition_mean_std(kind, x, v, s, s_next, 0.0, 0.9)
    torch.testing.assert_close(mean, ode, rtol=0, atol=1e-14)
    assert std == 0 and mean.dtype == torch.float64


@pytest.mark.parametrize("a", [0.1, 0.6, 1.0])
def test_a_cps_step_has_the_ode_s_marginal_variance(a):
    """Given clean image and noise, the state has variance s'^2 whatever a is; with the true ones, the marginal."""
    sigmas = grid(12, 1.0, 0.0)
    c, std = coefficients("cps", sigmas[:-1], sigmas[1:], a, sigmas[1])
    ode, _ = coefficients("ode", sigmas[:-1], sigmas[1:], 0.0, sigmas[1])
    torch.testing.assert_close(c**2 + std**2, ode**2, rtol=0, atol=1e-15)
    _, variance = marginal(sigmas[1:])
    torch.testing.assert_close((1 - sigmas[1:]) ** 2 * VARIANCE + c**2 + std**2, variance, rtol=0, atol=1e-15)
