"""Checks of a script's settings before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from cast_rl.window import FixedWindow
from cast_rl.window.profile import ORDERS

AT_LEAST_ONE = ("iterations", "checkpoint_every", "optim.epochs", "optim.batch_size", "rollout.steps")
AT_LEAST_TWO = ("prompts.held_out", "prompts.measured")
OR_NONE = ("prompts.train", "prompts.held_out", "optim.micro_batch", "memory.forward_batch")


def check_training(config: DictConfig) -> FixedWindow | None:
    """Checks the settings of ``examples/config/train_cast.yaml``; returns the window that is set by hand.

    None stands for ``window=measured``.

    Raises:
        ValueError: a count is too small (see :func:`check_counts`), the window is none or ends after the last
            denoising step of a rollout, or the order of measured windows is unknown.
    """
    least = dict.fromkeys(AT_LEAST_ONE + OR_NONE, 1) | dict.fromkeys(AT_LEAST_TWO, 2) | {"log.pictures": 0}
    check_counts(config, least, or_none=OR_NONE)
    if config.window == "measured":
        check_measured(config)
        return None
    window = FixedWindow.between(config.window)
    if window.start + window.width > config.rollout.steps:
        raise ValueError(
            f"window={config.window} ends after the last of the rollout.steps={config.rollout.steps} denoising steps; "
            "give an earlier window or more steps"
        )
    return window


def check_measured(config: DictConfig) -> None:
    """Checks what can be known of the settings of measured windows before anything is measured.

    Raises:
        ValueError: too few prompts or steps, or an unknown order.
    """
    check_counts(config, {"prompts.measured": 2, "measured.window_width": 1, "measured.every": 1, "rollout.steps": 1})
    if config.measured.order not in ORDERS:
        raise ValueError(f"unknown measured.order={config.measured.order}; choose {' or '.join(ORDERS)}")
    if config.measured.window_width > config.rollout.steps:
        raise ValueError(
            f"measured.window_width={config.measured.window_width} is more than rollout.steps={config.rollout.steps}"
        )


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
