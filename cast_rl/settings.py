"""Checks of a script's settings before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf


def check_counts(config: DictConfig, least: Mapping[str, int]) -> None:
    """Refuse whole numbers that are too small, such as ``{"optim.batch_size": 1}``, all of them in one message.

    Raises:
        ValueError: a setting is no whole number or below its least value.
    """
    wrong = []
    for key, lowest in least.items():
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            wrong.append(f"{key}={value} must be a whole number of at least {lowest}")
    if wrong:
        raise ValueError("; ".join(wrong))
