"""How many bytes of tensors are alive at most while something runs, on any device, the meta device included."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
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


class FusedAttention(TorchFunctionMode):
    """Attention on the meta device as a fused kernel does it, without the matrix of all pairs of tokens."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        query, key, value = named["query"], named["key"], named["value"]
        if query.device.type != "meta":
            return func(*args, **kwargs)
        options = {"attn_mask": named.get("attn_mask"), "scale": named.get("scale")}
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, **options)[0]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes alive at once among those that `run` creates."""
    with FusedAttention(), LiveBytes() as live:
        run()
    return live.peak
