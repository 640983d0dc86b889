"""CAST-RL: online reinforcement learning of flow-matching text-to-image models with per-atom, grounded rewards."""
