"""The ODE sampler: its steps, its callback and what it refuses. Parity with the pipeline: tests/backbones."""

import pytest
import torch

from cast_rl.backbones import load_backbone
from cast_rl.sampling import ode_rollout


@pytest.fixture(scope="module")
def backbone(qwen_folder):
    return load_backbone(qwen_folder)


def test_the_callback_sees_every_step_and_the_tweedie_estimates_end_in_the_result(backbone):
    seen = []
    x = backbone.initial_latents([3], 64, 64)
    final = ode_rollout(
        backbone,
        x,
        backbone.encode(["a cat"]),
        steps=5,
        height=64,
        width=64,
        callback=lambda *a: seen.append(a),
    )
    steps, states, sigmas, velocities = zip(*seen, strict=True)
    assert steps == (0, 1, 2, 3, 4)
    assert torch.equal(states[0], x)
    assert torch.equal(torch.stack(sigmas), backbone.sigmas(5, 64, 64)[:-1])
    torch.testing.assert_close(states[-1] - sigmas[-1] * velocities[-1], final)


def test_a_velocity_that_is_constant_is_integrated_exactly(backbone, monkeypatch):
    x = backbone.initial_latents([3], 64, 64)
    monkeypatch.setattr(backbone, "velocity", lambda x, *a: torch.full_like(x, 2.0))
    final = ode_rollout(backbone, x, {}, steps=7, height=64, width=64)
    torch.testing.assert_close(final, x - 2.0)


def test_latents_of_another_size_are_refused(backbone):
    with pytest.raises(ValueError, match=r"latents are \(4, 8, 8\), but 64x96 pixels have \(4, 8, 12\)"):
        ode_rollout(backbone, backbone.initial_latents([0], 64, 64), {}, steps=2, height=64, width=96)
