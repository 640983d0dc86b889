import copy

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type
from toy import SHAPE, ToyBackbone, ToyBank, toy_policy

from cast_rl.policy import make_policy
from cast_rl.transitions import KINDS, ode_step, transition_mean_std

STEPS = 6


def batch(step, stop, window, prompt=None):
    n = len(step)

    def column(values):
        return torch.tensor(values).reshape(n, 1)

    return TensorDict(
        latent=torch.randn(n, *SHAPE),
        step_index=column(step),
        next_index=column(stop),
        in_window=column(window).bool(),
        prompt_id=column(prompt or [i % 5 for i in range(n)]),
        batch_size=[n],
    )


def integrate(backbone, x, prompt, step, stop):
    """The ODE of one row, step by step."""
    sigmas = backbone.sigmas(STEPS, 8, 8)
    cond, _ = ToyBank()(torch.tensor([prompt]))
    for i in range(step, stop):
        x = ode_step(x, backbone.velocity(x, sigmas[i].reshape(1), cond), sigmas[i], sigmas[i + 1])
    return x


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ode"])
def test_window_rows_sample_the_transition(kind):
    backbone = ToyBackbone()
    policy = toy_policy(backbone, transition=kind, a=0.5)
    data = batch([1, 2, 3], [2, 3, 4], [1, 1, 1])
    out = policy(data.copy())
    assert set(out.keys()) == {*data.keys(), "action", "action_log_prob"}
    sigmas = backbone.sigmas(STEPS, 8, 8)
    step = data["step_index"].flatten()
    velocity = backbone.velocity(data["latent"], sigmas[step], ToyBank()(data["prompt_id"])[0])
    mean, std = transition_mean_std(kind, data["latent"], velocity, sigmas[step], sigmas[step + 1], 0.5, sigmas[1])
    expected = Normal(mean, std.expand_as(mean)).log_prob(out["action"]).mean(1)
    torch.testing.assert_close(out["action_log_prob"], expected, rtol=1e-5, atol=1e-5)
    assert out["action_log_prob"].shape == (3, 4, 4)


def test_macro_steps_integrate_each_row_to_its_own_stop():
    backbone = ToyBackbone()
    step, stop = [0, 0, 3, 2, 6], [2, 4, 6, 2, 6]
    data = batch(step, stop, [0] * 5)
    with torch.no_grad():
        out = toy_policy(backbone)(data.copy())
        for row in range(5):
            expected = integrate(backbone, data["latent"][row : row + 1], row, step[row], stop[row])
            torch.testing.assert_close(out["action"][row : row + 1], expected, rtol=0, atol=1e-6)
    assert (out["action_log_prob"] == 0).all()
    # Rows that do not move are handed on untouched.
    assert torch.equal(out["action"][3:], data["latent"][3:])


def test_rows_are_evaluated_once_per_step_of_the_schedule():
    backbone = ToyBackbone()
    calls = backbone.transformer.evaluated_rows
    policy = toy_policy(backbone)
    with torch.no_grad():
        policy(batch([0, 0, 3, 2, 6], [2, 4, 6, 2, 6], [0] * 5))
        assert sum(calls) == 2 + 4 + 3
        assert len(calls) == 4
        calls.clear()
        policy(batch([2, 2], [2, 2], [0, 0]))
        assert calls == []
    policy.get_dist(batch([1, 3], [2, 4], [1, 1]))
    assert calls == [2]


def test_window_and_macro_rows_share_a_batch():
    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    data = batch([0, 2, 4], [2, 3, 6], [0, 1, 0])
    dist = policy.get_dist(data.copy())
    assert dist.active.flatten().tolist() == [False, True, False]
    alone = policy.get_dist(data[1:2].copy())
    torch.testing.assert_close(dist.loc[1:2], alone.loc, rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = integrate(backbone, data["latent"][2:], 2, 4, 6)
    torch.testing.assert_close(dist.deterministic_sample[2:], expected, rtol=0, atol=1e-6)
    dist.log_prob(torch.zeros(3, *SHAPE)).sum().backward()
    assert backbone.transformer.inner.weight.grad.abs().sum() > 0


def test_macro_steps_carry_no_gradient():
    out = toy_policy(ToyBackbone())(batch([0, 3], [2, 6], [0, 0]))
    assert not out["action"].requires_grad


def test_deterministic_exploration_takes_the_ode_step():
    backbone = ToyBackbone()
    policy = toy_policy(backbone, transition="flow_sde", a=0.7)
    data = batch([1, 2], [2, 3], [1, 1])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        out = policy(data.copy())
        for row in range(2):
            expected = integrate(backbone, data["latent"][row : row + 1], row, row + 1, row + 2)
            torch.testing.assert_close(out["action"][row : row + 1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"transition": "ode"}, {"transition": "cps", "a": 0.0}])
def test_without_noise_the_window_is_deterministic(options):
    policy = toy_policy(ToyBackbone(), **options)
    data = batch([1, 2], [2, 3], [1, 1])
    first, second = policy(data.copy()), policy(data.copy())
    assert torch.equal(first["action"], second["action"])
    assert (first["action_log_prob"] == 0).all()


def test_sampling_follows_the_global_generator():
    policy = toy_policy(ToyBackbone())
    data = batch([1, 2], [2, 3], [1, 1])
    torch.manual_seed(3)
    first = policy(data.copy())["action"]
    second = policy(data.copy())["action"]
    torch.manual_seed(3)
    assert torch.equal(first, policy(data.copy())["action"])
    assert not torch.equal(first, second)


def test_leading_batch_dimensions():
    policy = toy_policy(ToyBackbone())
    data = batch([1, 2, 1, 2], [2, 3, 2, 3], [1] * 4)
    flat = policy.get_dist(data.copy())
    nested = policy.get_dist(data.reshape(2, 2))
    torch.testing.assert_close(nested.loc.flatten(0, 1), flat.loc)
    y = torch.randn(4, *SHAPE)
    torch.testing.assert_close(nested.log_prob(y.reshape(2, 2, *SHAPE)).flatten(0, 1), flat.log_prob(y))


def test_permuting_a_batch_permutes_the_results():
    policy = toy_policy(ToyBackbone())
    data = batch([1, 2, 3, 1], [2, 3, 4, 2], [1] * 4)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        torch.testing.assert_close(policy.get_dist(data.copy()).loc[order], policy.get_dist(data[order]).loc)


def test_the_policy_owns_the_transformer_alone_and_keeps_float32_sigmas():
    backbone = ToyBackbone()
    policy = toy_policy(backbone)
    assert [id(p) for p in policy.parameters()] == [id(p) for p in backbone.transformer.parameters()]
    assert list(policy.buffers()) == []
    sigmas = policy[0].module._sigmas.clone()
    policy.to(torch.bfloat16)
    assert torch.equal(policy[0].module._sigmas, sigmas)


def test_a_deep_copy_trains_apart():
    policy = toy_policy(ToyBackbone())
    data = batch([1, 2], [2, 3], [1, 1])
    before = policy.get_dist(data.copy()).loc
    clone = copy.deepcopy(policy)
    assert torch.equal(clone.get_dist(data.copy()).loc, before)
    with torch.no_grad():
        for p in clone.parameters():
            p.add_(0.1)
    assert torch.equal(policy.get_dist(data.copy()).loc, before)
    assert not torch.equal(clone.get_dist(data.copy()).loc, before)


@pytest.mark.parametrize(
    ("step", "stop", "window"),
    [(2, 1, 0), (0, 7, 0), (1, 3, 1), (-1, 2, 0)],
    ids=["back", "past", "wide", "negative"],
)
def test_impossible_indices_are_named(step, stop, window):
    with pytest.raises(ValueError, match=f"step_index {step}, next_index {stop}"):
        toy_policy(ToyBackbone())(batch([0, step], [1, stop], [0, window]))


def test_the_policy_refuses_steps_that_its_own_transition_must_not_take():
    """The environment gates its windows for the transition it was told, which may be another one."""
    last = batch([1, 5], [2, 6], [1, 1])
    with pytest.raises(ValueError, match=r"row 1 has step_index 5, .* flow_sde with a=0.7 may take"):
        toy_policy(ToyBackbone(), transition="flow_sde", a=0.7)(last.copy())
    for options in ({"transition": "ode"}, {"transition": "flow_sde", "a": 0.0}):
        assert toy_policy(ToyBackbone(), **options)(last.copy())["action"].isfinite().all()
    with pytest.raises(ValueError, match="step_index 5"):
        copy.deepcopy(toy_policy(ToyBackbone()))(last.copy())


def test_unknown_transition():
    with pytest.raises(ValueError, match="'sde'"):
        make_policy(ToyBackbone(), ToyBank(), torch.tensor([1.0, 0.0]), transition="sde")


def test_guidance_s_negative_is_handed_on():
    class Guided(ToyBackbone):
        def velocity(self, x, sigma, cond, negative=None):
            return super().velocity(x, sigma, cond) - super().velocity(x, sigma, negative)

    class Bank(ToyBank):
        def forward(self, prompt_id):
            return super().forward(prompt_id)[0], super().forward(torch.zeros_like(prompt_id))[0]

    backbone = Guided()
    policy = make_policy(backbone, Bank(), backbone.sigmas(STEPS, 8, 8))
    with torch.no_grad():
        out = policy(batch([0, 0], [1, 1], [0, 0], prompt=[0, 1]))
    assert torch.equal(out["action"][0], out["latent"][0])
    assert not torch.equal(out["action"][1], out["latent"][1])
