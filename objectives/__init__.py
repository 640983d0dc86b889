"""TorchRL objectives: per-atom advantages and the CAST loss."""

if __name__ == "objectives":
    raise ImportError(
        "this folder is the package cast_rl.objectives; install CAST-RL or run from its root, and "
        "write `from cast_rl.objectives import CASTLoss`"
    )

from cast_rl.objectives.atom_advantage import AtomAdvantage
from cast_rl.objectives.cast_loss import CASTLoss

__all__ = ["AtomAdvantage", "CASTLoss"]
