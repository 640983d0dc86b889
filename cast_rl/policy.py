"""The denoising policy: one stochastic step inside the SDE window, deterministic macro steps outside it."""

import copy
from typing import Protocol

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from cast_rl.transitions import FlowTransition, Kind, check_kind, ode_step, transition_mean_std, usable_steps


class VelocityModel(Protocol):
    """What the policy needs of a backbone."""

    transformer: nn.Module

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict, negative: dict | None) -> Tensor: ...


class DenoisingNet(nn.Module):
    """Latents and step indices to the parameters of a `FlowTransition`.

    Args:
        backbone: gives ``velocity(x (B, C, h, w), sigma (B,), cond, negative)``; its ``transformer`` is the
            only submodule whose parameters the policy owns.
        bank: module from ``prompt_id (B,)`` to ``(cond, negative | None)``.
        sigmas: schedule, ``(steps + 1,)``, falling to 0.
        transition: kind of the stochastic step.
        a: its noise level.
    """

    def __init__(self, backbone: VelocityModel, bank: nn.Module, sigmas: Tensor, *, transition: Kind, a: float):
        super().__init__()
        check_kind(transition, a)
        self.transformer = backbone.transformer
        self.bank = bank
        self.kind, self.a = transition, a
        # Neither parameters nor buffers: weight syncs and checkpoints must not carry them, nor may
        # `.to(bfloat16)` round them.
        self._backbone = backbone
        self._sigmas = sigmas.detach().clone().to(torch.float32)
        usable = usable_steps(transition, self._sigmas, a)
        # Without noise to inject, any step may lie inside the window.
        self._usable = torch.ones_like(usable) if transition == "ode" or a == 0 else usable

    def __deepcopy__(self, memo: dict) -> "DenoisingNet":
        """Copies the transformer; the rest of the pipeline (text encoder, VAE) stays frozen and is shared."""
        backbone = copy.copy(self._backbone)
        backbone.transformer = copy.deepcopy(self.transformer, memo)
        bank = copy.deepcopy(self.bank, memo)
        clone = type(self)(backbone, bank, self._sigmas, transition=self.kind, a=self.a).train(self.training)
        memo[id(self)] = clone
        return clone

    def forward(
        self, latent: Tensor, step_index: Tensor, next_index: Tensor, in_window: Tensor, prompt_id: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(loc, scale, ode, active)`` of `FlowTransition`, for any leading batch dimensions ``*B``.

        Args:
            latent: ``(*B, C, h, w)``.
            step_index, next_index, in_window, prompt_id: ``(*B, 1)``. Inside the window ``next_index`` is
                ``step_index + 1``; outside, the ODE is integrated from one to the other, without gradient.

        Raises:
            ValueError: if a row inside the window spans other than one step, or takes one that this transition must
                not take (`cast_rl.transitions.usable_steps`), or an index leaves the schedule.
        """
        lead = latent.shape[:-3]
        x = latent.reshape(-1, *latent.shape[-3:]).float()
        step, stop = step_index.reshape(-1), next_index.reshape(-1)
        window, prompt = in_window.reshape(-1).bool(), prompt_id.reshape(-1)
        self._check(step, stop, window)

        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(window.any())):
            sigma, sigma_next = self._sigma_pair(step)
            v = self._velocity(x, sigma, prompt, step < stop)
            loc, scale = transition_mean_std(self.kind, x, v, sigma, sigma_next, self.a, self._sigmas[1])
            ode = ode_step(x, v, sigma, sigma_next)
        ode = self._integrate(ode, step + 1, stop, prompt)
        # Without injected noise (ode, or a = 0) a step inside the window is a point mass too.
        active = window & (scale > 0).reshape(-1)
        return tuple(out.reshape(*lead, *out.shape[1:]) for out in (loc, scale, ode, active.unsqueeze(-1)))

    @torch.no_grad()
    def _integrate(self, x: Tensor, step: Tensor, stop: Tensor, prompt: Tensor) -> Tensor:
        """The ODE from ``step`` to ``stop``, both ``(N,)``; ``x`` itself if no row has a step left."""
        while (moving := step < stop).any():
            sigma, sigma_next = self._sigma_pair(step)
            x = ode_step(x, self._velocity(x, sigma, prompt, moving), sigma, sigma_next)
            step = step + 1
        return x

    def _velocity(self, x: Tensor, sigma: Tensor, prompt: Tensor, moving: Tensor) -> Tensor:
        """The network's velocity for rows that move, 0 (at no cost) for the others: ``(N, C, h, w)``."""
        if moving.all():
            return self._backbone.velocity(x, sigma, *self.bank(prompt))
        v = torch.zeros_like(x)
        if moving.any():
            rows = moving.nonzero().squeeze(-1)
            v = v.index_copy(0, rows, self._backbone.velocity(x[rows], sigma[rows], *self.bank(prompt[rows])))
        return v

    def _sigma_pair(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """``(s, s')`` of the step; a row that has reached the end gets the last step's, and does not move."""
        if self._sigmas.device != step.device:
            self._sigmas = self._sigmas.to(step.device)
        step = step.clamp(max=len(self._sigmas) - 2)
        return self._sigmas[step], self._sigmas[step + 1]

    def _check(self, step: Tensor, stop: Tensor, window: Tensor) -> None:
        steps = len(self._sigmas) - 1
        outside = (step < 0) | (stop < step) | (stop > steps)
        wide = window & (stop != step + 1)
        self._usable = self._usable.to(step.device)
        noisy = window & ~self._usable[step.clamp(0, steps - 1)]
        for bad, rule in (
            (outside, f"0 <= step_index <= next_index <= {steps}"),
            (wide, "next_index = step_index + 1 inside the window"),
            (noisy, f"a step that {self.kind} with a={self.a} may take inside the window"),
        ):
            if bad.any():
                row = int(bad.nonzero()[0])
                raise ValueError(
                    f"row {row} has step_index {int(step[row])}, next_index {int(stop[row])}; the policy "
                    f"needs {rule}. Was the environment built for another schedule or transition?"
                )


def make_policy(
    backbone: VelocityModel, bank: nn.Module, sigmas: Tensor, *, transition: Kind = "cps", a: float = 0.6
) -> ProbabilisticTensorDictSequential:
    """The policy that `cast_rl.envs.DenoisingEnv` is stepped with and `cast_rl.objectives.CASTLoss` trains.

    Reads ``latent (B, C, h, w)`` and ``step_index, next_index, in_window, prompt_id (B, 1)``; writes
    ``action`` ``(B, C, h, w)`` and ``action_log_prob (B, h, w)``. Inside the window the action is sampled
    from the transition (under ``ExplorationType.DETERMINISTIC`` it is the ODE step); outside it is the ODE's
    macro step, with log-probability 0. Sampling uses torch's global generator, as every TorchRL policy does.

    Args:
        backbone: see `DenoisingNet`.
        bank: module from ``prompt_id`` to ``(cond, negative | None)``, e.g. `cast_rl.prompt_bank.PromptBank`.
        sigmas: the schedule the environment has, ``(steps + 1,)``.
        transition, a: kind and noise level of the stochastic step, see `cast_rl.transitions`.
    """
    net = DenoisingNet(backbone, bank, sigmas, transition=transition, a=a)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(
            net,
            in_keys=["latent", "step_index", "next_index", "in_window", "prompt_id"],
            out_keys=["loc", "scale", "ode", "active"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale", "ode", "active"],
            out_keys=["action"],
            distribution_class=FlowTransition,
            return_log_prob=True,
            log_prob_keys=["action_log_prob"],
            default_interaction_type=InteractionType.RANDOM,
        ),
    )
    return policy.select_out_keys("action", "action_log_prob")
