"""A world small enough for two CPU cores, in the production classes: scenes, oracles, a tiny generator."""

from cast_rl.miniature.assemble import WEIGHTS
from cast_rl.miniature.oracle import Oracle
from cast_rl.miniature.soft_oracle import SoftOracle
from cast_rl.miniature.vocabulary import sample_graphs
from cast_rl.prompts import PromptSet

GENERATOR = WEIGHTS / "generator"
GUIDANCE = 3.75  # beyond it more guidance makes the shipped generator follow prompts hardly better
STEPS = 10

__all__ = ["GENERATOR", "GUIDANCE", "STEPS", "Oracle", "SoftOracle", "miniature_prompts"]


def miniature_prompts(n: int, seed: int, *, held_out: bool | None) -> PromptSet:
    """``n`` different prompts of two and three groups of objects, as hard in training as in evaluation.

    Held-out prompts contain a pair of kinds that neither the generator's training nor the other split has seen;
    None takes whatever is drawn.
    """
    return PromptSet.from_graphs(sample_graphs(n, seed, held_out=held_out))
