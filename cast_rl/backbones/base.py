"""What every text-to-image model looks like to the rest of the library.

Conventions, the same for every family:

- latents ``x (B, C, h, w)`` are spatial and float32; packing them into tokens is private to a family;
- ``sigma`` in [0, 1] is the noise level: 1 is noise, 0 is data, ``x = (1 - sigma) x0 + sigma eps``;
- the velocity is ``dx/dsigma = eps - x0``;
- a conditioning is a dict of tensors, all batch first, text right-padded with a bool ``mask (B, L)``.

A family subclasses `Backbone` and fills in the methods under "Each family gives"; see `stable_diffusion_3.py`, the
plainest, and ``docs/adding_a_family.md``.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cast_rl.backbones import checks
from cast_rl.backbones.trainable import Trainable

Cond = dict[str, Tensor]


class Backbone(Trainable, ABC):
    """A diffusers pipeline as encoder, velocity field and decoder; what it trains is in `Trainable`.

    Args:
        pipe: the loaded pipeline; its modules are frozen and put into eval mode.
        device: where inputs and results live; the pipeline's modules are moved there.
        guidance: the pipeline's own guidance argument, None for none.
        max_sequence_length: text tokens kept per prompt, as the pipeline's argument of that name; its default if None.
        decode_batch: latents decoded at a time, which bounds the memory of `decode`.

    Attributes:
        transformer: the network that is trained. It may be replaced by a wrapper (DDP, a compiled module).
        vae, pipe, guidance, device, dtype: dtype is the one in which the transformer computes.
        forward_batch: without gradients, at most this many latents pass through the network at a time; None for all.
        freed_text_encoders: names of those that `memory.free_text_encoders` dropped.
        on_disk: names of the components whose weights are offloaded to disk.

    Raises:
        ValueError: the pipeline's scheduler is not a deterministic flow-matching Euler scheduler, or
            `max_sequence_length` is more than the pipeline takes.
    """

    family: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]
    # What `max_sequence_length` bounds, as messages put it.
    text_reader: ClassVar[str] = "the text encoder"
    # Most that the pipeline takes as `max_sequence_length`; None if it sets no bound.
    longest_text: ClassVar[int | None] = None
    # Whether the network also reads the padding of the text, so that its velocity depends on `max_sequence_length`.
    reads_padding: ClassVar[bool] = False

    def __init__(
        self,
        pipe: DiffusionPipeline,
        *,
        device: torch.device | str = "cpu",
        guidance: float | None = None,
        max_sequence_length: int | None = None,
        decode_batch: int = 16,
    ):
        checks.check_scheduler(pipe.scheduler)
        if max_sequence_length is None:
            max_sequence_length = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
        checks.check_at_least_one(decode_batch=decode_batch, max_sequence_length=max_sequence_length)
        checks.check_longest_text(self.family, max_sequence_length, self.longest_text)
        self.device = torch.device(device)
        self.pipe = pipe.to(self.device)
        for module in pipe.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
        self.transformer: nn.Module = pipe.transformer
        self.vae: nn.Module = pipe.vae
        self.dtype: torch.dtype = pipe.transformer.dtype
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        self.decode_batch = decode_batch
        self._frozen_copy: nn.Module | None = None
        self._in_reference = False
        self._warned_truncated: set[str] = set()
        self.forward_batch: int | None = None
        self.freed_text_encoders: tuple[str, ...] = ()
        self.on_disk: tuple[str, ...] = ()

    @property
    def cell(self) -> int:
        """Pixels per side of one latent position: as many as the VAE joins, unless a family says otherwise."""
        return self.pipe.vae_scale_factor

    # Each family gives the following.

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the spatial latent."""

    @property
    @abstractmethod
    def pixel_multiple(self) -> int:
        """Heights and widths must be multiples of this many pixels."""

    @property
    @abstractmethod
    def uses_negative(self) -> bool:
        """Whether `velocity` needs a negative conditioning at the present guidance."""

    @abstractmethod
    def _encode(self, prompts: list[str]) -> Cond:
        """Encode prompts as the pipeline does, right-padded, with a bool mask."""

    @abstractmethod
    def _text_tokens(self, prompt: str) -> int:
        """Tokens that `prompt` would take if nothing were cut off, as `max_sequence_length` counts them."""

    @abstractmethod
    def _schedule(self, steps: int, height: int, width: int) -> dict[str, Any]:
        """Arguments that the pipeline passes to `scheduler.set_timesteps`."""

    @abstractmethod
    def _predict(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Run the network on ``x`` of its dtype and ``sigma (B,)`` float32; returns its own layout."""

    @abstractmethod
    def _guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Combine the predictions of the two passes as the pipeline does."""

    @abstractmethod
    def _to_velocity(self, prediction: Tensor, shape: torch.Size) -> Tensor:
        """Prediction in the network's layout to a velocity of `shape`."""

    @abstractmethod
    def _decode(self, x: Tensor) -> Tensor:
        """Latents (B, C, h, w) to images (B, 3, H, W) in [-1, 1]."""

    @abstractmethod
    def lora_targets(self) -> list[str]:
        """Exact names of the Linear layers to adapt by default, each of which receives a gradient."""

    # A few families also change the following.

    @classmethod
    def own_components(cls, source: str, index: Mapping[str, Any]) -> dict[str, Any]:
        """Components of the pipeline at `source` that the family loads itself, by name in ``model_index.json``."""
        return {}

    def _fixed_text_tokens(self, prompt: str) -> dict[str, tuple[int, int]]:
        """Text encoders that keep a length of their own, by name: tokens of `prompt`, and how many are kept."""
        return {}

    @property
    def guidance_setting(self) -> str:
        """The guidance that decides whether there is a negative pass, as messages put it."""
        return f"guidance={self.guidance}"

    # What follows is the same for all of them.

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Embed prompts; every tensor of the result is batch first.

        Warns once for each prompt that the text encoder cuts off, and names it.
        """
        if isinstance(prompts, str):
            raise TypeError(f"encode takes a sequence of prompts, got one string; pass [{prompts!r}].")
        prompts = list(prompts)
        if not prompts:
            raise ValueError("encode got no prompts.")
        checks.check_text_encoders(self.freed_text_encoders)
        for prompt in prompts:
            self._warn_if_truncated(prompt)
        return self._encode(prompts)

    def _warn_if_truncated(self, prompt: str) -> None:
        counts = {self.text_reader: (self._text_tokens(prompt), self.max_sequence_length)}
        counts |= self._fixed_text_tokens(prompt)
        cuts = {name: f"{kept} of the {tokens} tokens" for name, (tokens, kept) in counts.items() if tokens > kept}
        if not cuts or prompt in self._warned_truncated:
            return
        self._warned_truncated.add(prompt)
        what = " and ".join(f"{name} keeps {share}" for name, share in cuts.items())
        advice = "raise max_sequence_length or shorten it" if self.text_reader in cuts else "shorten it"
        warnings.warn(f"{what} of the prompt {_shorten(prompt)!r}; {advice}.", stacklevel=3)

    def latent_grid(self, height: int, width: int) -> tuple[int, int]:
        """Latent positions (h, w) of an image of height x width pixels."""
        checks.check_size(self.family, self.pixel_multiple, height=height, width=width)
        return height // self.cell, width // self.cell

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latent of an image of height x width pixels."""
        return (self.channels, *self.latent_grid(height, width))

    def initial_latents(self, seeds: Sequence[int] | Tensor, height: int, width: int) -> Tensor:
        """Noise (B, C, h, w) float32, row i from a CPU generator seeded with ``seeds[i]`` alone.

        Equals what the pipeline draws for ``generator=[torch.Generator().manual_seed(s) for s in seeds]``.
        """
        shape = self.latent_shape(height, width)
        rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
        if not rows:
            return torch.empty(0, *shape, device=self.device)
        return torch.stack(rows).to(self.device)

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """The pipeline's schedule (steps + 1,) float32, down to 0, from a private copy of its scheduler."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        self.latent_grid(height, width)
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(device=self.device, **self._schedule(steps, height, width))
        return scheduler.sigmas

    def velocity(self, x: Tensor, sigma: Tensor | float, cond: Cond, negative: Cond | None = None) -> Tensor:
        """dx/dsigma at latents ``x (B, C, h, w)`` and ``sigma`` (scalar or (B,)): (B, C, h, w) float32.

        With `negative` the network runs twice and the pipeline's own guidance at `self.guidance` is applied.

        Raises:
            ValueError: batch sizes differ, or `negative` and `guidance` do not go together.
        """
        checks.check_rows(x, cond=cond, negative=negative)
        checks.check_negative(self.guidance_setting, self.uses_negative, negative is not None)
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1).expand(len(x))
        if self.forward_batch and len(x) > self.forward_batch and not torch.is_grad_enabled():
            rows = [slice(i, i + self.forward_batch) for i in range(0, len(x), self.forward_batch)]
            return torch.cat([self.velocity(x[r], sigma[r], _rows(cond, r), _rows(negative, r)) for r in rows])
        use_copy = self._in_reference and self._frozen_copy is not None
        network = self._frozen_copy if use_copy else self.transformer
        latents = x.to(self.dtype)
        prediction = self._predict(network, latents, sigma, cond)
        if negative is not None:
            prediction = self._guide(prediction, self._predict(network, latents, sigma, negative))
        return self._to_velocity(prediction, x.shape).float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Latents (B, C, h, w), from any device, to images (B, 3, H, W) float32 in [0, 1], `decode_batch` at a time."""
        if not len(x):
            return torch.empty(0, 3, x.shape[-2] * self.cell, x.shape[-1] * self.cell, device=self.device)
        images = [self._decode(part.to(self.device, self.vae.dtype)) for part in x.split(self.decode_batch)]
        return self.pipe.image_processor.postprocess(torch.cat(images), output_type="pt").float()


def _rows(cond: Cond | None, rows: slice) -> Cond | None:
    return None if cond is None else {key: value[rows] for key, value in cond.items()}


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
