"""How many bytes of tensors are alive at most while something runs, on any device, the meta device included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create inside, until they are freed.

    What existed before, weights for example, does not count; nor do an operation's scratch space and what the
    allocator rounds up or keeps.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # A view of a weight, or an in-place operation on one, makes nothing new.
                if storage._cdata not in self._alive and storage._cdata not in inputs:
                    self._alive[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, storage._cdata)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention on the meta device is a fused kernel's, without the matrix of all pairs of tokens."""
    original = F.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if query.device.type != "meta":
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]

    # A torch function mode would be off where it matters: in blocks that run again during the backward pass.
    with patch.object(F, "scaled_dot_product_attention", attention):
        yield


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes alive at once among those that `run` creates."""
    with fused_attention(), LiveBytes() as live:
        run()
    return live.peak
