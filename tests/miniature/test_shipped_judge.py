"""The judge that ships: its size, and that it sees what it was measured to see."""

import pytest
import torch

from cast_rl.backbones import load_backbone
from cast_rl.judges import VLMJudge, load_judge
from cast_rl.miniature import GUIDANCE, miniature_prompts
from cast_rl.miniature.assemble import WEIGHTS
from cast_rl.miniature.judge_data import draw
from cast_rl.miniature.judge_quality import judge_figures

pytestmark = pytest.mark.filterwarnings("ignore:no words of the prompt")


def test_it_is_a_qwen3_vl_of_at_most_three_million_weights_and_eight_megabytes():
    judge = load_judge("miniature")
    assert isinstance(judge, VLMJudge)
    model = judge.family.model
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert sum(p.numel() for p in model.parameters()) <= 3e6
    files = [f for f in (WEIGHTS / "judge").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 8e6
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".txt", ".jinja"}


def test_it_sees_what_it_was_measured_to_see():
    """A coarse guard on 96 prompts; ``pretrain_miniature.py check --judge miniature`` measures 1,000."""
    prompts = miniature_prompts(96, seed=5, held_out=True)
    with torch.no_grad():
        images = draw(load_backbone("miniature", guidance=GUIDANCE), prompts.texts, 0, rollout=False)
    figures = judge_figures(load_judge("miniature"), [p.graph for p in prompts], images)
    assert all(figures["auc"][skill] > 0.85 for skill in ("object", "attribute", "count", "position")), figures
    assert figures["correlation"] > 0.8 and figures["unjudged"] == 0
    assert all(mass > 2.5 for mass in figures["mass"].values()) and figures["hits"] > 0.7
