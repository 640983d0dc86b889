"""Judges: from an image and the facts asked of it to scores and evidence."""

from cast_rl.judges.ask import ask
from cast_rl.judges.base import Judge, Judgement
from cast_rl.judges.evidence import EvidenceSettings
from cast_rl.judges.load import load_judge
from cast_rl.judges.vlm import VLMJudge

__all__ = ["EvidenceSettings", "Judge", "Judgement", "VLMJudge", "ask", "load_judge"]
