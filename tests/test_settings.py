"""Whole numbers that are too small are refused, all at once."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cast_rl.settings import check_counts, check_training

CONFIG = OmegaConf.create({"iterations": 3, "optim": {"batch_size": 0, "epochs": 1.5}, "save": True})


def test_counts_that_are_large_enough_pass():
    check_counts(CONFIG, {"iterations": 3})


def test_every_wrong_count_is_named_with_its_value():
    with pytest.raises(ValueError, match=r"optim.batch_size=0 .* at least 1; optim.epochs=1.5 .*; save=True"):
        check_counts(CONFIG, {"iterations": 1, "optim.batch_size": 1, "optim.epochs": 1, "save": 1})


def test_a_key_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="optim.batchsize=None"):
        check_counts(CONFIG, {"optim.batchsize": 1})


def test_the_training_script_may_leave_open_what_none_stands_for():
    config = OmegaConf.load(Path(__file__).parents[1] / "examples" / "config" / "train_cast.yaml")
    check_training(config)
    config.prompts.held_out = config.prompts.train = None
    config.optim.micro_batch = 4
    check_training(config)
    config.window = [4, 7]
    with pytest.raises(ValueError, match=r"window=\[4, 7\] ends after the last of the rollout.steps=6"):
        check_training(config)
    config.window = "measured"
    assert check_training(config) is None
    config.measured.order = "slide"
    with pytest.raises(ValueError, match="unknown measured.order=slide; choose random or sliding"):
        check_training(config)
    config.measured.order, config.measured.window_width = "random", 7
    with pytest.raises(ValueError, match="measured.window_width=7 is more than rollout.steps=6"):
        check_training(config)
    config.measured.window_width = 2
    config.optim.micro_batch, config.prompts.measured = 0, None
    with pytest.raises(ValueError, match=r"optim.micro_batch=0 .*; prompts.measured=None"):
        check_training(config)
