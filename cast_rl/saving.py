"""Trained weights on disk, each under its name, with the settings they came from beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cast_rl.backbones.base import Backbone
from cast_rl.backbones.finetuning import SETTINGS_FILE, TEXT_LENGTH, has_adapters
from cast_rl.ema import WeightAverage


def save_weights(
    backbone: Backbone, folder: str | Path, *, average: WeightAverage | None = None, settings: Mapping[str, Any] = {}
) -> list[Path]:
    """Save the weights and, if one was kept, their average.

    ``folder/lora`` (or ``folder/pipeline`` without adapters) holds the weights that training goes on from,
    ``folder/lora_ema`` (``folder/pipeline_ema``) the average. Each also gets a ``cast_rl.json`` that says which of the
    two it is, how the network was run (guidance, text length) and with what settings and libraries.

    Args:
        settings: anything that JSON can hold, such as the run's whole config.

    Returns:
        The folders that were written.

    Raises:
        TypeError: settings that JSON cannot hold; nothing has been written then.
    """
    lora = has_adapters(backbone.pipe.transformer)
    record = {
        "family": backbone.family,
        "source": backbone.pipe.config.get("_name_or_path"),
        "guidance": backbone.guidance,
        TEXT_LENGTH: backbone.max_sequence_length,
        "versions": {name: version(name) for name in ("cast-rl", "diffusers", "peft", "torch", "transformers")},
        "settings": settings,
    }
    json.dumps(record)
    folders = [_save(backbone, Path(folder) / ("lora" if lora else "pipeline"), record | {"weights": "raw"})]
    if average is not None and average.decay is not None:
        what = {"weights": "average", "decay": average.decay, "steps": average.steps}
        with average.averaged():
            folders.append(_save(backbone, Path(folder) / ("lora_ema" if lora else "pipeline_ema"), record | what))
    return folders


def _save(backbone: Backbone, folder: Path, record: dict[str, Any]) -> Path:
    (backbone.save_lora if has_adapters(backbone.pipe.transformer) else backbone.save)(folder)
    (folder / SETTINGS_FILE).write_text(json.dumps(record, indent=2))
    return folder
