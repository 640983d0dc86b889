"""From a folder, a hub id or a pipeline to the backbone of its family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from cast_rl.backbones import checks, finetuning
from cast_rl.backbones import memory as levers
from cast_rl.backbones.base import Backbone
from cast_rl.backbones.flux import Flux
from cast_rl.backbones.flux2 import Flux2, Flux2Klein
from cast_rl.backbones.qwen_image import QwenImage
from cast_rl.backbones.stable_diffusion_3 import StableDiffusion3
from cast_rl.backbones.z_image import ZImage
from cast_rl.library_settings import check_quantized

# One entry per supported pipeline class. A new family is a file beside these and a name here.
FAMILIES: dict[str, type[Backbone]] = {
    name: family
    for family in (Flux2, Flux2Klein, QwenImage, StableDiffusion3, Flux, ZImage)
    for name in family.pipeline_classes
}


def load_backbone(
    source: str | Path | DiffusionPipeline,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    guidance: float | None = None,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    memory: Mapping[str, Any] | None = None,
    **family_options: Any,
) -> Backbone:
    """Load a text-to-image pipeline for training.

    Only safetensors and JSON are read; code that comes with a checkpoint is not run.

    Args:
        source: a folder in diffusers' format, a Hugging Face hub id, ``"miniature"`` for the tiny Qwen-Image that
            comes with this package, or a loaded pipeline, which is itself cast, moved and frozen.
        dtype: of all components, as ``torch.bfloat16`` or ``"bfloat16"``.
        device: where they go.
        guidance: the pipeline's own guidance argument; None for none.
        lora: arguments of `Backbone.add_lora`, such as ``{"rank": 16, "alpha": 32}``; None adds no adapters.
        gradient_checkpointing: trade one more forward pass for the memory of the activations.
        memory: settings that save memory, see `cast_rl.backbones.memory`.
        **family_options: ``max_sequence_length``, ``decode_batch`` and what the family takes besides.

    Raises:
        FileNotFoundError: `source` is neither a pipeline folder nor a hub id that can be reached.
        ValueError: the pipeline class has no backbone, `dtype` is not a floating point type, the family refuses the
            guidance, or it reads the padding of texts and `source` was trained with another ``max_sequence_length``.
        TypeError: an option that the family does not have.
    """
    if isinstance(source, str | Path) and str(source) == "miniature":
        # Here, not above: the miniature brings scipy along, which other models do without.
        from cast_rl.miniature import GENERATOR

        source = GENERATOR
    dtype = _floating_dtype(dtype)
    memory = levers.check_memory_settings(memory)
    quantization = memory.get("quantization")
    if isinstance(source, DiffusionPipeline):
        family = _family(type(source).__name__)
        if quantization is not None:
            raise ValueError("memory.quantization takes effect on loading; give load_backbone a folder or a hub id.")
        pipe, text_length = source.to(dtype), None
    else:
        index = _read_index(source)
        family = _family(index.get("_class_name"))
        _check_components(source, index)
        own = family.own_components(str(source), index)
        config = None if quantization is None else levers.quantization_config(quantization, index)
        pipe = DiffusionPipeline.from_pretrained(
            str(source), dtype=dtype, use_safetensors=True, quantization_config=config, **dict.fromkeys(own, None)
        )
        pipe.register_modules(**own)
        for name, spec in (quantization or {}).items():
            check_quantized(f"memory.quantization.{name}", spec, getattr(pipe, name))
        text_length = finetuning.pipeline_text_length(source)
    pipe.set_progress_bar_config(disable=True)
    if (offload := memory.get("group_offload")) is not None:
        levers.enable_group_offload(pipe, device, offload)
    backbone = family(pipe, device=device, guidance=guidance, **family_options)
    checks.check_text_length(backbone.family, text_length, backbone.max_sequence_length, backbone.reads_padding)
    if offload and offload.get("offload_to_disk_path"):
        backbone.on_disk = tuple(offload["components"])
    if lora is not None:
        backbone.add_lora(**lora)
    if gradient_checkpointing:
        backbone.gradient_checkpointing()
    levers.apply_memory_levers(backbone, memory)
    return backbone


def _floating_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating point type; use 'float32' or 'bfloat16'.")
    return found


def _family(pipeline_class: Any) -> type[Backbone]:
    if not isinstance(pipeline_class, str) or pipeline_class not in FAMILIES:
        raise ValueError(
            f"no backbone for the pipeline class {pipeline_class!r}; supported: {', '.join(FAMILIES)}. "
            "To add one, read cast_rl/backbones/stable_diffusion_3.py and docs/adding_a_family.md."
        )
    return FAMILIES[pipeline_class]


def _read_index(source: str | Path) -> dict[str, Any]:
    """The contents of ``model_index.json``, before any weights are fetched."""
    path = Path(source)
    if path.exists() and not (path / DiffusionPipeline.config_name).is_file():
        what = "is not a folder" if not path.is_dir() else f"holds no {DiffusionPipeline.config_name}"
        raise FileNotFoundError(
            f"load_backbone: {path.resolve()} {what}; give the folder that pipeline.save_pretrained wrote."
        )
    try:
        return dict(DiffusionPipeline.load_config(str(source)))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"load_backbone: {str(source)!r} is no folder here ({path.resolve()}) and could not be read from "
            "the hub; check the path, the id, and the network or the local cache. "
            "The model that comes with this package is 'miniature'."
        ) from error


def _check_components(source: str | Path, index: dict[str, Any]) -> None:
    """Every component is a class of diffusers or transformers, so that no code comes with the weights."""
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list | tuple) or len(value) != 2 or value[0] is None:
            continue
        if str(value[0]).split(".")[0] not in ("diffusers", "transformers"):
            raise ValueError(
                f"load_backbone: component {name!r} of {str(source)!r} is {value[1]} from {value[0]!r}; only "
                "classes of diffusers and transformers are loaded. Build the pipeline yourself and pass it."
            )
