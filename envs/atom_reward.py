"""Per-atom rewards: a judge scores every atom of the finished images and says where it looked."""

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional as F
from torchrl.data import Binary, Bounded, TensorSpec, Unbounded
from torchrl.envs import Transform

from cast_rl.judges import Judge, ask
from cast_rl.masked import masked_mean
from cast_rl.scene_graph import SKILLS

ATOM_KEYS = ("atom_scores", "atom_mask", "atom_reachable", "atom_weight")


class AtomRewardTransform(Transform):
    """Calls the judge on the rows that are done and writes, next to the step:

    - ``atom_scores (B, K)`` in [0, 1], 0 where masked;
    - ``atom_mask (B, K)`` bool: false beyond the prompt's atoms, and where the judge failed;
    - ``atom_reachable (B, K)`` bool: whether the atoms that an atom depends on (its ``parents``) all hold, with a score
      above one half, or none: there is no colour of a thing that is not there;
    - ``atom_weight (B, K)``: the weight of the atom's skill, 0 beyond the prompt's atoms;
    - ``evidence (B, K, h, w)``, each valid atom's map with unit spatial mean, 0 where masked;
    - ``reward (B, 1)``: weighted mean score over the valid atoms, 0 if there is none.

    They are declared in the reward spec, so that they exist next to a step only. Before an episode ends they
    are 0. A score that is not finite is masked and counted, never read as 0. An atom without evidence, or
    whose evidence is not finite, gets the uniform map.

    Args:
        judge: ``judge(images (n, 3, H, W), atoms)``. If it has a ``device``, images are sent there; what it
            returns is brought back. It sees only finished images of prompts that have atoms.
        prompts: what ``prompt_id`` indexes; each item has ``atoms``.
        grid: ``(h, w)`` of the evidence, as a rule the latent grid.
        max_atoms: K; by default the largest number of atoms of a prompt.
        skill_weights: how much the atoms of a skill count, such as ``{"scene": 2}``; 1 for those not named.
        keep_pixels: keep ``pixels`` next to the step; otherwise they are dropped once judged.
        max_failed: the largest share of the images judged together on which the judge may fail altogether. Above it
            too few are left to compare.

    Attributes:
        counts: since construction, ``judged`` atoms, ``failed`` ones among them (not finite, or masked by the
            judge) and ``no_evidence``, atoms that got the uniform map although the judge gives evidence.

    Raises:
        ValueError: if a prompt has more than ``max_atoms`` atoms; for a judgement of a wrong shape, with
            scores outside [0, 1] or with negative evidence.
        RuntimeError: the judge failed on more than ``max_failed`` of the images.
    """

    def __init__(
        self,
        judge: Judge,
        prompts: Sequence,
        *,
        grid: tuple[int, int],
        max_atoms: int | None = None,
        skill_weights: Mapping[str, float] | None = None,
        keep_pixels: bool = False,
        max_failed: float = 0.5,
    ):
        super().__init__(in_keys=["pixels", "prompt_id"], out_keys=["reward", *ATOM_KEYS, "evidence"])
        sizes = [len(prompt.atoms) for prompt in prompts]
        most = max(sizes, default=0)
        if max_atoms is not None and most > max_atoms:
            raise ValueError(f"prompt {sizes.index(most)} has {most} atoms, more than max_atoms={max_atoms}")
        if not 0 <= max_failed <= 1:
            raise ValueError(f"max_failed={max_failed} is a share, from 0 to 1")
        self.max_failed = max_failed
        self.skill_weights = _check_weights(skill_weights or {})
        _check_parents(prompts)
        # A judge that is a module must not become a submodule: env.to() and env.state_dict() would claim it.
        self.__dict__["judge"] = judge
        self.prompts = prompts
        # At least one column, so that a set without any atoms keeps ordinary shapes.
        self.max_atoms = max(1, most) if max_atoms is None else max_atoms
        self.grid, self.keep_pixels = tuple(grid), keep_pixels
        self.counts = {"judged": 0, "failed": 0, "no_evidence": 0}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict["done"].reshape(-1)
        rows, device = len(done), done.device
        scores = torch.zeros(rows, self.max_atoms, device=device)
        mask = torch.zeros(rows, self.max_atoms, dtype=torch.bool, device=device)
        reachable, weight = torch.zeros_like(mask), torch.zeros_like(scores)
        evidence = torch.zeros(rows, self.max_atoms, *self.grid, device=device)
        atoms = self._atoms_of(next_tensordict["prompt_id"].reshape(-1).tolist())
        if done.any():
            asked = [atoms[row] for row in done.nonzero().flatten().tolist()]
            judgement = ask(self.judge, next_tensordict["pixels"][done], asked, self.max_atoms)
            scores[done], mask[done] = judgement.scores, judgement.mask
            reachable[done] = reachable_atoms(judgement.scores, judgement.mask, asked)
            weight[done] = self._weights_of(asked).to(device)
            evidence[done] = self._evidence_maps(judgement.evidence, judgement.mask)
            self.counts["judged"] += sum(map(len, asked))
            self.counts["failed"] += sum(map(len, asked)) - int(judgement.mask.sum())
            self._check_enough_left(judgement.mask, asked)
        next_tensordict.update(dict(zip(ATOM_KEYS, (scores, mask, reachable, weight), strict=True)))
        next_tensordict.update({"reward": masked_mean(scores, mask, weight), "evidence": evidence})
        return next_tensordict if self.keep_pixels else next_tensordict.exclude("pixels")

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        spec = reward_spec.clone()
        batch, device = spec.shape, spec.device
        spec["atom_scores"] = Bounded(0, 1, (*batch, self.max_atoms), dtype=torch.float32, device=device)
        for key in ("atom_mask", "atom_reachable"):
            spec[key] = Binary(shape=(*batch, self.max_atoms), dtype=torch.bool, device=device)
        spec["atom_weight"] = Unbounded((*batch, self.max_atoms), device=device)
        spec["evidence"] = Unbounded((*batch, self.max_atoms, *self.grid), device=device)
        if not self.keep_pixels:
            del spec["pixels"]
        return spec

    def _atoms_of(self, prompt_ids: list[int]) -> list[Sequence]:
        if max(prompt_ids) >= len(self.prompts):
            raise ValueError(
                f"prompt_id {max(prompt_ids)} is out of range: AtomRewardTransform was given "
                f"{len(self.prompts)} prompts; the environment's num_prompts must be the same"
            )
        return [self.prompts[i].atoms for i in prompt_ids]

    def _check_enough_left(self, mask: Tensor, asked: Sequence[Sequence]) -> None:
        """Stops the run if too few images could be judged; ``mask (n, K)``."""
        wanted = torch.tensor([len(row) > 0 for row in asked], device=mask.device)
        failed, judged = int((wanted & ~mask.any(1)).sum()), int(wanted.sum())
        if failed > self.max_failed * judged:
            raise RuntimeError(
                f"the judge failed on {failed} of {judged} images, more than max_failed={self.max_failed} of them: it "
                "raised, masked them, or gave scores that are not finite. See its warnings, or allow for more failures"
            )

    def _weights_of(self, atoms: Sequence[Sequence]) -> Tensor:
        """``(B, K)``, 0 beyond the atoms of a row."""
        rows = [[self.skill_weights.get(getattr(atom, "skill", None), 1.0) for atom in row] for row in atoms]
        return torch.tensor([row + [0.0] * (self.max_atoms - len(row)) for row in rows], dtype=torch.float32)

    def _evidence_maps(self, evidence: Tensor | None, valid: Tensor) -> Tensor:
        """Evidence on the grid, averaged by area to unit spatial mean; uniform where there is none."""
        shown = valid[..., None, None]
        if evidence is None:
            return shown.expand(*valid.shape, *self.grid).float()
        finite = evidence.isfinite().all(-1).all(-1) & valid
        maps = F.interpolate(torch.where(finite[..., None, None], evidence, 0.0), size=self.grid, mode="area")
        mean = maps.mean((-2, -1), keepdim=True)
        self.counts["no_evidence"] += int((valid & (mean == 0).flatten(1)).sum())
        return torch.where(mean > 0, maps / mean.clamp_min(torch.finfo(mean.dtype).tiny), 1.0) * shown


def _check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    for skill, weight in weights.items():
        if skill not in SKILLS:
            raise ValueError(f"skill_weights names {skill!r}, which is no skill; skills are {', '.join(SKILLS)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e6:
            raise ValueError(f"skill_weights[{skill!r}]={weight!r} must be a number from 0 to 1e6")
    if all(weights.get(skill, 1.0) == 0 for skill in SKILLS):
        raise ValueError("skill_weights are 0 for every skill, which leaves nothing to reward")
    return dict(weights)


def _check_parents(prompts: Sequence) -> None:
    for index, prompt in enumerate(prompts):
        for k, atom in enumerate(prompt.atoms):
            wrong = [parent for parent in getattr(atom, "parents", ()) if not 0 <= parent < k]
            if wrong:
                raise ValueError(f"atom {k} of prompt {index} depends on atom {wrong[0]}; parents must come before it")


def reachable_atoms(scores: Tensor, mask: Tensor, atoms: Sequence[Sequence]) -> Tensor:
    """Which atoms could hold, given those they depend on: ``scores, mask (B, K)`` to bool ``(B, K)``.

    An atom is reachable if all its ``parents`` are, and hold: a score above one half, or none (a failure of the judge
    says nothing). Parents come before their children. False beyond the atoms of a row.
    """
    holds = ((scores > 0.5) | ~mask).tolist()
    rows = []
    for row, asked in enumerate(atoms):
        reachable: list[bool] = []
        for atom in asked:
            reachable.append(all(reachable[parent] and holds[row][parent] for parent in getattr(atom, "parents", ())))
        rows.append(reachable + [False] * (scores.shape[1] - len(reachable)))
    return torch.tensor(rows, dtype=torch.bool, device=scores.device).reshape(mask.shape)
