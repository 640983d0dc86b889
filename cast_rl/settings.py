"""Checks of a script's settings before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

AT_LEAST_ONE = ("iterations", "checkpoint_every", "optim.epochs", "optim.batch_size", "rollout.steps")
AT_LEAST_TWO = ("prompts.held_out", "prompts.measured")
OR_NONE = ("prompts.train", "prompts.held_out", "optim.micro_batch", "memory.forward_batch")


def check_training(config: DictConfig) -> None:
    """:func:`check_counts` for the settings of ``examples/config/train_cast.yaml``."""
    least = dict.fromkeys(AT_LEAST_ONE + OR_NONE, 1) | dict.fromkeys(AT_LEAST_TWO, 2) | {"log.pictures": 0}
    check_counts(config, least, or_none=OR_NONE)


def check_counts(config: DictConfig, least: Mapping[str, int], *, or_none: Sequence[str] = ()) -> None:
    """Refuse whole numbers that are too small, such as ``{"optim.batch_size": 1}``, all of them in one message;
    those of ``or_none`` may also be None.

    Raises:
        ValueError: a setting is no whole number or below its least value.
    """
    wrong = []
    for key, lowest in least.items():
        value = OmegaConf.select(config, key)
        if value is None and key in or_none:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            wrong.append(f"{key}={value} must be a whole number of at least {lowest}")
    if wrong:
        raise ValueError("; ".join(wrong))
