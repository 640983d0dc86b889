"""One denoising step as a Gaussian: ODE, Flow-SDE, Dance-SDE and CPS in one family.

With ``x_sigma = (1 - sigma) x0 + sigma eps`` and ``v = eps - x0``, a step from ``s`` to ``s' < s`` is

    x' = (1 - s') x0hat + c epshat + std z,    x0hat = x - s v,    epshat = x + (1 - s) v,    z ~ N(0, I).

==========  ====================  ================================================================
kind        c                     std
==========  ====================  ================================================================
ode         s'                    0
flow_sde    s' - k^2 D / (2 s)    k sqrt(D), k = a sqrt(s / (1 - min(s, s_1)))  (arXiv 2505.05470)
dance_sde   s' - k^2 D / (2 s)    k sqrt(D), k = a                              (arXiv 2505.07818)
cps         s' cos(a pi / 2)      s' sin(a pi / 2)                    (Flow-CPS, arXiv 2509.05952)
==========  ====================  ================================================================

``D = s - s'``; ``s_1`` is the schedule's second sigma. All of it is computed in float32 at least.

With shorter steps ODE, Flow-SDE and Dance-SDE approach the data's law. CPS at a fixed ``a`` has no such limit, since it
injects as much noise however short the step; it has one where ``s' sin(a pi / 2)`` shrinks as ``k sqrt(D)``.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, register_kl

Kind = Literal["ode", "flow_sde", "dance_sde", "cps"]
KINDS: tuple[str, ...] = get_args(Kind)

NOISE_TOLERANCE = 0.25
"""How far from 1 the noise that a stochastic step leaves may be.

Beyond it the network is fed states noisier (or cleaner) than any it was trained on at that sigma.
"""


def check_kind(kind: str, a: float) -> None:
    """Refuses an unknown transition kind or a noise level out of range.

    Raises:
        ValueError: if ``kind`` is unknown, ``a`` is negative or not finite, or above 1 for ``cps``.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown transition {kind!r}; choose one of {', '.join(KINDS)}")
    if not (math.isfinite(a) and a >= 0):
        raise ValueError(f"the noise level a must be finite and >= 0, got {a}")
    if kind == "cps" and a > 1:
        raise ValueError(f"the noise level a of a cps transition lies in [0, 1], got {a}")


def _real(value: Tensor | float, like: Tensor | None = None) -> Tensor:
    """At least float32, and on the device of ``like``."""
    value = torch.as_tensor(value, device=None if like is None else like.device)
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _rows(value: Tensor, x: Tensor) -> Tensor:
    """``(B,)`` or ``()`` -> broadcastable to ``x (B, C, h, w)``."""
    return value.reshape(-1, *(1,) * (x.ndim - 1)) if value.ndim else value


def coefficients(
    kind: Kind, sigma: Tensor, sigma_next: Tensor, a: float, sigma_cap: Tensor | float
) -> tuple[Tensor, Tensor]:
    """The coefficients ``(c, std)`` of a step, elementwise over ``sigma`` and ``sigma_next`` (any shape).

    Args:
        a: noise level.
        sigma_cap: the schedule's second sigma; only ``flow_sde`` reads it, to stay finite at ``sigma = 1``.
    """
    check_kind(kind, a)
    sigma = _real(sigma)
    sigma_next = _real(sigma_next, sigma)
    if kind == "ode":
        return sigma_next, torch.zeros_like(sigma_next)
    if kind == "cps":
        return sigma_next * math.cos(a * math.pi / 2), sigma_next * math.sin(a * math.pi / 2)
    k_squared = torch.full_like(sigma, a * a)
    if kind == "flow_sde":
        k_squared = k_squared * sigma / (1 - torch.minimum(sigma, _real(sigma_cap, sigma).to(sigma.dtype)))
    variance = k_squared * (sigma - sigma_next)
    return sigma_next - variance / (2 * sigma), variance.sqrt()


def tweedie(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """The estimate of the clean latent, ``x - sigma v (B, C, h, w)``; ``sigma`` is ``(B,)`` or a scalar."""
    x, velocity = _real(x), _real(velocity)
    return x - _rows(_real(sigma, x), x) * velocity


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Euler's step of the probability-flow ODE, ``x + (s' - s) v``, as diffusers' Euler scheduler has it."""
    x, velocity = _real(x), _real(velocity)
    return x + _rows(_real(sigma_next, x) - _real(sigma, x), x) * velocity


def transition_mean_std(
    kind: Kind,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    a: float,
    sigma_cap: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Mean ``(B, C, h, w)`` and standard deviation ``(B, 1, 1, 1)`` (or a scalar) of ``x'`` given ``x``.

    Args:
        x: state, ``(B, C, h, w)``; lower precision than float32 is raised to float32.
        velocity: the network's velocity at ``x``, same shape.
        sigma, sigma_next: ``(B,)`` or scalars.
        a: noise level.
        sigma_cap: the schedule's second sigma.
    """
    x, velocity = _real(x), _real(velocity)
    sigma, sigma_next = _real(sigma, x), _real(sigma_next, x)
    c, std = coefficients(kind, sigma, sigma_next, a, sigma_cap)
    clean = tweedie(x, velocity, sigma)
    noise = x + _rows(1 - sigma, x) * velocity
    return _rows(1 - sigma_next, x) * clean + _rows(c, x) * noise, _rows(std, x)


def log_prob_map(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Gaussian log-density of ``y (B, C, h, w)``, averaged over channels: ``(B, h, w)``.

    Its spatial mean is Flow-GRPO's scalar log-probability (arXiv 2505.05470).
    """
    y, mean, std = _real(y), _real(mean), _real(std)
    return (-((y - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)).mean(-3)


def noise_left(kind: Kind, sigmas: Tensor, a: float) -> Tensor:
    """The noise a step leaves over what the next sigma calls for, ``sqrt(c^2 + std^2) / s'``: ``(steps,)``.

    1 means that the state has the marginal the network was trained on. Into ``s' = 0`` it is infinite where
    any noise remains, else 1.

    Args:
        sigmas: the schedule, ``(steps + 1,)``, falling to its last value.
    """
    sigmas = _real(sigmas)
    following = sigmas[1:]
    c, std = coefficients(kind, sigmas[:-1], following, a, sigmas[1])
    left = torch.hypot(c, std)
    return torch.where((following == 0) & (left == 0), 1.0, left / following)


def usable_steps(kind: Kind, sigmas: Tensor, a: float, *, tolerance: float = NOISE_TOLERANCE) -> Tensor:
    """Which steps may be stochastic: they inject noise, and leave within ``tolerance`` of the right amount.

    Returns:
        bool ``(steps,)``. All false for ``ode`` and for ``a = 0``, which have no density to learn from.
    """
    sigmas = _real(sigmas)
    _, std = coefficients(kind, sigmas[:-1], sigmas[1:], a, sigmas[1])
    return (std > 0) & ((noise_left(kind, sigmas, a) - 1).abs() <= tolerance)


class FlowTransition(Distribution):
    """``N(loc, scale^2)`` over latents where ``active``, else a point mass at the ODE state.

    Unlike a torch distribution over an event, ``log_prob``, ``entropy`` and the KL divergence keep one value
    per latent position, averaged over channels, ``(B, h, w)``; all are 0 for the point masses, so that a
    ratio of two of them is 1.

    Args:
        loc: mean of the stochastic step, ``(*B, C, h, w)``.
        scale: standard deviation, broadcastable to ``loc``; read only where ``active``.
        ode: state after the deterministic (macro) step, ``(*B, C, h, w)``.
        active: bool ``(*B,)`` or ``(*B, 1)``, true inside the SDE window.
    """

    arg_constraints: dict = {}
    support = torch.distributions.constraints.independent(torch.distributions.constraints.real, 3)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, ode: Tensor, active: Tensor, validate_args: bool | None = None):
        self.ode = ode
        self.active = active.reshape(*loc.shape[:-3], 1, 1, 1)
        self.loc = torch.where(self.active, loc, ode)
        self.scale = torch.where(self.active, scale, 1.0).expand_as(loc)
        # A point mass has scale 1 here only so that its masked-out terms stay finite in the backward pass.
        self._normal = Normal(self.loc, self.scale, validate_args=False)
        super().__init__(loc.shape[:-3], loc.shape[-3:], validate_args=False)

    @property
    def deterministic_sample(self) -> Tensor:
        """The ODE state: not the SDE mean, which differs from it by the drift correction."""
        return self.ode

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return torch.where(self.active, self.scale**2, 0.0)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return torch.where(self.active, self._normal.rsample(torch.Size(sample_shape)), self.ode)

    def log_prob(self, value: Tensor) -> Tensor:
        return self._gated(log_prob_map(value, self.loc, self.scale))

    def entropy(self) -> Tensor:
        return self._gated(self._normal.entropy().mean(-3))

    def _gated(self, per_position: Tensor) -> Tensor:
        return torch.where(self.active.squeeze(-3), per_position, 0.0)


@register_kl(FlowTransition, FlowTransition)
def _kl_flow_flow(p: FlowTransition, q: FlowTransition) -> Tensor:
    if not torch.equal(p.active, q.active):
        raise ValueError("the KL divergence of two FlowTransitions needs the same rows inside the window")
    return p._gated(torch.distributions.kl_divergence(p._normal, q._normal).mean(-3))
