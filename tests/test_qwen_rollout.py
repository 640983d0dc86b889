"""Environment, policy and loss on a genuine (tiny, random) Qwen-Image pipeline."""

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from cast_rl.backbones import load_backbone
from cast_rl.envs import DenoisingEnv
from cast_rl.objectives import AtomAdvantage, CASTLoss
from cast_rl.policy import make_policy
from cast_rl.prompt_bank import PromptBank
from cast_rl.sampling import ode_rollout

TEXTS = ["a red circle", "two blue squares above a green star"]
SIZE = {"steps": 4, "height": 64, "width": 64}


@pytest.fixture
def setup(qwen_pipe):
    """(backbone at guidance 2 with a LoRA, prompt bank, environment, policy)."""
    backbone = load_backbone(qwen_pipe, guidance=2.0)
    backbone.add_lora(rank=2, alpha=4)
    bank = PromptBank.encode(backbone, TEXTS)
    env = DenoisingEnv.from_backbone(backbone, len(TEXTS), **SIZE, prompts_per_batch=2, group_size=2, window=(1, 3))
    return backbone, bank, env, make_policy(backbone, bank, env.sigmas)


def test_a_deterministic_rollout_is_the_pipeline_s_ode(setup):
    backbone, bank, env, policy = setup
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(10, policy)
    cond, negative = bank(data["prompt_id"][:, 0])
    latent = ode_rollout(backbone, data["latent"][:, 0], cond, negative, **SIZE)
    torch.testing.assert_close(data["action"][:, -1], latent, rtol=0, atol=1e-5)
    torch.testing.assert_close(data["next", "pixels"][:, -1], backbone.decode(latent), rtol=0, atol=1e-5)


def test_the_first_pass_has_ratio_one_and_the_lora_gets_all_the_gradient(setup):
    backbone, _, env, policy = setup
    with torch.no_grad():
        data = env.rollout(10, policy)
    data["next", "atom_scores"] = data["next", "pixels"].mean((-3, -2, -1)).unsqueeze(-1)
    data["next", "atom_mask"] = torch.ones(4, 4, 1, dtype=torch.bool)
    batch = AtomAdvantage(maps="none").inv(data).reshape(4, 2)
    loss = CASTLoss(policy, clip_epsilon=1e-2, kl_coeff=0.1, reference=backbone.reference)
    for step in range(2):
        out = loss(batch[:, step])
        assert out["max_abs_log_ratio"] == 0
        # A fresh LoRA is the reference.
        assert out["kl_to_ref"] == 0
        (out["loss_objective"] + out["loss_kl_to_ref"]).backward()
    trained = {id(p) for p in backbone.trainable_parameters()}
    for p in policy.parameters():
        assert p.requires_grad == (id(p) in trained)
    assert any(p.grad.abs().sum() > 0 for p in backbone.trainable_parameters())
