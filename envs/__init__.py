"""TorchRL environments and transforms: the denoising environment and the per-atom reward."""

if __name__ == "envs":
    raise ImportError(
        "this folder is the package cast_rl.envs; install CAST-RL or run from its root, and "
        "write `from cast_rl.envs import DenoisingEnv`"
    )

from cast_rl.envs.atom_reward import AtomRewardTransform
from cast_rl.envs.denoising import DenoisingEnv
from cast_rl.envs.draws import draw_latent_seeds, draw_prompts

__all__ = ["AtomRewardTransform", "DenoisingEnv", "draw_latent_seeds", "draw_prompts"]
