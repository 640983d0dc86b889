"""From finished trajectories to training steps: advantages on the way into the replay buffer."""

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from cast_rl.masked import masked_mean
from cast_rl.objectives.functional import (
    advantage_map,
    group_mean_std,
    group_relative_advantage,
    others_evidence,
    temper_evidence,
)


class AtomAdvantage(Transform):
    """Replay-buffer transform (write side) that turns whole trajectories into window steps with advantages.

    Takes trajectories ``(N, T)``, or flat ``(N * T,)`` with the steps of a trajectory in order; a row may
    hold several trajectories one after the other. Groups are keyed by ``group_id`` and should be written
    whole. Writes

    - ``advantage (M, 1)``: mean over the valid atoms, weighted by ``atom_weight`` if there is one;
    - ``advantage_map (M, h, w)``: the same, placed where the evidence lies; its spatial mean is
      ``advantage``;

    keeps only the M steps inside the window, and drops ``next`` (images' scores and evidence, following
    latents). On the read side it does nothing.

    Args:
        advantage: ``"atom"`` normalises each atom within the group; ``"causal"``, too, but compares an atom only among
            the images in which it could hold (``atom_reachable``), so that a missing object does not count against
            every fact about it, and gives it the advantage 0 in the others; ``"scalar"`` normalises the mean score
            of the valid atoms (weighted, if there are weights), as Flow-GRPO does its reward.
        maps: ``"evidence"`` places an image's advantages by its own evidence; ``"others"`` by the mean evidence of the
            other images of its group, which is independent of the image's own noise (see
            `cast_rl.objectives.functional.others_evidence`); ``"none"`` spreads them evenly.
        uniform, map_cap: see `cast_rl.objectives.functional.temper_evidence`.
        delta: added to the standard deviation (of the population, as in Flow-GRPO). With a judge whose scores are
            probabilities a small one lets an atom that hardly varies count as much as any other; from 1 on scores are
            hardly normalised at all (Dr. GRPO, arXiv 2503.20783).
        keep: keys to keep although they lie under ``next``.

    Attributes:
        stats: of the last write: ``trajectories``, ``groups``, ``mean_score`` (over valid atoms), ``masked``
            (images times atoms without a score in a group that has one for that atom) and ``varying``, the
            fraction of (group, atom) pairs, or of groups for ``"scalar"``, that have any variance to learn
            from.

    Raises:
        ValueError: for options out of range, keys that are missing, data that are not whole trajectories, and groups
            of more than one prompt.
    """

    def __init__(
        self,
        *,
        advantage: Literal["atom", "causal", "scalar"] = "atom",
        maps: Literal["evidence", "others", "none"] = "evidence",
        uniform: float = 0.0,
        map_cap: float | None = None,
        delta: float = 1e-4,
        keep: Sequence[NestedKey] = (),
    ):
        super().__init__()
        if advantage not in ("atom", "causal", "scalar"):
            raise ValueError(f"advantage={advantage!r} is unknown; choose 'atom', 'causal' or 'scalar'")
        if maps not in ("evidence", "others", "none"):
            raise ValueError(f"maps={maps!r} is unknown; choose 'evidence', 'others' or 'none'")
        if not 0 <= uniform <= 1:
            raise ValueError(f"uniform={uniform} must lie in [0, 1]")
        if map_cap is not None and map_cap < 1:
            raise ValueError(f"map_cap={map_cap} must be at least 1, the mean of a map; use None for no cap")
        if delta <= 0:
            raise ValueError(f"delta={delta} must be positive")
        self.advantage, self.maps = advantage, maps
        self.uniform, self.map_cap, self.delta = uniform, map_cap, delta
        self.keep = tuple(keep)
        self.stats: dict[str, float] = {}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_keys(tensordict)
        steps = tensordict.reshape(-1)
        last, trajectory = split_trajectories(steps)
        final = steps[last]
        scores, groups = final["next", "atom_scores"], final["group_id"].reshape(-1)
        mask = final["next", "atom_mask"] & scores.isfinite()
        _check_groups(groups, final.get("prompt_id", None))

        weight = final.get(("next", "atom_weight"), None)

        columns, valid, share = scores, mask, weight
        if self.advantage == "scalar":
            counted = mask if weight is None else mask & (weight > 0)
            columns, valid, share = masked_mean(scores, mask, weight), counted.any(-1, keepdim=True), None
        compared = valid & final["next", "atom_reachable"] if self.advantage == "causal" else valid
        per_column = group_relative_advantage(columns, compared, groups, delta=self.delta)
        scalar = masked_mean(per_column, valid, share)
        if self.maps == "none":
            placed = scalar.unsqueeze(-1).expand(-1, *final["latent"].shape[-2:])
        else:
            evidence = final["next", "evidence"]
            if self.maps == "others":
                evidence = others_evidence(evidence, mask, groups)
            evidence = temper_evidence(evidence, uniform=self.uniform, map_cap=self.map_cap)
            placed = advantage_map(per_column, mask, evidence, weight)
        self._record(scores, mask, columns, compared, groups)

        inside = steps["in_window"].reshape(-1)
        kept, trajectory = steps[inside], trajectory[inside]
        extra = kept.select(*self.keep, strict=True) if self.keep else None
        kept = kept.exclude("next")
        if extra is not None:
            kept.update(extra)
        return kept.update({"advantage": scalar[trajectory], "advantage_map": placed[trajectory]})

    def _record(self, scores: Tensor, mask: Tensor, columns: Tensor, valid: Tensor, groups: Tensor) -> None:
        _, _, varies = group_mean_std(columns, valid, groups)
        ids, index = groups.unique(return_inverse=True)
        asked, varying = _any_per_group(valid, index), _any_per_group(varies, index)
        atom_asked = _any_per_group(mask, index)
        self.stats = {
            "trajectories": len(groups),
            "groups": len(ids),
            "mean_score": float(scores[mask].mean()) if mask.any() else 0.0,
            "masked": int((atom_asked[index] & ~mask).sum()),
            "varying": int(varying.sum()) / max(1, int(asked.sum())),
        }

    def _check_keys(self, tensordict: TensorDictBase) -> None:
        needed = [
            "group_id",
            "latent",
            "in_window",
            "step_index",
            "next_index",
            ("next", "done"),
            ("next", "atom_scores"),
        ]
        needed += [("next", "atom_mask")] + [("next", "evidence")] * (self.maps != "none")
        needed += [("next", "atom_reachable")] * (self.advantage == "causal")
        missing = [key for key in needed if key not in tensordict.keys(True)]
        if missing:
            there = sorted(map(str, tensordict.keys(True, True)))
            raise ValueError(f"AtomAdvantage needs {missing}; there are {there}. Is AtomRewardTransform in place?")


def _check_groups(groups: Tensor, prompt_id: Tensor | None) -> None:
    """Refuses a group id that two prompts share, whose scores must not be compared; both ``(N,)``."""
    if prompt_id is None:
        return
    pairs = torch.stack([groups, prompt_id.reshape(-1)], 1).unique(dim=0)
    ids, prompts = pairs.unbind(1)
    shared = ids[1:][ids[1:] == ids[:-1]]
    if len(shared):
        raise ValueError(
            f"group {int(shared[0])} holds images of the prompts {prompts[ids == shared[0]].tolist()}. Environments "
            "that write into one buffer must differ in rank, or their group ids collide"
        )


def _any_per_group(flags: Tensor, group: Tensor) -> Tensor:
    """Whether any member of each group has the flag: ``(N, K)`` to ``(groups, K)``; ``group``: from 0 on."""
    counts = torch.zeros(int(group.max()) + 1, flags.shape[1], dtype=torch.long, device=flags.device)
    return counts.index_add(0, group, flags.long()) > 0


def split_trajectories(steps: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Finds the trajectories in a flat sequence of steps of `cast_rl.envs.DenoisingEnv`.

    Returns:
        ``last (N,)``, the index of each trajectory's last step, and ``trajectory (steps,)``, the trajectory
        of each step.

    Raises:
        ValueError: if a trajectory is cut off, or its steps are not in order.
    """
    done = steps["next", "done"].reshape(-1)
    last = done.nonzero().flatten()
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    trajectory = (done.cumsum(0) - done.long()).clamp(max=max(0, len(last) - 1))
    begin, end = steps["step_index"].reshape(-1), steps["next_index"].reshape(-1)
    group = steps["group_id"].reshape(-1)
    linked = (end[:-1] == begin[1:]) & (group[:-1] == group[1:])
    if not len(last) or not done[-1] or (begin[first] != 0).any() or not (linked | done[:-1]).all():
        raise ValueError(
            "expected whole trajectories, as (N, T) or flat with each trajectory's steps in order. A "
            "collector's frames_per_batch must be a multiple of env.batch_size[0] * env.episode_length"
        )
    return last, trajectory
