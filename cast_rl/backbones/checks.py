"""Inputs that a backbone refuses, each with one error that says what to do."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor


def check_scheduler(scheduler: Any) -> None:
    """A rollout takes Euler steps of a flow; another sampler would not give the pipeline's own images."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"the pipeline's scheduler is {type(scheduler).__name__}; only FlowMatchEulerDiscreteScheduler "
            "is supported. Set pipe.scheduler to one and pass the pipeline to load_backbone."
        )
    for key in ("stochastic_sampling", "invert_sigmas"):
        if scheduler.config.get(key):
            raise ValueError(f"the scheduler's config has {key}=True, which is not supported; turn it off.")


def check_at_least_one(**counts: int) -> None:
    """Counts are positive."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def check_longest_text(family: str, length: int, longest: int | None) -> None:
    """Text is no longer than the pipeline itself takes; its encoding method alone would not complain."""
    if longest is not None and length > longest:
        raise ValueError(f"max_sequence_length={length} is more than {family} takes; give at most {longest}.")


def check_size(family: str, multiple: int, **pixels: int) -> None:
    """Image sizes fit the latent grid; the pipelines themselves would quietly round them down."""
    for name, value in pixels.items():
        if value <= 0 or value % multiple:
            nearest = max(1, round(value / multiple)) * multiple
            raise ValueError(
                f"{name}={value} does not fit {family}: it must be a positive multiple of {multiple} pixels, "
                f"for example {nearest}."
            )


def check_rows(latents: Tensor, **conditionings: dict[str, Tensor] | None) -> None:
    """Every conditioning has one row per latent."""
    for name, conditioning in conditionings.items():
        for key, value in (conditioning or {}).items():
            if len(value) != len(latents):
                raise ValueError(
                    f"velocity: {name}[{key!r}] has {len(value)} rows for {len(latents)} latents; repeat or "
                    "index the conditioning so that there is one row per latent."
                )


def check_negative(setting: str, needed: bool, given: bool) -> None:
    """A negative conditioning is there exactly when the guidance, put as ``name=value``, uses one."""
    name = setting.split("=")[0]
    if needed and not given:
        raise ValueError(
            f"velocity: {setting} needs a negative conditioning, which is missing; encode one with "
            f"PromptBank.encode(..., negative=' ') or load the backbone with {name}=None."
        )
    if given and not needed:
        raise ValueError(
            f"velocity: a negative conditioning was given, but {setting} does not use one; pass negative=None or "
            f"load the backbone with a higher {name}."
        )


def check_embedded_guidance(family: str, embedded: bool, guidance: float | None) -> None:
    """A network that takes the guidance as an input is given one, and one that does not is not."""
    if embedded and guidance is None:
        raise ValueError(
            f"this {family} takes its guidance as an input of the network, and guidance=None is none; give the "
            "pipeline's guidance_scale, for example guidance=3.5."
        )
    if not embedded and guidance is not None:
        raise ValueError(
            f"this {family} is distilled to sample without guidance, and guidance={guidance} would be ignored; "
            "load it with guidance=None."
        )


def check_text_encoders(freed: tuple[str, ...]) -> None:
    """The text encoders are still there."""
    if freed:
        raise RuntimeError(
            f"encode: {', '.join(freed)} were freed; encode all prompts, held-out ones too, before free_text_encoders, "
            "or load the backbone again."
        )


def check_text_length(family: str, trained: int | None, length: int, reads_padding: bool) -> None:
    """Weights meet text of the padded length with which they were trained, where the network reads the padding."""
    if reads_padding and trained not in (None, length):
        raise ValueError(
            f"these weights were trained with text padded to {trained} tokens, and the backbone pads to {length}, "
            f"which {family} reads; load the backbone with max_sequence_length={trained}."
        )
