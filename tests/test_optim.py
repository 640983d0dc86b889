import math

import pytest
import torch
from tensordict import TensorDict

from cast_rl.optim import GuardedStep, backward_in_parts


@pytest.fixture
def model():
    return torch.nn.Linear(4, 3)


def backward(model, scale=1.0):
    loss = model(torch.ones(2, 4)).pow(2).sum() * scale
    loss.backward()
    return loss


def test_it_clips_and_reports(model):
    loss = backward(model)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    report = GuardedStep(torch.optim.SGD(model.parameters(), lr=1.0), max_norm=0.5).step(loss)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    norm = gradient.norm().item()
    assert norm > 0.5
    torch.testing.assert_close(before - after, gradient * 0.5 / norm, rtol=1e-4, atol=1e-6)
    assert report.stepped
    assert report.grad_norm == pytest.approx(norm)
    assert report.grad_rms == pytest.approx((before - after).pow(2).mean().sqrt().item(), rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["loss", "gradient", "infinite loss"])
def test_a_bad_step_leaves_weights_and_optimizer_alone(model, where):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = GuardedStep(optimizer)
    guard.step(backward(model))
    weights = [p.detach().clone() for p in model.parameters()]
    moments = optimizer.state[model.weight]["exp_avg"].clone()
    loss = backward(model)
    if where == "gradient":
        model.bias.grad[0] = math.inf
    else:
        loss = torch.tensor(math.nan if where == "loss" else math.inf)
    report = guard.step(loss)
    assert not report.stepped
    assert report.skipped == guard.skipped == 1
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moments)
    assert all(p.grad is None for p in model.parameters())
    assert guard.step(backward(model)).stepped


def test_too_many_in_a_row_are_an_error(model):
    guard = GuardedStep(torch.optim.SGD(model.parameters(), lr=0.1), max_bad_steps=3)
    for bad in (True, True, False, True, True):
        loss = backward(model)
        guard.step(math.nan if bad else loss)
    backward(model)
    with pytest.raises(RuntimeError, match=r"3 steps in a row .*last loss nan.* 5 were skipped"):
        guard.step(math.nan)


def test_adam_on_eps_is_reported_once(model):
    guard = GuardedStep(torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-8))
    with pytest.warns(UserWarning, match="eps=1e-08: Adam is running on eps"):
        report = guard.step(backward(model, scale=1e-9))
    assert 0 < report.grad_rms < 1e-7
    guard.step(backward(model, scale=1e-9))


def test_ordinary_and_zero_gradients_do_not_warn(model):
    guard = GuardedStep(torch.optim.AdamW(model.parameters(), lr=0.1))
    guard.step(backward(model))
    guard.step(backward(model, scale=0.0))
    sgd = GuardedStep(torch.optim.SGD(model.parameters(), lr=0.1))
    sgd.step(backward(model, scale=1e-9))


def test_without_a_backward_it_says_so(model):
    with pytest.raises(RuntimeError, match="backward"):
        GuardedStep(torch.optim.SGD(model.parameters(), lr=0.1)).step(0.0)


@pytest.mark.parametrize("options", [{"max_norm": 0.0}, {"max_bad_steps": 0}])
def test_options_out_of_range_are_named(model, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GuardedStep(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_ranks_agree_whether_to_step(model, monkeypatch):
    # Another rank's loss was not finite: the reduction over ranks answers 0.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op: flag.fill_(0))
    guard = GuardedStep(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not guard.step(backward(model)).stepped


def test_a_batch_in_parts_gives_the_gradient_and_the_terms_of_the_whole():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    batch = TensorDict({"x": torch.randn(7, 3)}, [7])

    def loss_module(part):
        values = layer(part["x"]).square()
        terms = {"loss_a": values.mean(), "loss_b": 0.1 * layer(part["x"]).mean(), "max_value": values.max()}
        return TensorDict(terms | {"figure": part["x"].mean()})

    results = []
    for part_size in (None, 7, 3, 1):
        layer.zero_grad()
        loss, terms = backward_in_parts(loss_module, batch, part_size)
        assert not loss.requires_grad
        results.append([layer.weight.grad.clone(), loss, *terms.values()])
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="part_size must be at least 1"):
        backward_in_parts(loss_module, batch, 0)
