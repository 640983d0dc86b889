"""Reads the attention of a few tokens while the model runs on its fast kernel.

Fused attention never forms its matrix. Here the softmax rows of the tokens that are asked for are computed beside it,
and of those only the columns of the image are kept: some rows per image where eager attention holds the whole matrix
of every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "cast_rl_tapped_sdpa"


@dataclass
class Tap:
    """What to read during one forward pass, and what was read.

    Args:
        queries: ``(B, Q)`` columns of the tokens within this pass whose rows are read.
        weights: ``(B, A, Q)`` float; row a of the result is the weighted sum over the tokens.
        columns: the keys that are kept, which are the image's.
        heads: for each layer to read the heads to average, ``(n,)`` long, or None for all.
        keep_heads: keep heads apart.
        rows: per layer ``(B, A, N)``, or ``(B, heads, A, N)`` with ``keep_heads``; float32.
    """

    queries: Tensor
    weights: Tensor
    columns: slice
    heads: Mapping[int, Tensor | None]
    keep_heads: bool = False
    rows: dict[int, Tensor] = field(default_factory=dict)

    def read(self, layer: int, query: Tensor, key: Tensor, mask: Tensor, scaling: float) -> None:
        """One layer: ``query (B, H, T, D)``, ``key (B, H_kv, S, D)``, ``mask (B, 1, T, S)`` bool."""
        B, H, _, D = query.shape
        columns = self.queries[:, None, :, None]
        few = query.gather(2, columns.expand(B, H, -1, D))  # (B, H, Q, D)
        grouped = few.reshape(B, key.shape[1], -1, D)  # the heads that share keys, behind each other
        logits = (grouped @ key.transpose(2, 3)).view(B, H, -1, key.shape[2]).float() * scaling
        if (chosen := self.heads[layer]) is not None:
            logits = logits[:, chosen]
        allowed = mask.gather(2, columns.expand(B, 1, -1, mask.shape[3]))
        share = logits.masked_fill(~allowed, -torch.inf).softmax(-1)[..., self.columns]
        rows = torch.einsum("baq,bhqn->bhan", self.weights, share)
        self.rows[layer] = rows if self.keep_heads else rows.mean(1)


def tapped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float, tap: Tap | None = None, **kwargs,
):  # fmt: skip
    """transformers' sdpa attention; with a ``tap`` among the forward pass's arguments its rows are read too."""
    if tap is not None and module.layer_idx in tap.heads:
        tap.read(module.layer_idx, query, key, attention_mask, scaling)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, tapped_sdpa)
# Without a mask function of the same name transformers drops the masks it would make, without a word.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def tapped(text_model: nn.Module) -> Iterator[None]:
    """While it lasts the text model passes ``tap=`` on to its attention. It must run on sdpa."""
    config = text_model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
