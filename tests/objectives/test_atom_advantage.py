import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from toy import ToyBackbone, toy_policy, toy_training_env

from cast_rl.objectives import AtomAdvantage
from cast_rl.objectives.functional import group_relative_advantage


@pytest.fixture
def data():
    """Two groups of four trajectories of four steps, window steps 1 and 2."""
    backbone = ToyBackbone()
    with torch.no_grad():
        return toy_training_env(backbone).rollout(10, toy_policy(backbone))


def written(data, **options):
    transform = AtomAdvantage(**options)
    return transform.inv(data.clone()), transform


def test_the_buffer_holds_window_steps_with_advantages(data):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=SamplerWithoutReplacement(),
        batch_size=16,
        transform=AtomAdvantage(),
    )
    buffer.extend(data)
    assert len(buffer) == 16
    batch = buffer.sample()
    assert batch["in_window"].all()
    assert (batch["next_index"] == batch["step_index"] + 1).all()
    assert batch["advantage"].shape == (16, 1)
    assert batch["advantage_map"].shape == (16, 4, 4)
    assert "next" not in batch.keys()
    assert {"latent", "action", "action_log_prob", "group_id", "prompt_id"} <= set(batch.keys())


def test_advantages_by_hand(data):
    out, _ = written(data)
    out = out.reshape(8, 2)
    final = data[:, -1]["next"]
    scores, mask, evidence = final["atom_scores"], final["atom_mask"], final["evidence"]
    for row in range(8):
        group = slice(0, 4) if row < 4 else slice(4, 8)
        valid = mask[row].nonzero().flatten().tolist()
        per_atom = {k: (scores[row, k] - scores[group, k].mean()) for k in valid}
        per_atom = {k: a / (scores[group, k].std(correction=0) + 1e-4) for k, a in per_atom.items()}
        expected = sum(a * evidence[row, k] for k, a in per_atom.items()) / len(valid)
        for step in range(2):
            torch.testing.assert_close(out["advantage_map"][row, step], expected, rtol=1e-4, atol=1e-5)
            mean = sum(per_atom.values()) / len(valid)
            torch.testing.assert_close(out["advantage"][row, step, 0], mean, rtol=1e-4, atol=1e-5)
    assert torch.equal(out["latent"], data["latent"][:, 1:3])
    assert torch.equal(out["action_log_prob"], data["action_log_prob"][:, 1:3])


def test_every_step_of_a_window_gets_its_trajectory_s_advantage():
    backbone = ToyBackbone()
    with torch.no_grad():
        data = toy_training_env(backbone, window=(1, 4)).rollout(10, toy_policy(backbone))
    out, _ = written(data, advantage="scalar", maps="none")
    reward = data["next", "reward"][:, -1, 0].reshape(2, 4)
    expected = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, correction=0, keepdim=True) + 1e-4)
    expected = expected.reshape(8, 1).expand(8, 3)
    torch.testing.assert_close(out["advantage"].reshape(8, 3), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out["step_index"].reshape(8, 3), torch.arange(1, 4).expand(8, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage": "causal"},
        {"uniform": 0.5},
        {"map_cap": 1.5},
        {"maps": "others"},
        {"maps": "none"},
        {"advantage": "scalar"},
    ],
)
def test_the_map_s_spatial_mean_is_the_scalar(data, options):
    out, _ = written(data, **options)
    torch.testing.assert_close(out["advantage_map"].mean((1, 2)), out["advantage"][:, 0], rtol=0, atol=1e-5)
    even = (out["advantage_map"] == out["advantage_map"][:, :1, :1]).all()
    assert even == (options.get("maps") == "none")


def test_a_large_delta_weighs_atoms_by_how_much_they_vary(data):
    data = data.clone()
    scores = torch.tensor([[0.98, 0.1], [0.99, 0.9], [0.98, 0.1], [0.99, 0.9]]).repeat(2, 1)
    data["next", "atom_scores"][:, -1, :2] = scores
    data["next", "atom_mask"][:, -1] = False
    data["next", "atom_mask"][:, -1, :2] = True
    small, _ = written(data, maps="none")
    large, _ = written(data, maps="none", delta=1.0)
    torch.testing.assert_close(small["advantage"].abs(), torch.ones(16, 1), rtol=0, atol=0.02)
    mean = scores.mean(1) - scores.mean()
    torch.testing.assert_close(large.reshape(8, 2)["advantage"][:, 0, 0], mean, rtol=0, atol=0.15)
    opposed = scores[:, [0, 1]].clone()
    opposed[:, 0] = opposed[:, 0].flip(0)
    data["next", "atom_scores"][:, -1, :2] = opposed
    small, _ = written(data, maps="none")
    large, _ = written(data, maps="none", delta=1.0)
    assert small["advantage"].abs().max() < 0.02, "a hundredth of one atom outweighs four fifths of the other"
    assert (large.reshape(8, 2)["advantage"][:, 0, 0].sign() == (scores[:, 1] - 0.5).sign()).all()


def test_causal_advantages_compare_only_images_in_which_an_atom_could_hold(data):
    data = data.clone()
    # The second atom depends on the first, which the fourth image of each group lacks.
    final = data["next"][:, -1]
    scores = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).repeat(2, 1)
    data["next", "atom_scores"][:, -1, :2] = scores
    data["next", "atom_mask"][:, -1] = torch.arange(final["atom_mask"].shape[1]) < 2
    data["next", "atom_reachable"][:, -1] = data["next", "atom_mask"][:, -1]
    data["next", "atom_reachable"][:, -1, 1] = scores[:, 0] > 0.5
    out, transform = written(data, maps="none", advantage="causal", delta=1.0)
    per_image = out.reshape(8, 2)["advantage"][:4, 0, 0]
    first = (scores[:4, 0] - 0.75) / (scores[:4, 0].std(correction=0) + 1)
    reached = scores[:3, 1]
    second = torch.cat([(reached - 1 / 3) / (reached.std(correction=0) + 1), torch.zeros(1)])
    torch.testing.assert_close(per_image, (first + second) / 2)
    assert transform.stats["mean_score"] == pytest.approx(0.5), "what is unreachable still counts as wrong"
    plain, _ = written(data, maps="none", delta=1.0)
    assert plain.reshape(8, 2)["advantage"][3, 0, 0] < per_image[3], "without it, the fourth image pays twice"


def test_atoms_weigh_what_the_reward_says(data):
    data = data.clone()
    mask = data["next", "atom_mask"][:, -1]
    data["next", "atom_weight"][:, -1] = torch.where(mask, torch.tensor([4.0, 1.0, 1.0, 1.0]), 0.0)
    out, _ = written(data, maps="none")
    scores, groups = data["next", "atom_scores"][:, -1], data["group_id"][:, -1, 0]
    per_atom = group_relative_advantage(scores, mask, groups)
    weight = mask * torch.tensor([4.0, 1.0, 1.0, 1.0])
    expected = (per_atom * weight).sum(1) / weight.sum(1)
    torch.testing.assert_close(out.reshape(8, 2)["advantage"][:, 0, 0], expected)
    placed, _ = written(data)
    torch.testing.assert_close(placed["advantage_map"].mean((1, 2)), out["advantage"][:, 0], rtol=0, atol=1e-5)


def test_a_scalar_is_not_read_from_atoms_that_do_not_count(data):
    data = data.clone()
    data["next", "atom_scores"][:, -1] = 1.0
    data["next", "atom_mask"][:, -1] = torch.tensor([True, True, False, False])
    data["next", "atom_mask"][3, -1, 1] = False  # the judge failed at the only atom that counts
    data["next", "atom_weight"][:, -1] = torch.tensor([0.0, 4.0, 0.0, 0.0])
    out, _ = written(data, advantage="scalar")
    assert (out["advantage"] == 0).all() and (out["advantage_map"] == 0).all()


def test_others_maps_do_not_see_an_image_s_own_evidence(data):
    changed = data.clone()
    changed["next", "evidence"][2] = changed["next", "evidence"][2].flip(-1)
    before, _ = written(data, maps="others")
    after, _ = written(changed, maps="others")
    before, after = (out.reshape(8, 2)["advantage_map"][:, 0] for out in (before, after))
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=1e-5)
    assert not torch.allclose(after[:2], before[:2], atol=1e-3), "the others do see it"


def test_scalar_is_flow_grpo_s_advantage(data):
    out, _ = written(data, advantage="scalar", maps="none")
    reward = data["next", "reward"][:, -1, 0]
    for group in (slice(0, 4), slice(4, 8)):
        expected = (reward[group] - reward[group].mean()) / (reward[group].std(correction=0) + 1e-4)
        torch.testing.assert_close(out.reshape(8, 2)["advantage"][group, 0, 0], expected, rtol=1e-4, atol=1e-5)


def test_flat_and_stacked_trajectories_agree(data):
    reference, _ = written(data)
    flat, _ = written(data.reshape(-1))
    assert (reference == flat).all()
    long, _ = written(data.reshape(4, 8))
    assert (reference == long).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d[:, :-1],
        lambda d: d[:, 1:],
        lambda d: d.transpose(0, 1).clone(),
        lambda d: d[:4].transpose(0, 1).reshape(-1),
        lambda d: d[:, [0, 2, 1, 3]],
        lambda d: d.reshape(-1)[:-1],
    ],
    ids=["cut", "headless", "time first", "time first, flat", "shuffled", "one step short"],
)
def test_anything_but_whole_trajectories_is_refused(data, spoil):
    with pytest.raises(ValueError, match="whole trajectories"):
        written(spoil(data))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("mode", ["atom", "causal", "scalar"])
def test_constant_scores_teach_nothing(data, constant, mode):
    data["next", "atom_scores"].fill_(constant)
    out, transform = written(data, advantage=mode)
    assert (out["advantage"] == 0).all()
    assert (out["advantage_map"] == 0).all()
    assert transform.stats["varying"] == 0


@pytest.mark.parametrize("mode", ["atom", "causal", "scalar"])
def test_groups_of_one_and_no_atoms_teach_nothing(data, mode):
    alone = data.clone()
    alone["group_id"].copy_(torch.arange(8).reshape(8, 1, 1).expand_as(alone["group_id"]))
    assert (written(alone, advantage=mode)[0]["advantage_map"] == 0).all()
    data["next", "atom_mask"].fill_(False)
    out, transform = written(data, advantage=mode)
    assert (out["advantage_map"] == 0).all()
    assert (out["advantage"] == 0).all()
    assert transform.stats["varying"] == 0


def test_failures_leave_the_statistics(data):
    spoilt = data.clone()
    spoilt["next", "atom_scores"][1, -1, 0] = torch.nan
    out, transform = written(spoilt)
    assert out["advantage_map"].isfinite().all()
    assert transform.stats["masked"] == 1
    rest = torch.tensor([0, 2, 3])
    scores = data["next", "atom_scores"][:4, -1][rest]
    mask, groups = data["next", "atom_mask"][:4, -1][rest], torch.zeros(3, dtype=torch.long)
    expected = group_relative_advantage(scores, mask, groups)[:, 0] / mask.sum(-1)
    others = group_relative_advantage(
        data["next", "atom_scores"][:4, -1], data["next", "atom_mask"][:4, -1], groups.new_zeros(4)
    )
    others = others[rest, 1:].sum(-1) / mask.sum(-1)
    torch.testing.assert_close(out.reshape(8, 2)["advantage"][rest, 0, 0], expected + others, rtol=1e-4, atol=1e-5)


def test_statistics(data):
    _, transform = written(data)
    final = data[:, -1]["next"]
    assert transform.stats == {
        "trajectories": 8,
        "groups": 2,
        "mean_score": pytest.approx(float(final["atom_scores"][final["atom_mask"]].mean())),
        "masked": 0,
        "varying": 1.0,
    }
    data["next", "atom_scores"][:4, :, 0] = 0.5
    atoms = int(data["next", "atom_mask"][[0, 4], -1].sum())
    assert written(data)[1].stats["varying"] == pytest.approx(1 - 1 / atoms)


def test_a_prompt_twice_in_one_batch_is_two_groups(data):
    data["prompt_id"].fill_(1)
    out, _ = written(data)
    out = out.reshape(8, 2)
    assert out["advantage"][:4, 0].sum().abs() < 1e-4
    assert out["advantage"][4:, 0].sum().abs() < 1e-4


def test_keep(data):
    out, _ = written(data, keep=[("next", "reward")])
    assert set(out["next"].keys()) == {"reward"}


def test_missing_keys_are_listed(data):
    with pytest.raises(ValueError, match=r"\('next', 'evidence'\).*atom_scores"):
        written(data.exclude(("next", "evidence")))
    written(data.exclude(("next", "evidence")), maps="none")


@pytest.mark.parametrize(
    "options",
    [{"advantage": "atoms"}, {"maps": "all"}, {"uniform": 1.5}, {"map_cap": 0.5}, {"delta": 0.0}],
)
def test_options_out_of_range_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        AtomAdvantage(**options)


def test_reading_does_nothing():
    td = TensorDict(a=torch.ones(2), batch_size=[2])
    assert AtomAdvantage()(td) is td


def test_environments_of_one_rank_are_not_taken_for_one_group(data):
    backbone = ToyBackbone()
    with torch.no_grad():
        other = toy_training_env(backbone, seed=1).rollout(10, toy_policy(backbone))
        ranked = toy_training_env(backbone, rank=1, world_size=2).rollout(10, toy_policy(backbone))
    with pytest.raises(ValueError, match=r"group 1 holds images of the prompts \[\d, \d\].* rank"):
        written(torch.cat([data, other]))
    first = toy_training_env(backbone, rank=0, world_size=2).rollout(10, toy_policy(backbone))
    assert written(torch.cat([first, ranked]))[1].stats["groups"] == 4
