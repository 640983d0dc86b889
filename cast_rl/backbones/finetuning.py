"""What is trained and how it is saved: LoRA adapters or all weights, in diffusers' own formats."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.training_utils import _collate_lora_metadata, cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

# PEFT's own default, and the only name that diffusers' metadata helper looks up.
ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"
# Beside weights that `cast_rl.saving` wrote.
SETTINGS_FILE = "cast_rl.json"
# In the metadata of the one and among the settings of the other.
TEXT_LENGTH = "max_sequence_length"


def _adapter_layers(module: nn.Module) -> list[BaseTunerLayer]:
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def has_adapters(module: nn.Module) -> bool:
    """Whether PEFT layers have been injected into `module`."""
    return bool(_adapter_layers(module))


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, `module` computes as if it had no adapters; what was on and trainable is restored.

    PEFT freezes adapters when it switches them off and unfreezes all of them when it switches them on, so
    `requires_grad` is put back by hand.
    """
    layers = [(layer, layer.disable_adapters) for layer in _adapter_layers(module)]
    trainable = [(p, p.requires_grad) for p in module.parameters()] if layers else []
    for layer, _ in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, was_off in layers:
            layer.enable_adapters(not was_off)
        for parameter, required in trainable:
            parameter.requires_grad_(required)


def linears(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Exact names of the Linear layers that `targets` name, in full or by their dotted ends.

    PEFT by itself complains only when not one of the targets is found, and fails where the end of a name, such as
    FLUX.2's ``attn.to_out``, is a Linear layer in some blocks and a list of layers in others.

    Raises:
        ValueError: a target that names none.
    """
    names = [name for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)]
    endings = {name.split(".", cut)[-1] for name in names for cut in range(name.count(".") + 1)}
    for target in targets:
        if target not in endings:
            near = difflib.get_close_matches(target, sorted(endings), n=3, cutoff=0.3)
            raise ValueError(
                f"LoRA target {target!r} names no Linear layer of {type(transformer).__name__}; near ones: {near}."
            )
    return [name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)]


def add_lora(transformer: nn.Module, rank: int, alpha: float | None, targets: Sequence[str]) -> None:
    """Freeze `transformer` and add float32 LoRA adapters (arXiv 2106.09685) scaled by ``alpha / rank``."""
    if rank < 1:
        raise ValueError(f"LoRA rank must be at least 1, got {rank}.")
    if has_adapters(transformer):
        raise RuntimeError("add_lora: the transformer has adapters already; load a fresh backbone.")
    names = linears(transformer, targets)
    transformer.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=names)
    transformer.add_adapter(config, adapter_name=ADAPTER)
    _make_trainable(transformer)


def _make_trainable(transformer: nn.Module) -> None:
    """Adapters in float32 and trainable, everything else frozen, no dropout."""
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
    cast_training_params(transformer, dtype=torch.float32)
    transformer.eval()


def save_lora(pipe: DiffusionPipeline, folder: str | Path, text_length: int) -> None:
    """Save through the pipeline's own `save_lora_weights`, with the metadata that carries alpha.

    `text_length`, the tokens to which prompts were padded, is recorded beside it.
    """
    if not has_adapters(pipe.transformer):
        raise RuntimeError("save_lora: the transformer has no adapters; call add_lora first, or use save.")
    pipe.save_lora_weights(
        save_directory=str(folder),
        transformer_lora_layers=get_peft_model_state_dict(pipe.transformer, adapter_name=ADAPTER),
        **_collate_lora_metadata({"transformer": pipe.transformer}),
    )
    path = Path(folder) / LORA_FILE
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | {TEXT_LENGTH: str(text_length)}
        weights = {key: file.get_tensor(key) for key in file.keys()}
    save_file(weights, path, metadata)


def recorded_text_length(folder: str | Path) -> int | None:
    """The text length with which a LoRA was trained; None if it was saved by something else.

    Raises:
        FileNotFoundError: the folder holds no LoRA.
    """
    path = Path(folder) / LORA_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"load_lora: no {LORA_FILE} in {Path(folder).resolve()}; give the folder that save_lora wrote."
        )
    with safe_open(path, framework="pt") as file:
        length = (file.metadata() or {}).get(TEXT_LENGTH)
    return None if length is None else int(length)


def pipeline_text_length(folder: str | Path) -> int | None:
    """The text length with which a saved pipeline was trained; None if there is no record of it."""
    path = Path(folder) / SETTINGS_FILE
    return json.loads(path.read_text()).get(TEXT_LENGTH) if path.is_file() else None


def load_lora(pipe: DiffusionPipeline, folder: str | Path) -> None:
    """Load through the pipeline's own `load_lora_weights`, then make the adapters trainable in float32.

    That loader rounds the adapters to the dtype of the base, so the saved values are set once more after the
    cast; without it a bfloat16 run would not resume where it stopped.
    """
    if has_adapters(pipe.transformer):
        pipe.unload_lora_weights()
    pipe.load_lora_weights(str(folder), weight_name=LORA_FILE, adapter_name=ADAPTER)
    if not has_adapters(pipe.transformer):
        raise ValueError(
            f"load_lora: {Path(folder) / LORA_FILE} holds no adapter for {type(pipe.transformer).__name__}; "
            "it belongs to another model."
        )
    _make_trainable(pipe.transformer)
    saved = pipe.lora_state_dict(str(folder), weight_name=LORA_FILE)
    exact = {key.removeprefix("transformer."): value for key, value in saved.items() if "lora_" in key}
    set_peft_model_state_dict(pipe.transformer, exact, adapter_name=ADAPTER)


def train_weights(transformer: nn.Module, keep_reference: bool, only: Sequence[str] | None = None) -> nn.Module | None:
    """Unfreeze all weights, or those whose names contain one of `only`; returns a frozen copy of the model, or None.

    The copy shares the weights that stay frozen.
    """
    if has_adapters(transformer):
        raise RuntimeError("train_weights: the transformer has LoRA adapters; load a fresh backbone.")
    if getattr(transformer, "hf_quantizer", None) is not None:
        raise RuntimeError(
            "train_weights: quantized weights cannot be trained; add a LoRA, or load without quantization."
        )
    names = [name for name, _ in transformer.named_parameters()]
    if only is not None and not only:
        raise ValueError("train_weights: only=[] would train nothing; give parts of names, or None for all weights.")
    for part in only or ():
        if not any(part in name for name in names):
            parts = sorted({piece for name in names for piece in name.split(".")})
            near = difflib.get_close_matches(part, parts, n=3, cutoff=0.3)
            raise ValueError(f"no weight of {type(transformer).__name__} has {part!r} in its name; near ones: {near}.")
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(only is None or any(part in name for part in only))
    if not keep_reference:
        return None
    shared = {id(p): p for p in transformer.parameters() if not p.requires_grad}
    return copy.deepcopy(transformer, shared).requires_grad_(False).eval()


def save_pipeline(pipe: DiffusionPipeline, folder: str | Path) -> None:
    """Save every component as safetensors and JSON."""
    if has_adapters(pipe.transformer):
        raise RuntimeError("save: the transformer has LoRA adapters; use save_lora, which writes those.")
    pipe.save_pretrained(str(folder), safe_serialization=True)
