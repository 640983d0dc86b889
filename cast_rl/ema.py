"""An exponential moving average of the trained weights, swapped in by a context manager and back out bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.training_utils import EMAModel

from cast_rl.backbones.base import Backbone


class WeightAverage:
    """`diffusers.training_utils.EMAModel` over what the backbone trains.

    ``average <- d average + (1 - d) weights`` with ``d = min(decay, (1 + n) / (10 + n))`` after n steps, so that a
    short run forgets where it began. Kept in the weights' dtype on their device: as much memory as the trained weights
    once more. It has `state_dict` and `load_state_dict`, for a checkpoint.

    Args:
        backbone: with its adapters, or its trained weights, already there.
        decay: between 0 and 1; None for no average, so that `step` and `averaged` do nothing.

    Raises:
        ValueError: a decay outside (0, 1), or a backbone of which nothing is trained.
    """

    def __init__(self, backbone: Backbone, decay: float | None):
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"the decay of a weight average must lie between 0 and 1, got {decay}; null for none")
        self.decay = decay
        self._backbone = backbone
        self._weights = backbone.trainable_parameters()
        if decay is not None and not self._weights:
            raise ValueError("WeightAverage: nothing is trained; call add_lora or train_weights first")
        self._ema = None if decay is None else EMAModel(self._weights, decay=decay)
        self._inside = False

    @property
    def steps(self) -> int:
        """How many times `step` was called."""
        return 0 if self._ema is None else self._ema.optimization_step

    def step(self) -> None:
        """Take the present weights into the average; call it after each optimizer step.

        Raises:
            RuntimeError: inside `averaged`, or if the backbone now trains other weights.
        """
        if self._ema is None:
            return
        self._check("step")
        self._ema.step(self._weights)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the backbone has the averaged weights; afterwards, or after an error, its own, bit for bit.

        Raises:
            RuntimeError: inside itself, or, on leaving, if the weights were trained inside: that training is lost.
        """
        if self._ema is None:
            yield
            return
        self._check("averaged")
        self._ema.store(self._weights)
        self._ema.copy_to(self._weights)
        versions = [weight._version for weight in self._weights]
        self._inside = True
        try:
            yield
            if versions != [weight._version for weight in self._weights]:
                raise RuntimeError("weights were changed inside averaged(), which is lost; train outside of it")
        finally:
            self._ema.restore(self._weights)
            self._inside = False

    def _check(self, what: str) -> None:
        if self._inside:
            raise RuntimeError(f"WeightAverage.{what} inside averaged(): the backbone has the averaged weights now")
        now = self._backbone.trainable_parameters()
        if [id(weight) for weight in now] != [id(weight) for weight in self._weights]:
            raise RuntimeError(
                f"WeightAverage.{what}: the backbone trains other weights than those that are averaged; make a new one"
            )

    def state_dict(self) -> dict[str, Any]:
        """The average's tensors, its decay and its number of steps; empty without an average."""
        return {} if self._ema is None else self._ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: one has an average and the other has none, or it is of weights of other shapes.
        """
        if bool(state) != (self._ema is not None):
            kept = "an" if state else "no"
            raise ValueError(f"the saved run kept {kept} average of its weights, and this one has decay={self.decay}")
        if self._ema is None:
            return
        ours, theirs = ([tuple(w.shape) for w in ws] for ws in (self._weights, state["shadow_params"]))
        if ours != theirs:
            raise ValueError(f"the saved average is of {len(theirs)} weights of other shapes than the {len(ours)} here")
        self._ema.load_state_dict(state)
        for index, weight in enumerate(self._weights):
            self._ema.shadow_params[index] = self._ema.shadow_params[index].to(weight.device)
