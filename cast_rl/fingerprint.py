"""Digests of models, tokenizers and encoded prompts, so that what was kept is never taken for something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # judges, whose weights are digested here, too, do without diffusers
    from cast_rl.backbones.base import Backbone

VALUES_READ = 65_536


def weights_fingerprint(module: nn.Module) -> str:
    """16 hex digits for a module's weights: names, shapes, types, up to 65,536 evenly spaced values of every tensor.

    Training changes a tensor nearly everywhere, so a sample tells, and a model of 20 billion weights takes seconds.
    """
    found = hashlib.sha256()
    for name, tensor in _plain_tensors(module.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().flatten()
        values = values[:: max(1, -(-len(values) // VALUES_READ))].contiguous().cpu()
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _plain_tensors(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Those among `named` that are tensors; of a wrapper, such as torchao's quantized ones, what it holds."""
    for name, value in named:
        if hasattr(value, "__tensor_flatten__"):
            parts, _ = value.__tensor_flatten__()
            yield from _plain_tensors((f"{name}.{part}", getattr(value, part)) for part in parts)
        elif isinstance(value, Tensor):
            yield name, value


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits for a tokenizer, or a processor that holds one: class, padding, vocabulary and chat template."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # FLUX.2's is in a processor of images and text
    template = getattr(tokenizer, "chat_template", None)
    parts = [type(tokenizer).__name__, inner.padding_side, sorted(inner.get_vocab().items()), template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def encoding_fingerprint(backbone: Backbone, texts: Sequence[str], negative: str | None) -> str:
    """SHA-256, in hex, over prompts, text encoders, tokenizers, text length, family, and library versions.

    Text encoders count by `weights_fingerprint`, tokenizers by `tokenizer_fingerprint`. The transformer, its adapters
    and the guidance's strength do not count.

    Raises:
        RuntimeError: the text encoders were freed or offloaded to disk, so that there are no weights to look at.
    """
    if backbone.freed_text_encoders:
        raise RuntimeError(
            f"{', '.join(backbone.freed_text_encoders)} were freed, so that encodings cannot be told apart; encode "
            "first, or open the file itself with PromptBank.open"
        )
    if elsewhere := [name for name in backbone.on_disk if name.startswith("text_encoder")]:
        raise RuntimeError(
            f"the weights of {', '.join(elsewhere)} are offloaded to disk, so that encodings cannot be told apart; "
            "leave out group_offload.offload_to_disk_path, or the folder of the prompt bank"
        )
    digest = hashlib.sha256()
    for part in _parts(backbone, texts, negative):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(backbone: Backbone, texts: Sequence[str], negative: str | None) -> Iterator[bytes]:
    versions = [version(name) for name in ("cast-rl", "diffusers", "transformers", "tokenizers")]
    settings = [type(backbone).__name__, backbone.max_sequence_length, negative, list(texts), versions]
    yield json.dumps(settings).encode()
    for name, part in sorted(backbone.pipe.components.items()):
        if name.startswith("tokenizer") and part is not None:
            yield f"{name} {tokenizer_fingerprint(part)}".encode()
        elif name.startswith("text_encoder") and isinstance(part, nn.Module):
            config = {key: value for key, value in part.config.to_dict().items() if key != "_name_or_path"}
            yield f"{name} {type(part).__name__} {json.dumps(config, sort_keys=True, default=str)}".encode()
            yield weights_fingerprint(part).encode()
