"""The CAST objective: PPO's clipped surrogate per latent position, weighted by an advantage map."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor
from torch.distributions import kl_divergence
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import _validate_clip_epsilon

from cast_rl.transitions import FlowTransition


class CASTLoss(LossModule):
    """``L = - E_{i, t, p} [ min(r M, clip(r, 1 - eps, 1 + eps) M) ] + beta KL(pi || ref)``.

    Source: CAST (arXiv 2609.39441).

    ``r (N, h, w)`` is the ratio of the log-probability maps and ``M`` the advantage map. With
    ``ratio="sample"`` there is one ratio per image, from the spatial mean of the log-ratio: with an even map
    that is Flow-GRPO's objective.

    Reads what the actor reads, and (see `set_keys`) ``action (N, C, h, w)``, ``action_log_prob (N, h, w)``
    and ``advantage_map``: a map ``(N, h, w)`` or one value per image, ``(N, 1)``. Returns

    - ``loss_objective``, and with ``kl_coeff`` ``loss_kl_to_ref`` (weighted) and ``kl_to_ref``;
    - diagnostics: ``clip_fraction``, ``kl_approx`` (mean of -log r), ``ESS`` (effective sample size over all
      ratios, as a fraction), ``max_ratio``, ``mean_ratio`` and ``max_abs_log_ratio``, which on the first pass
      over fresh data says how far training recomputes other log-probabilities than the rollout had.

    The mean is over all positions, or over those that the entry `loss_mask_key` names; the advantages and
    log-probabilities of the others may hold anything.

    Args:
        actor_network: the policy of `cast_rl.policy.make_policy`.
        clip_epsilon: ``eps``, or ``(low, high)``.
        kl_coeff: ``beta``; None for no KL term. The KL is exact, per position, averaged over channels.
        reference: returns a context manager inside which the actor is the reference policy, e.g.
            ``backbone.reference``. Without it the reference's mean is read from ``ref_loc (N, C, h, w)``.
        ratio: ``"position"`` or ``"sample"``.
        functional: isolate the actor's parameters in a TensorDict, as other TorchRL losses do. Costly for
            large models, and in the way of FSDP2 and gradient checkpointing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        ValueError: for options out of range, an advantage of another shape, or a batch without a stochastic step.
        KeyError: if an entry is missing, with those that are there.
    """

    @dataclass
    class _AcceptedKeys:
        """The entries that `set_keys` can rename."""

        advantage: NestedKey = "advantage_map"
        action: NestedKey = "action"
        sample_log_prob: NestedKey = "action_log_prob"
        ref_loc: NestedKey = "ref_loc"
        priority_weight: NestedKey = "_weight"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams | None
    target_actor_network_params: TensorDictParams | None
    _schedulable_buffers = frozenset({"clip_epsilon_low", "clip_epsilon_high", "kl_coeff"})

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_coeff: float | None = None,
        reference: Callable[[], contextlib.AbstractContextManager] | None = None,
        ratio: Literal["position", "sample"] = "position",
        functional: bool = False,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ):
        if ratio not in ("position", "sample"):
            raise ValueError(f"ratio={ratio!r} is unknown; choose 'position' or 'sample'")
        if kl_coeff is not None and kl_coeff < 0:
            raise ValueError(f"kl_coeff={kl_coeff} must be >= 0; None leaves the KL term out")
        if functional and reference is not None:
            raise ValueError(
                "reference switches the actor's own modules, which functional=True sets aside; use "
                "functional=False, or store the reference's mean under the key 'ref_loc'"
            )
        self._functional = functional
        self._in_keys = None
        super().__init__()
        if functional:
            self.convert_to_functional(actor_network, "actor_network")
        else:
            self.actor_network, self.actor_network_params = actor_network, None
        self.reference, self.ratio, self.reduction = reference, ratio, reduction
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        low, high = _validate_clip_epsilon(clip_epsilon)
        for name, value in (("clip_epsilon_low", low), ("clip_epsilon_high", high), ("kl_coeff", kl_coeff)):
            self.register_buffer(name, None if value is None else torch.tensor(float(value), device=device))
        kl_keys = [] if kl_coeff is None else ["loss_kl_to_ref", "kl_to_ref"]
        diagnostics = ["clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio", "max_abs_log_ratio"]
        # On the instance: TensorDictModuleBase replaces a class attribute of this name by a property.
        self.out_keys = ["loss_objective", *kl_keys, *diagnostics]

    @property
    def functional(self) -> bool:
        return self._functional

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        self._in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        if self._in_keys is None:
            keys = self.tensor_keys
            needed = [*self.actor_network.in_keys, keys.action, keys.sample_log_prob, keys.advantage]
            if self.kl_coeff is not None and self.reference is None:
                needed.append(keys.ref_loc)
            self._in_keys = list(dict.fromkeys(needed))
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        keys = self.tensor_keys
        self._check_keys(tensordict)
        dist = self._dist(tensordict)
        if not dist.active.any():
            raise ValueError(
                "no row of the batch is a stochastic step, so there is no gradient to train on. Roll out with a "
                "transition other than 'ode' and with a > 0, and write the data through AtomAdvantage"
            )
        log_prob = dist.log_prob(tensordict.get(keys.action))
        mask = self._mask(tensordict, log_prob)
        # Selected, not multiplied: an infinite ratio in a masked row would turn its zero gradient into NaN.
        log_ratio = torch.where(mask, log_prob - tensordict.get(keys.sample_log_prob), 0.0)
        advantage = torch.where(mask, self._advantage(tensordict.get(keys.advantage), log_ratio), 0.0)
        if self.ratio == "sample":
            positions = mask.sum((-2, -1), keepdim=True)
            log_ratio = log_ratio.sum((-2, -1), keepdim=True) / positions.clamp_min(1)
            counted = positions > 0
        else:
            counted = mask
        clipped = log_ratio.clamp((-self.clip_epsilon_low).log1p(), self.clip_epsilon_high.log1p())
        gain = torch.minimum(log_ratio.exp() * advantage, clipped.exp() * advantage)
        out = TensorDict(loss_objective=self._reduce_loss(-gain, tensordict))
        if self.kl_coeff is not None:
            kl = self._reduce_loss(kl_divergence(dist, self._reference_dist(tensordict, dist)), tensordict)
            out["loss_kl_to_ref"], out["kl_to_ref"] = self.kl_coeff * kl, kl.detach()
        return out.update(_diagnostics(log_ratio.detach(), clipped.detach(), counted))

    def _dist(self, tensordict: TensorDictBase) -> FlowTransition:
        with (
            self.actor_network_params.to_module(self.actor_network, preserve_module_state=False)
            if self.functional
            else contextlib.nullcontext()
        ):
            # get_dist writes the distribution's parameters into what it is given.
            return self.actor_network.get_dist(tensordict.copy())

    @torch.no_grad()
    def _reference_dist(self, tensordict: TensorDictBase, dist: FlowTransition) -> FlowTransition:
        """The reference's transition. Only the actor's side of the KL carries gradient."""
        if self.reference is not None:
            with self.reference():
                return self._dist(tensordict)
        loc = tensordict.get(self.tensor_keys.ref_loc)
        return FlowTransition(loc, dist.scale.detach(), loc, dist.active)

    def _mask(self, tensordict: TensorDictBase, like: Tensor) -> Tensor:
        mask = torch.ones_like(like, dtype=torch.bool)
        for key in self._loss_mask_keys():
            entry = tensordict.get(key, None)
            if entry is not None:
                mask = mask & self._expand_loss_mask(entry, like)
        return mask

    @staticmethod
    def _advantage(advantage: Tensor, log_ratio: Tensor) -> Tensor:
        if advantage.shape == log_ratio.shape:
            return advantage
        if advantage.shape == (*log_ratio.shape[:-2], 1):
            return advantage.unsqueeze(-1)
        raise ValueError(
            f"the advantage has shape {tuple(advantage.shape)}; expected a map {tuple(log_ratio.shape)} or "
            f"one value per image {(*log_ratio.shape[:-2], 1)}"
        )

    def _check_keys(self, tensordict: TensorDictBase) -> None:
        there = set(tensordict.keys(True))
        missing = [key for key in self.in_keys if key not in there]
        if missing:
            raise KeyError(
                f"CASTLoss needs the entries {missing}; there are {sorted(map(str, there))}. Write data "
                "through AtomAdvantage, or rename keys with set_keys"
            )


def _diagnostics(log_ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Figures about the ratios where ``mask``; the three tensors have one shape."""
    count = mask.sum().clamp_min(1)
    weight = mask.to(log_ratio.dtype)
    ratio = torch.where(mask, log_ratio.exp(), 0.0)
    return {
        "clip_fraction": ((clipped != log_ratio) & mask).sum() / count,
        "kl_approx": -(log_ratio * weight).sum() / count,
        "ESS": ratio.sum() ** 2 / (ratio**2).sum().clamp_min(torch.finfo(ratio.dtype).tiny) / count,
        "max_ratio": ratio.max(),
        "mean_ratio": ratio.sum() / count,
        "max_abs_log_ratio": (log_ratio * weight).abs().max(),
    }
