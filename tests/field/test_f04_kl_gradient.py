"""F4: the KL to the reference carries gradient, and it points back to the reference."""

import pytest
import torch
from toy import ToyBackbone, toy_policy, toy_training_env

from cast_rl.objectives import AtomAdvantage, CASTLoss


@pytest.mark.parametrize("stored", [False, True], ids=["adapter switched off", "stored means"])
def test_f04_the_kl_pulls_the_adapter_back(stored):
    backbone = ToyBackbone()
    adapter = backbone.transformer.adapter
    backbone.transformer.requires_grad_(False)
    adapter.requires_grad_(True)
    with torch.no_grad():
        adapter.copy_(0.3 * torch.randn_like(adapter))
    policy = toy_policy(backbone)
    with torch.no_grad():
        data = AtomAdvantage().inv(toy_training_env(backbone).rollout(10, policy))
        with backbone.reference():
            data["ref_loc"] = policy.get_dist(data.copy()).loc
    data["advantage_map"].zero_()
    loss = CASTLoss(policy, kl_coeff=1.0, reference=None if stored else backbone.reference)

    out = loss(data)
    (out["loss_objective"] + out["loss_kl_to_ref"]).backward()
    assert adapter.grad.norm() > 0
    # The adapter's base is 0: descent must shorten it.
    assert (adapter.grad * adapter).sum() > 0

    before = adapter.detach().norm()
    optimizer = torch.optim.SGD([adapter], lr=2.0)
    kl = []
    for _ in range(20):
        optimizer.zero_grad()
        out = loss(data)
        kl.append(out["kl_to_ref"].item())
        out["loss_kl_to_ref"].backward()
        optimizer.step()
    assert kl[-1] < 0.9 * kl[0]
    assert adapter.norm() < before
