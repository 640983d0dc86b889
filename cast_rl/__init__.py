"""CAST-RL: reinforcement learning of flow-matching text-to-image models with per-atom, grounded rewards.

Import from the part you need; this module stays light:

- `cast_rl.backbones`: pretrained diffusers pipelines behind one protocol, LoRA, `load_backbone`
- `cast_rl.judges`: what scores the atoms of an image and where their evidence lies
- `cast_rl.envs`: TorchRL environments and transforms
- `cast_rl.objectives`: advantages and losses
- `cast_rl.policy`, `cast_rl.transitions`, `cast_rl.prompt_bank`: the denoising policy and its parts
"""

__version__ = "0.1.0"
