"""Judges: from an image and the facts asked of it to scores and evidence."""

from cast_rl.judges.base import Judge, Judgement

__all__ = ["Judge", "Judgement"]
