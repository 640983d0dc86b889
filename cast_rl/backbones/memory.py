"""Levers that trade time or precision for memory, each a setting that calls the library's own function.

| setting | calls |
|---|---|
| `quantization` | `diffusers.PipelineQuantizationConfig`, when the pipeline is loaded |
| `group_offload` | ``pipe.enable_group_offload``, for the components named |
| `gradient_checkpointing` | ``transformer.enable_gradient_checkpointing`` |
| `attention_backend` | ``transformer.set_attention_backend`` |
| `context_parallel` | ``transformer.enable_parallelism(config=ContextParallelConfig(...))`` |
| `compile_repeated_blocks` | ``transformer.compile_repeated_blocks`` |
| `vae_slicing`, `vae_tiling` | ``vae.enable_slicing``, ``vae.enable_tiling`` |
| `forward_batch` | sets `Backbone.forward_batch` |
| `free_text_encoders`, `prompt_bank` | for the caller: `free_text_encoders`, `PromptBank.encode` with a folder |

`load_backbone(..., memory=settings)` applies all but the last row.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers import ContextParallelConfig, DiffusionPipeline, PipelineQuantizationConfig
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as DIFFUSERS_CONFIGS
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as TRANSFORMERS_CONFIGS

from cast_rl.library_settings import model_quantization, named, nearest, plain

if TYPE_CHECKING:
    from cast_rl.backbones.base import Backbone

SWITCHES = ("gradient_checkpointing", "vae_slicing", "free_text_encoders")
SETTINGS = (
    *("quantization", "group_offload", "attention_backend", "context_parallel", "compile_repeated_blocks"),
    *("vae_tiling", "forward_batch", "prompt_bank", *SWITCHES),
)


def check_memory_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those settings that are on, as plain data; None, False and an absent key are off.

    Raises:
        ValueError: an unknown setting, or one whose value is of the wrong kind; all are named at once.
    """
    settings, wrong = plain(settings or {}), []
    for key, value in settings.items():
        if key not in SETTINGS:
            wrong.append(f"memory.{key} is unknown{nearest(key, SETTINGS)}; there are {', '.join(sorted(SETTINGS))}")
        elif value is None or value is False:
            continue
        elif key in SWITCHES and value is not True:
            wrong.append(f"memory.{key}={value!r} must be true or false")
        elif key in ("quantization", "group_offload", "context_parallel") and not isinstance(value, dict):
            wrong.append(f"memory.{key}={value!r} must be a mapping, see docs/memory.md")
        elif key in ("vae_tiling", "compile_repeated_blocks") and value is not True and not isinstance(value, dict):
            wrong.append(f"memory.{key}={value!r} must be true, false or a mapping of its function's arguments")
        elif key in ("attention_backend", "prompt_bank") and not isinstance(value, str):
            wrong.append(f"memory.{key}={value!r} must be a string")
        elif key == "forward_batch" and (type(value) is not int or value < 1):
            wrong.append(f"memory.forward_batch={value!r} must be a whole number of at least 1")
    if wrong:
        raise ValueError("; ".join(wrong))
    return {key: value for key, value in settings.items() if value is not None and value is not False}


def quantization_config(spec: Mapping[str, Mapping[str, Any]], index: Mapping[str, Any]) -> PipelineQuantizationConfig:
    """`memory.quantization` as diffusers' ``quantization_config``, one entry per component.

    Args:
        spec: component to the arguments of its library's quantization config plus ``backend``, such as
            ``{"transformer": {"backend": "bitsandbytes_4bit", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}``.
        index: the contents of ``model_index.json``, which says what library a component comes from.

    Raises:
        ValueError: a component, backend or argument that does not exist.
        ImportError: the backend's package is not installed.
    """
    libraries = {name: entry[0] for name, entry in index.items() if isinstance(entry, list | tuple)}
    models = [n for n, library in libraries.items() if library in ("diffusers", "transformers") and _is_model(n)]
    mapping = {}
    for name, arguments in plain(spec).items():
        key = f"memory.quantization.{name}"
        if name not in models:
            raise ValueError(f"{key}: the pipeline has no such model; it has {', '.join(models)}")
        library = libraries[name]
        configs = DIFFUSERS_CONFIGS if library == "diffusers" else TRANSFORMERS_CONFIGS
        mapping[name] = model_quantization(key, arguments, configs, library)
    return PipelineQuantizationConfig(quant_mapping=mapping)


def enable_group_offload(pipe: DiffusionPipeline, device: torch.device | str, spec: Mapping[str, Any]) -> None:
    """`memory.group_offload`: keep `components` off `device`, their layers move there when they compute.

    Call it before the pipeline is moved to `device`. The transformer is refused: its weights would have left the
    device between the forward pass and the backward pass, which then reads what has taken their place.

    Args:
        spec: ``components``, a list of their names, and arguments of ``pipe.enable_group_offload``, such as
            ``offload_type="leaf_level"`` or ``use_stream=True``.

    Raises:
        ValueError: no components, one that is not there, or the transformer; or what the library refuses.
    """
    arguments = dict(spec)
    components = arguments.pop("components", None) or []
    modules = [name for name, module in pipe.components.items() if isinstance(module, nn.Module)]
    allowed = [name for name in modules if name != "transformer"]
    if "transformer" in components:
        raise ValueError(
            "memory.group_offload.components has the transformer, whose weights leave the device before the backward "
            f"pass needs them, so that gradients can be silently wrong. Offload {', '.join(allowed)}, and quantize "
            "the transformer (memory.quantization)"
        )
    if not components or not isinstance(components, list) or not set(components) <= set(allowed):
        raise ValueError(f"memory.group_offload.components={components} must name some of {', '.join(allowed)}")
    with named("memory.group_offload"):
        pipe.enable_group_offload(
            onload_device=torch.device(device),
            exclude_modules=[name for name in modules if name not in components],
            **arguments,
        )


def apply_memory_levers(backbone: Backbone, settings: Mapping[str, Any] | None) -> None:
    """Apply the settings that take effect on a loaded backbone; `load_backbone` has seen to the others.

    Raises:
        ValueError: a setting that is unknown, or that the model or its library refuses, named with its value.
    """
    settings = check_memory_settings(settings)
    transformer, vae = backbone.pipe.transformer, backbone.vae
    if settings.get("gradient_checkpointing"):
        backbone.gradient_checkpointing()
    if "vae_slicing" in settings:
        with named("memory.vae_slicing=True"):
            vae.enable_slicing()
    if tiling := settings.get("vae_tiling"):
        with named(f"memory.vae_tiling={tiling}"):
            vae.enable_tiling(**({} if tiling is True else tiling))
    if name := settings.get("attention_backend"):
        if name.endswith("_hub"):
            raise ValueError(
                f"memory.attention_backend={name!r} would download a kernel from the hub and run it; install its "
                f"package and use {name.removesuffix('_hub')!r}, or use 'native'"
            )
        with named(f"memory.attention_backend={name!r}"):
            transformer.set_attention_backend(name)
    # The library checks the attention backend against context parallelism, so that comes after it.
    if (degrees := settings.get("context_parallel")) is not None:
        if getattr(transformer, "_cp_plan", None) is None:
            raise ValueError(
                f"memory.context_parallel={degrees}: diffusers has no plan for {type(transformer).__name__}; set it "
                "to null"
            )
        with named(f"memory.context_parallel={degrees}"):
            transformer.enable_parallelism(config=ContextParallelConfig(**degrees))
    if (options := settings.get("compile_repeated_blocks")) is not None:
        with named(f"memory.compile_repeated_blocks={options}"):
            transformer.compile_repeated_blocks(**({} if options is True else options))
    backbone.forward_batch = settings.get("forward_batch")


def free_text_encoders(backbone: Backbone) -> list[str]:
    """Drop the text encoders once every prompt is encoded; returns their names. Tokenizers stay.

    `Backbone.encode` is an error from here on, and `Backbone.save` reads them once more from where they came.
    """
    pipe = backbone.pipe
    names = [n for n, m in pipe.components.items() if n.startswith("text_encoder") and isinstance(m, nn.Module)]
    pipe.register_modules(**dict.fromkeys(names))
    backbone.freed_text_encoders += tuple(names)
    gc.collect()
    if backbone.device.type != "cpu":
        torch.get_device_module(backbone.device).empty_cache()
    return names


@contextmanager
def components_back(pipe: DiffusionPipeline, names: tuple[str, ...]) -> Iterator[None]:
    """Inside, these components, freed or offloaded to disk, are whole and on the CPU, read from where `pipe` came from.

    Raises:
        RuntimeError: the pipeline was not loaded from a folder or the hub, or that has gone.
    """
    source = pipe.config.get("_name_or_path")
    others = {name: part for name, part in pipe.components.items() if name not in names}
    before = {name: getattr(pipe, name) for name in names}
    if names:
        try:
            whole = type(pipe).from_pretrained(source, dtype=pipe.transformer.dtype, use_safetensors=True, **others)
        except (OSError, ValueError, TypeError) as error:
            raise RuntimeError(
                f"{', '.join(names)} were freed or offloaded to disk and cannot be read again from {source!r}; save "
                "the transformer alone, backbone.pipe.transformer.save_pretrained(folder), and put it into a pipeline "
                "that has them"
            ) from error
        pipe.register_modules(**{name: getattr(whole, name) for name in names})
    try:
        yield
    finally:
        pipe.register_modules(**before)


def _is_model(component: str) -> bool:
    return not any(part in component for part in ("scheduler", "tokenizer", "processor", "feature_extractor"))
