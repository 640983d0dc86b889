"""Pretrained text-to-image pipelines behind one protocol; `load_backbone` picks the family."""

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.backbones.load import FAMILIES, load_backbone
from cast_rl.backbones.memory import apply_memory_levers, free_text_encoders
from cast_rl.backbones.single_frame import single_frame_vae

__all__ = [
    "FAMILIES",
    "Backbone",
    "Cond",
    "apply_memory_levers",
    "free_text_encoders",
    "load_backbone",
    "single_frame_vae",
]
