"""What a structure profile depends on, and a key made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import cast_rl
from cast_rl.backbones.base import Backbone
from cast_rl.judges import Judge
from cast_rl.prompts import Prompt
from cast_rl.window.profile import FORMAT, digest

VALUES_READ = 65_536


def fingerprint(module: nn.Module) -> str:
    """A digest of a module's weights: names, shapes, types, and up to 65,536 evenly spaced values of every tensor.

    Training changes a tensor nearly everywhere, so a sample tells, and a model of 20 billion weights takes seconds.
    """
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().flatten()
        values = values[:: max(1, -(-len(values) // VALUES_READ))].contiguous().cpu()
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def identify_judge(judge: Judge) -> dict[str, Any]:
    """A judge's class, and its attributes: the weights of modules; settings that are text, numbers, bools or None."""
    kind = judge if hasattr(judge, "__qualname__") else type(judge)
    known: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    if isinstance(judge, nn.Module):
        known["weights"] = fingerprint(judge)
    for name, value in vars(judge).items() if hasattr(judge, "__dict__") else ():
        if isinstance(value, nn.Module):
            known[name] = fingerprint(value)
        elif value is None or isinstance(value, str | int | float):
            known[name] = value
    return known


def dependencies(backbone: Backbone, judge: Judge, prompts: Sequence[Prompt], **settings: Any) -> dict[str, Any]:
    """Everything a profile follows from, in JSON's types: weights, judge, prompts with their atoms, settings."""
    modules = {name: m for name, m in backbone.pipe.components.items() if isinstance(m, nn.Module)}
    asked = [[p.text, [[a.skill, a.question, a.answer] for a in p.atoms]] for p in prompts]
    return {
        "format": FORMAT,
        "version": cast_rl.__version__,
        "model": {name: fingerprint(module) for name, module in sorted(modules.items())},
        "scheduler": digest({k: v for k, v in backbone.pipe.scheduler.config.items() if not k.startswith("_")}),
        "guidance": backbone.guidance,
        "max_sequence_length": backbone.max_sequence_length,
        "judge": identify_judge(judge),
        "prompts": digest(asked),
        **settings,
    }
