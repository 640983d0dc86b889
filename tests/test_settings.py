"""Whole numbers that are too small are refused, all at once."""

import pytest
from omegaconf import OmegaConf

from cast_rl.settings import check_counts

CONFIG = OmegaConf.create({"iterations": 3, "optim": {"batch_size": 0, "epochs": 1.5}, "save": True})


def test_counts_that_are_large_enough_pass():
    check_counts(CONFIG, {"iterations": 3})


def test_every_wrong_count_is_named_with_its_value():
    with pytest.raises(ValueError, match=r"optim.batch_size=0 .* at least 1; optim.epochs=1.5 .*; save=True"):
        check_counts(CONFIG, {"iterations": 1, "optim.batch_size": 1, "optim.epochs": 1, "save": 1})


def test_a_key_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="optim.batchsize=None"):
        check_counts(CONFIG, {"optim.batchsize": 1})
