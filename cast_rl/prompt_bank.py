"""Prompts encoded once and looked up by integer id, so that no text travels with the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cast_rl.backbones.base import Backbone, Cond


class _Table:
    """Conditionings that a deep copy shares, and that moving or casting a module leaves alone."""

    def __init__(self, rows: Cond, negative: Cond | None):
        self.rows, self.negative = rows, negative

    def __deepcopy__(self, memo: dict) -> _Table:
        return self


class PromptBank(nn.Module):
    """Conditionings of a fixed list of prompts; the id of a prompt is its place in the list.

    The table is no part of `parameters`, `buffers` or `state_dict`. All rows are padded to the longest, so a
    prompt is seen at the same length in every batch.

    Args:
        rows: tensors (N, ...) as `Backbone.encode` gives them.
        negative: the same with one row, used for every prompt, or None.
        texts: the N prompts.
    """

    def __init__(self, rows: Cond, negative: Cond | None, texts: Sequence[str]):
        super().__init__()
        for key, value in rows.items():
            if len(value) != len(texts):
                raise ValueError(f"PromptBank: {key!r} has {len(value)} rows for {len(texts)} prompts.")
        for key, value in (negative or {}).items():
            if len(value) != 1:
                raise ValueError(f"PromptBank: the negative {key!r} must have one row, got {len(value)}.")
        self._table = _Table(rows, negative)
        self.texts = tuple(texts)

    @classmethod
    def encode(
        cls,
        backbone: Backbone,
        texts: Sequence[str],
        negative: str | None = " ",
        *,
        batch_size: int = 64,
        storage_device: torch.device | str = "cpu",
    ) -> PromptBank:
        """Encode `texts` with the backbone's text encoders, `batch_size` at a time.

        Args:
            negative: negative prompt; encoded only if the backbone's guidance uses one.
            storage_device: where the table is kept. Rows move to the device of the ids that ask for them.

        Raises:
            ValueError: no prompts, or the backbone's guidance needs a negative prompt and it is None.
        """
        texts = list(texts)
        if not texts:
            raise ValueError("PromptBank.encode got no prompts.")
        if backbone.uses_negative and negative is None:
            raise ValueError(
                f"PromptBank.encode: guidance={backbone.guidance} needs a negative prompt, got None; "
                "pass negative=' ' or load the backbone with guidance=None."
            )
        parts = [backbone.encode(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        rows = {key: value.to(storage_device) for key, value in concatenate(parts).items()}
        negative_row = None
        if backbone.uses_negative:
            negative_row = {k: v.to(storage_device) for k, v in backbone.encode([negative]).items()}
        return cls(rows, negative_row, texts)

    def __len__(self) -> int:
        return len(self.texts)

    def forward(self, prompt_id: Tensor) -> tuple[Cond, Cond | None]:
        """Integer ids (B,) or (B, 1) to ``(cond, negative or None)``, B rows each, on the ids' device."""
        ids = self._checked(prompt_id)
        table, device = self._table, prompt_id.device
        cond = {key: value[ids.to(value.device)].to(device) for key, value in table.rows.items()}
        if table.negative is None:
            return cond, None
        negative = {k: v.to(device).expand(len(ids), *v.shape[1:]) for k, v in table.negative.items()}
        return cond, negative

    def _checked(self, prompt_id: Tensor) -> Tensor:
        if prompt_id.is_floating_point() or prompt_id.is_complex() or prompt_id.dtype == torch.bool:
            raise TypeError(f"PromptBank: prompt ids must be integers, got {prompt_id.dtype}.")
        if prompt_id.ndim not in (1, 2) or (prompt_id.ndim == 2 and prompt_id.shape[1] != 1):
            raise ValueError(f"PromptBank: prompt ids must be (B,) or (B, 1), got {tuple(prompt_id.shape)}.")
        ids = prompt_id.reshape(-1).long()
        outside = ids[(ids < 0) | (ids >= len(self))]
        if len(outside):
            raise IndexError(f"PromptBank: prompt id {int(outside[0])} is outside 0 to {len(self) - 1}.")
        return ids


def concatenate(parts: Sequence[Cond]) -> Cond:
    """Join conditionings along the batch, text padded on the right with zeros (False in masks)."""

    def pad(value: Tensor, length: int) -> Tensor:
        return F.pad(value, (0, 0) * (value.ndim - 2) + (0, length - value.shape[1]))

    joined = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if "mask" in parts[0] and values[0].shape[:2] == parts[0]["mask"].shape:
            length = max(value.shape[1] for value in values)
            values = [pad(value, length) for value in values]
        joined[key] = torch.cat(values)
    return joined
