"""What a structure profile depends on, and a key made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import cast_rl
from cast_rl.backbones.base import Backbone
from cast_rl.fingerprint import tokenizer_fingerprint, weights_fingerprint
from cast_rl.judges import Judge
from cast_rl.prompts import Prompt
from cast_rl.window.profile import FORMAT, digest


def identify_judge(judge: Judge) -> dict[str, Any]:
    """A judge's class and what its method ``identity()`` says, in JSON's types.

    Without that method, its attributes: the weights of modules; settings that are text, numbers, bools or None; and
    judges that have that method, of a judge that wraps them.
    """
    kind = judge if hasattr(judge, "__qualname__") else type(judge)
    known: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    if _says_what_it_is(judge):
        return judge.identity() | known
    if isinstance(judge, nn.Module):
        known["weights"] = weights_fingerprint(judge)
    for name, value in vars(judge).items() if hasattr(judge, "__dict__") else ():
        if _says_what_it_is(value):
            known[name] = identify_judge(value)
        elif isinstance(value, nn.Module):
            known[name] = weights_fingerprint(value)
        elif value is None or isinstance(value, str | int | float):
            known[name] = value
    return known


def _says_what_it_is(value: Any) -> bool:
    """Whether it has a method ``identity``; a layer of that name is none."""
    identity = getattr(value, "identity", None)
    return callable(identity) and not isinstance(identity, nn.Module)


def dependencies(backbone: Backbone, judge: Judge, prompts: Sequence[Prompt], **settings: Any) -> dict[str, Any]:
    """Everything a profile follows from, in JSON's types: weights, judge, prompts with their atoms, settings."""
    parts = sorted(backbone.pipe.components.items())
    modules = {name: weights_fingerprint(part) for name, part in parts if isinstance(part, nn.Module)}
    tokenizers = {
        name: tokenizer_fingerprint(part) for name, part in parts if name.startswith("tokenizer") and part is not None
    }
    asked = [[p.text, [[a.skill, a.question, a.answer] for a in p.atoms]] for p in prompts]
    return {
        "format": FORMAT,
        "version": cast_rl.__version__,
        "model": modules,
        "tokenizers": tokenizers,
        "scheduler": digest({k: v for k, v in backbone.pipe.scheduler.config.items() if not k.startswith("_")}),
        "guidance": [backbone.guidance, backbone.guidance_setting],
        "max_sequence_length": backbone.max_sequence_length,
        "judge": identify_judge(judge),
        "prompts": digest(asked),
        **settings,
    }
