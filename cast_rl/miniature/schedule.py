"""The learning-rate schedule of the miniature's pretraining."""

DECAY_FROM = 0.65  # share of the steps after which the rate falls linearly to 2 % of itself


def rate(progress: float, step: int) -> float:
    """The learning rate's factor: warm-up over 100 steps, constant, then a linear fall; ``progress`` in [0, 1]."""
    fall = 1.0 if progress < DECAY_FROM else max(0.02, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / 100) * fall
