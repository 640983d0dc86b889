"""What a training run needs in memory, counted on the meta device: nothing is loaded and nothing is computed.

Weights are counted in the model's own classes. Activations are those of the model's own code: it runs on the meta
device at the recipe's resolution with a few blocks per stack, and what each further block adds is multiplied out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from cast_rl.backbones import FAMILIES, Backbone, Cond
from cast_rl.live_bytes import peak_bytes

GB = 1e9
# Share of a device that a plan may fill; the rest is for the CUDA context, the allocator and the kernels' workspace.
USABLE = 0.9
# Bytes per weight of a Linear layer: int8 with a scale per row, which hardly counts; nf4 with a float32 per 64 weights.
LINEAR_BYTES = {"bf16": 2.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Size:
    """Weights of a model: all of them, and those in Linear layers, which quantization reaches."""

    total: int
    linear: int

    def bytes(self, precision: str) -> float:
        """Of the weights, in bf16 but for the Linear layers."""
        return 2 * (self.total - self.linear) + LINEAR_BYTES[precision] * self.linear

    def __add__(self, other: Size) -> Size:
        return Size(self.total + other.total, self.linear + other.linear)


@dataclass(frozen=True)
class Needs:
    """What one device needs for a recipe that trains on one transition per pass; bytes unless they say otherwise.

    Args:
        transformer, vae, text_encoders, judge: weights.
        adapters: number of LoRA weights.
        train: activations and gradients of a training step.
        rollout: of a forward pass without gradients, of ``forward_batch`` images.
        decode: of decoding images, one at a time if sliced.
        judging: key-value cache of one image's questions.
        block: number of weights of the largest block; a sharded model gathers a block at a time.
    """

    transformer: Size
    vae: Size
    text_encoders: Size
    judge: Size
    adapters: int
    train: int
    rollout: int
    decode: int
    judging: int
    block: int


def on_meta(entry: Mapping[str, Any]) -> nn.Module:
    """The model of an architecture ``{"class": ..., "config": {...}}`` on the meta device, in bfloat16.

    Raises:
        ValueError: a class that neither diffusers nor transformers has.
    """
    name, config = entry["class"], dict(entry.get("config", {}))
    with torch.device("meta"):
        if hasattr(diffusers, name):
            return getattr(diffusers, name).from_config(config).to(torch.bfloat16)
        if hasattr(transformers, name):
            model = getattr(transformers, name)
            return model(model.config_class(**config)).to(torch.bfloat16)
    raise ValueError(f"architecture {name!r} is a class of neither diffusers nor transformers")


def size_of(module: nn.Module) -> Size:
    """Parameters, tied ones once, and buffers, such as a table of positions.

    A language model's output layer does not count as linear, since transformers leaves it as it is by default.
    """
    head = module.get_output_embeddings() if isinstance(module, transformers.PreTrainedModel) else None
    layers = [m for m in module.modules() if isinstance(m, nn.Linear) and m is not head]
    linear = {id(m.weight): m.weight.numel() for m in layers}
    return Size(sum(t.numel() for t in (*module.parameters(), *module.buffers())), sum(linear.values()))


def meta_backbone(entry: Mapping[str, Any], guidance: float | None = None) -> Backbone:
    """The backbone of an architecture without text encoders, on the meta device, in bfloat16."""
    cls = entry["pipeline"]
    parts = {"transformer": on_meta(entry["transformer"]), "vae": on_meta(entry["vae"])}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(**entry.get("scheduler", {}))
    pipeline = getattr(diffusers, cls)
    missing = dict.fromkeys(pipeline._get_signature_keys(pipeline)[0] - parts.keys())
    return FAMILIES[cls](pipeline(**parts, **missing), device="meta", guidance=guidance)


def stacks(transformer: nn.Module) -> dict[str, nn.ModuleList]:
    """The transformer's lists of blocks by name, and nothing that is shorter than two blocks."""
    lists = {name: module for name, module in transformer.named_children() if isinstance(module, nn.ModuleList)}
    return {name: blocks for name, blocks in lists.items() if len(blocks) > 1}


def conditioning(shapes: Mapping[str, Any], rows: int, device: str) -> Cond:
    """A conditioning of `rows` prompts in bfloat16: per key a shape, or ``mask: length`` for a mask that is all True.

    A family that reads its mask's values needs ``mask_on: cpu``, since there are none on the meta device.
    """
    cond: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if key == "mask":
            cond[key] = torch.ones(rows, shape, dtype=torch.bool, device=shapes.get("mask_on", device))
        elif key != "mask_on":
            cond[key] = torch.zeros(rows, *shape, dtype=torch.bfloat16, device=device)
    return cond


def lora_size(transformer: nn.Module, targets: list[str], rank: int) -> int:
    """Weights of adapters of `rank` on `targets`."""
    layers = [transformer.get_submodule(name) for name in targets]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def train_peak(backbone: Backbone, depths: Mapping[str, int], run: Any) -> int:
    """Most bytes alive in one training step at `depths` blocks per stack.

    `run` is a training step; it is run at two blocks per stack, and then with three in one stack after another. With
    gradient checkpointing each block of a stack costs the same, so that the rest is a multiplication.
    """
    every = stacks(backbone.pipe.transformer)

    def at(**lengths: int) -> int:
        for name, blocks in every.items():
            setattr(backbone.pipe.transformer, name, blocks[: lengths.get(name, 2)])
        backbone.pipe.transformer.zero_grad(set_to_none=True)
        return peak_bytes(run)

    base = at()
    total = base
    for name in every:
        if depths[name] > 2:
            total += (depths[name] - 2) * (at(**{name: 3}) - base)
    for name, blocks in every.items():
        setattr(backbone.pipe.transformer, name, blocks)
    return total


def keep_blocks(backbone: Backbone, count: int) -> dict[str, int]:
    """Cut each stack of blocks to its first `count`; returns how many there were."""
    depths = {}
    for name, blocks in stacks(backbone.pipe.transformer).items():
        depths[name] = len(blocks)
        setattr(backbone.pipe.transformer, name, blocks[:count])
    return depths


def kv_cache(config: Any, tokens: int) -> int:
    """Bytes of a language model's key-value cache in bf16: two tensors per layer, ``(kv_heads, tokens, head_dim)``."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


def needs(recipe: Mapping[str, Any], entry: Mapping[str, Any], judge: Mapping[str, Any]) -> Needs:
    """Count what a recipe needs.

    Args:
        recipe: with ``model.{height, width, guidance, lora}`` and ``memory.{forward_batch, vae_slicing}``.
        entry: its architecture, see ``examples/config/architectures.yaml``.
        judge: that of the judge, with the ``tokens`` of one image and all its questions.
    """
    model = recipe["model"]
    backbone = meta_backbone(entry, model["guidance"])
    transformer, targets = backbone.pipe.transformer, backbone.lora_targets()
    weights, adapters = size_of(transformer), lora_size(transformer, targets, model["lora"]["rank"])
    block = max(size_of(b).total for blocks in stacks(transformer).values() for b in blocks)

    depths = keep_blocks(backbone, 3)
    here = {name for name, _ in transformer.named_modules()}
    backbone.add_lora(**model["lora"], targets=[name for name in targets if name in here])
    backbone.gradient_checkpointing()
    x = torch.zeros(1, *backbone.latent_shape(model["height"], model["width"]), device="meta")
    cond = conditioning(entry["cond"], 1, "meta")
    negative = cond if backbone.uses_negative else None

    def step() -> None:
        backbone.velocity(x, 0.5, cond, negative).square().mean().backward()

    train = train_peak(backbone, depths, step)
    levers = recipe["memory"]
    rows = levers["forward_batch"]
    many, prompts = x.expand(rows, -1, -1, -1), conditioning(entry["cond"], rows, "meta")
    decoded = x.expand(1 if levers["vae_slicing"] else backbone.decode_batch, -1, -1, -1)
    with torch.no_grad():
        rollout = peak_bytes(lambda: backbone.velocity(many, 0.5, prompts, negative and prompts))
        decode = peak_bytes(lambda: backbone.decode(decoded))
    vlm = on_meta(judge)
    encoders = [size_of(on_meta(encoder)) for encoder in entry["text_encoders"]]
    return Needs(
        transformer=weights,
        vae=size_of(backbone.vae),
        text_encoders=sum(encoders, Size(0, 0)),
        judge=size_of(vlm),
        adapters=adapters,
        train=train,
        rollout=rollout,
        decode=decode,
        judging=kv_cache(vlm.config.get_text_config(), judge["tokens"]),
        block=block,
    )
