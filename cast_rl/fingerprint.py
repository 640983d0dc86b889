"""A hash of all that an encoded prompt depends on, so that a stored encoding is never taken for another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from torch import nn

from cast_rl.backbones.base import Backbone

# Elements of a weight that are looked at, evenly spaced, the first and the last among them.
SAMPLED = 64


def encoding_fingerprint(backbone: Backbone, texts: Sequence[str], negative: str | None) -> str:
    """SHA-256, in hex, over prompts, text encoders, tokenizers, text length, family, and library versions.

    Of each weight of the text encoders its name, shape, dtype and 64 of its elements count: other weights are told
    apart without reading all of them. The transformer, its adapters and the guidance's strength do not count.

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
            tokenizer = getattr(part, "tokenizer", part)  # FLUX.2's is in a processor of images and text
            yield f"{name} {type(part).__name__} {tokenizer.padding_side} {len(tokenizer)}".encode()
            yield json.dumps(sorted(tokenizer.get_vocab().items())).encode()
            yield str(getattr(part, "chat_template", None)).encode()
        elif name.startswith("text_encoder") and isinstance(part, nn.Module):
            config = {key: value for key, value in part.config.to_dict().items() if key != "_name_or_path"}
            yield f"{name} {type(part).__name__} {json.dumps(config, sort_keys=True, default=str)}".encode()
            yield from _weights(part)


def _weights(module: nn.Module) -> Iterator[bytes]:
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        flat = weight.detach().flatten()
        step = max(1, (len(flat) - 1) // (SAMPLED - 1))
        sample = flat[::step].cpu()
        yield f"{name} {tuple(weight.shape)} {weight.dtype}".encode()
        yield sample.float().numpy().tobytes()
