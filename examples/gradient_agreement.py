"""How much of a policy gradient is signal: do gradients of independent batches at frozen weights point the same way?

``python examples/gradient_agreement.py`` rolls out a few batches of the miniature, computes the gradient of each under
several placements of the advantages, and prints the mean cosine between batches, for all weights and per kind of them.
0 is pure noise. A large value is not yet good: a biased estimator agrees with itself, too.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import combinations

import torch
from torch import Tensor
from torchrl.envs import TransformedEnv
from tqdm import tqdm

from cast_rl.backbones import load_backbone
from cast_rl.envs import AtomRewardTransform, DenoisingEnv
from cast_rl.judges import load_judge
from cast_rl.miniature import GUIDANCE, STEPS, miniature_prompts
from cast_rl.objectives import AtomAdvantage, CASTLoss
from cast_rl.policy import make_policy
from cast_rl.prompt_bank import PromptBank

PLACEMENTS = {
    "own evidence": {"maps": "evidence"},
    "others' evidence": {"maps": "others"},
    "even, per atom": {"maps": "none"},
    "even, scalar": {"maps": "none", "advantage": "scalar"},
}
# Parts of names; "norm" and "attn." overlap.
KINDS = ("img_mod", "txt_mod", "img_mlp", "txt_mlp", "attn.", "time_text_embed", "img_in", "txt_in", "norm", "proj_out")


def agreement(gradients: list[Tensor]) -> tuple[float, float]:
    """Mean cosine over all pairs of the gradients ``(P,)``, and its standard error as if pairs were independent."""
    cosines = torch.stack([torch.cosine_similarity(a, b, dim=0) for a, b in combinations(gradients, 2)])
    return cosines.mean().item(), (cosines.std() / len(cosines) ** 0.5).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="per batch, with 12 images each")
    parser.add_argument("--judge", default="soft_oracle", help="oracle or soft_oracle")
    parser.add_argument("--delta", type=float, default=1.0, help="added to the standard deviation of scores")
    parser.add_argument("--start", type=int, default=1, help="first of the two stochastic steps")
    parser.add_argument("--share-noise", action="store_true", help="one initial noise per group")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.batches < 3:
        parser.error(f"--batches {args.batches}: at least 3 are needed for a standard error")

    torch.manual_seed(args.seed)
    backbone = load_backbone("miniature", guidance=GUIDANCE, device=args.device)
    backbone.train_weights(keep_reference=False)
    prompts = miniature_prompts(500, seed=77, held_out=False)
    base_env = DenoisingEnv.from_backbone(
        backbone, len(prompts), height=48, width=48, steps=STEPS, window=(args.start, args.start + 2),
        prompts_per_batch=args.prompts, group_size=12, seed=args.seed, share_noise=args.share_noise,
    )  # fmt: skip
    policy = make_policy(backbone, PromptBank.encode(backbone, prompts.texts), base_env.sigmas)
    env = TransformedEnv(base_env, AtomRewardTransform(load_judge(args.judge), prompts, grid=base_env.latent_shape[1:]))
    cast_loss = CASTLoss(policy)

    names = [name for name, _ in backbone.transformer.named_parameters()]
    found: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for _ in tqdm(range(args.batches), desc="batches"):
        with torch.no_grad():
            rollout = env.rollout(base_env.episode_length, policy)
        for placement, options in PLACEMENTS.items():
            backbone.transformer.zero_grad(set_to_none=True)
            steps = AtomAdvantage(**options, delta=args.delta).inv(rollout.clone())
            for part in steps.split(96):
                (cast_loss(part)["loss_objective"] * len(part) / len(steps)).backward()
            gradients = {
                name: (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for name, p in zip(names, backbone.transformer.parameters(), strict=True)
            }
            found[placement, "all weights"].append(torch.cat(list(gradients.values())))
            for kind in KINDS:
                found[placement, kind].append(torch.cat([g for name, g in gradients.items() if kind in name]))

    print(f"{'cosine between batches':>24s}" + "".join(f"{placement:>20s}" for placement in PLACEMENTS))
    for kind in ("all weights", *KINDS):
        cells = [agreement(found[placement, kind]) for placement in PLACEMENTS]
        print(f"{kind:>24s}" + "".join(f"{f'{mean:.3f} +- {error:.3f}':>20s}" for mean, error in cells))


if __name__ == "__main__":
    main()
