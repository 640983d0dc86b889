"""What a family of vision-language models looks like to the judge.

A family shows the model an image once (:meth:`Family.prefix`) and runs packed continuations of it
(:meth:`Family.branches`). `qwen_vl.py` holds what Qwen's families share, `qwen3_vl.py` and `qwen2_5_vl.py` the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cast_rl.judges.attention_tap import Tap
from cast_rl.judges.packing import Packed


@dataclass(frozen=True)
class Prefix:
    """B images of one token grid, behind them everything that is shared by what follows.

    Args:
        cache: keys and values of the prefix, per layer, as the family keeps them.
        length: P, its tokens.
        next_position: position of the first token after it, which M-RoPE makes smaller than P.
        columns: where among the P tokens the image lies.
    """

    cache: Any
    length: int
    next_position: int
    columns: slice


class Family(ABC):
    """A loaded model; it is put into eval mode and its weights are frozen.

    Raises:
        ValueError: a configuration that :meth:`check` refuses.

    Attributes:
        model_classes: classes of transformers that the family covers.
        layers, heads: of the decoder.
    """

    model_classes: ClassVar[tuple[type[PreTrainedModel], ...]]
    layers: int
    heads: int

    def __init__(self, model: PreTrainedModel) -> None:
        self.check(model.config)
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def check(cls, config: PretrainedConfig) -> None:
        """Refuses, with a ValueError, a configuration that the family cannot judge with."""
        return None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    @abstractmethod
    def text_model(self) -> nn.Module:
        """The decoder, the module whose configuration names its attention."""

    @abstractmethod
    def prefix(self, patches: Tensor, grid: tuple[int, int], ids: Sequence[int], columns: slice) -> Prefix:
        """Shows ``patches (B, N, D)`` of images of ``grid`` (rows, columns) tokens, within the token ids ``ids``."""

    @abstractmethod
    def branches(self, prefix: Prefix, packed: Packed, tap: Tap | None) -> Tensor:
        """Last hidden states ``(B, T, hidden)`` of packed continuations of a prefix."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``(n, hidden)`` to next-token logits ``(n, vocabulary)``."""
