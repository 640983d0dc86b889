"""What of a backbone is trained, how that is saved, and the model before it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import DiffusionPipeline
from torch import nn

from cast_rl.backbones import checks, finetuning, memory


class Trainable:
    """The half of `Backbone` that has to do with training: LoRA adapters, or all or some of the weights."""

    family: ClassVar[str]
    reads_padding: ClassVar[bool]
    pipe: DiffusionPipeline
    transformer: nn.Module
    dtype: torch.dtype
    max_sequence_length: int
    freed_text_encoders: tuple[str, ...]
    on_disk: tuple[str, ...]
    _frozen_copy: nn.Module | None
    _in_reference: bool

    @contextmanager
    def reference(self) -> Iterator[Self]:
        """Inside, `velocity` is that of the model before training.

        With LoRA the adapters are off; after ``train_weights(keep_reference=True)`` the frozen copy answers.

        Raises:
            RuntimeError: full fine-tuning without a copy.
        """
        has_adapters = finetuning.has_adapters(self.transformer)
        if self._frozen_copy is None and not has_adapters and self.trainable_parameters():
            raise RuntimeError(
                "no reference model: its weights are trained and no copy was kept; "
                "call train_weights(keep_reference=True), or leave the KL term out."
            )
        before, self._in_reference = self._in_reference, True
        try:
            with finetuning.adapters_off(self.transformer):
                yield self
        finally:
            self._in_reference = before

    def add_lora(self, rank: int, alpha: float | None = None, targets: Sequence[str] | None = None) -> None:
        """Add trainable float32 adapters; `alpha` is `rank` unless given, `targets` are `lora_targets()`.

        Raises:
            ValueError: rank below 1, or a target that is no Linear layer of the transformer.
            RuntimeError: there are adapters already.
        """
        finetuning.add_lora(self.pipe.transformer, rank, alpha, list(targets or self.lora_targets()))

    def save_lora(self, folder: str | Path) -> None:
        """Write ``pytorch_lora_weights.safetensors``, alpha included, for `pipeline.load_lora_weights`."""
        finetuning.save_lora(self.pipe, folder, self.max_sequence_length)

    def load_lora(self, folder: str | Path) -> None:
        """Load a saved LoRA as trainable float32 adapters, in place of those there are.

        Raises:
            FileNotFoundError: the folder holds no LoRA.
            ValueError: it belongs to another model, or was trained with text padded to another length, which the
                network reads.
        """
        checks.check_text_length(
            self.family, finetuning.recorded_text_length(folder), self.max_sequence_length, self.reads_padding
        )
        finetuning.load_lora(self.pipe, folder)

    def train_weights(self, keep_reference: bool, only: Sequence[str] | None = None) -> None:
        """Make the transformer's weights trainable; `keep_reference` keeps a frozen copy beside it.

        With `only`, those whose names contain one of these, such as ``["attn.", "txt_mlp"]``; the others stay frozen.
        Load the model in float32 for this: in bfloat16 most small updates round to nothing, which is warned of.
        """
        if self.dtype != torch.float32:
            warnings.warn(
                f"weights are trained in {self.dtype}, where most small updates round to nothing; load the "
                "backbone with dtype='float32', or train a LoRA, whose weights are float32 on any base",
                stacklevel=2,
            )
        self._frozen_copy = finetuning.train_weights(self.pipe.transformer, keep_reference, only)

    def make_trainable(
        self, *, lora: Mapping[str, Any] | None = None, only: Sequence[str] | None = None, keep_reference: bool = False
    ) -> None:
        """`add_lora` with the arguments `lora`, or `train_weights(keep_reference, only)` for None, as settings have it.

        With LoRA, whose targets are named in `lora`, `only` is not heeded, and the reference model is there in any
        case: it is the base without adapters.
        """
        if lora is not None:
            self.add_lora(**lora)
        else:
            self.train_weights(keep_reference, only)

    def save(self, folder: str | Path) -> None:
        """Write the whole pipeline in diffusers' format, for `DiffusionPipeline.from_pretrained(folder)`."""
        with memory.components_back(self.pipe, tuple(dict.fromkeys(self.freed_text_encoders + self.on_disk))):
            finetuning.save_pipeline(self.pipe, folder)

    def gradient_checkpointing(self, enabled: bool = True) -> None:
        """Recompute activations in the backward pass: less memory for one more forward pass."""
        if enabled:
            self.pipe.transformer.enable_gradient_checkpointing()
        else:
            self.pipe.transformer.disable_gradient_checkpointing()

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights that an optimizer should hold."""
        return [p for p in self.transformer.parameters() if p.requires_grad]
