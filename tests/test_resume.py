"""A run goes on only from the weights and the judge it began with."""

import pytest
import torch
from torchrl.checkpoint import Checkpoint

from cast_rl.backbones import load_backbone
from cast_rl.judges import load_judge
from cast_rl.resume import resume, started_from


def test_other_weights_beneath_what_is_trained_or_another_judge_are_refused(tmp_path):
    backbone, judge = load_backbone("miniature"), load_judge("oracle")

    def state():
        return {"iteration": 0, "config": {"seed": 0} | started_from(backbone, judge)}

    def go_on():
        ours = state()
        return resume(Checkpoint(state=ours), tmp_path / "checkpoint", ours)

    assert not go_on(), "there is nothing yet"
    Checkpoint(state=state()).save(tmp_path / "checkpoint")
    assert go_on()
    judge = load_judge("soft_oracle")
    with pytest.raises(ValueError, match="judged_by was"):
        go_on()
    judge = load_judge("oracle")
    with torch.no_grad():
        backbone.transformer.proj_out.bias[0] += 0.1
    with pytest.raises(ValueError, match="weights_before was"):
        go_on()
