"""Agreement of decisions, beyond what chance gives."""

import pytest
import torch

from cast_rl.window.agreement import interval, kappa, plain_agreement, resample, settled_from, tally


def pairs(both: int, only_now: int, only_final: int, neither: int) -> torch.Tensor:
    return torch.tensor([[neither, only_final], [only_now, both]], dtype=torch.float64)


def test_a_textbook_kappa():
    tables = pairs(20, 5, 10, 15)[None]
    assert plain_agreement(tables).item() == pytest.approx(0.7)
    assert kappa(tables).item() == pytest.approx(0.4)


def test_what_nearly_always_holds_agrees_by_chance_and_kappa_says_so():
    # Independent decisions, each true in 95 %.
    tables = pairs(361, 19, 19, 1)[None]
    assert plain_agreement(tables).item() == pytest.approx(0.905)
    assert kappa(tables).item() == pytest.approx(0, abs=1e-12)


def test_chance_is_taken_within_groups():
    # Two skills, one mostly true and one mostly false, both decided independently of the final image.
    often, seldom = pairs(361, 19, 19, 1), pairs(1, 19, 19, 361)
    assert kappa((often + seldom)[None]).item() > 0.8
    assert kappa(torch.stack([often, seldom])).item() == pytest.approx(0, abs=1e-12)
    assert kappa(torch.stack([pairs(20, 5, 10, 15), pairs(20, 5, 10, 15)])).item() == pytest.approx(0.4)


def test_full_agreement_is_one_also_where_all_decisions_are_alike():
    assert kappa(pairs(7, 0, 0, 0)[None]) == 1
    assert kappa(pairs(3, 0, 0, 4)[None]) == 1
    assert kappa(torch.zeros(1, 2, 2)).isnan() and plain_agreement(torch.zeros(1, 2, 2)).isnan()
    # Everything is said to be false, half of it wrongly: no better than chance.
    assert kappa(pairs(0, 0, 5, 5)[None]) == 0


def test_tables_compare_each_step_with_the_last_where_both_are_known():
    holds = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[1, -1, 1], [1, 1, -1]]], dtype=torch.int8)
    group = torch.tensor([[0, 1], [0, 1]])
    tables = tally(holds, group, 2)
    assert tables.shape == (2, 2, 3, 2, 2)
    assert torch.equal(tables[0, 0, 0], pairs(1, 0, 0, 0))
    assert torch.equal(tables[0, 0, 1], pairs(0, 0, 1, 0))
    assert torch.equal(tables[1, 0, 1], pairs(0, 1, 0, 0))
    assert torch.equal(tables[0, 1].sum((-2, -1)), torch.tensor([1.0, 0.0, 1.0]).double())
    assert tables[1, 1].sum() == 0


def test_settling_is_for_good():
    curve = torch.tensor([[0.9, 0.2, 0.7, 0.8, 1.0], [0.1, 0.2, 0.3, 0.4, 1.0], [0.9, 0.9, 0.9, 0.9, 1.0]])
    assert settled_from(curve, 0.7).tolist() == [2, 4, 0]
    assert settled_from(torch.tensor([0.9, 0.1]), 0.7) == 2
    assert settled_from(torch.tensor([0.9, torch.nan]), 0.7).isnan()


def test_the_bootstrap_resamples_prompts_and_repeats():
    tables = torch.rand(3, 20, 4, 2, 2, dtype=torch.float64)
    drawn = resample(tables, seed=1, resamples=500)
    assert drawn.shape == (3, 500, 4, 2, 2)
    assert torch.equal(drawn, resample(tables, seed=1, resamples=500))
    assert not torch.equal(drawn, resample(tables, seed=2, resamples=500))
    torch.testing.assert_close(drawn.mean(1), tables.sum(1), rtol=0.05, atol=0)
    # The spread is that of a sum over 20 independent prompts.
    torch.testing.assert_close(drawn.std(1), 20**0.5 * tables.std(1, correction=0), rtol=0.15, atol=0)


def test_the_interval_is_the_middle_and_leaves_nan_out():
    values = torch.cat([torch.linspace(0, 1, 1001), torch.tensor([torch.nan] * 50)]).double()
    assert interval(values).tolist() == pytest.approx([0.025, 0.975])
