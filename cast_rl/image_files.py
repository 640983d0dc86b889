"""Images of prompts as files: made so that a killed run goes on, listed in a map from prompt to path, and judged."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from cast_rl.backbones.base import Backbone
from cast_rl.judges import Judge, ask
from cast_rl.prompt_bank import PromptBank
from cast_rl.prompts import Prompt
from cast_rl.sampling import ode_rollout


@torch.no_grad()
def generate_images(
    backbone: Backbone,
    texts: Sequence[str],
    folder: str | PathLike,
    *,
    height: int,
    width: int,
    steps: int,
    seed: int = 0,
    negative: str | None = " ",
    batch_size: int = 8,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    """One image per text along the ODE, as PNG; text i starts from the noise of seed ``seed + i``.

    Images that are there already are kept, so that a run that was killed goes on.

    Args:
        backbone: its weights as they are now.
        texts: the prompts, different from each other.
        folder: where images go, with ``settings.json``, which says what they were made with.
        height, width: pixels.
        steps: denoising steps.
        seed: of the noise.
        negative: the negative prompt, for a backbone whose guidance takes one.
        batch_size: images at a time.
        settings: what else the images depend on, such as the model's name.

    Returns:
        The path of each text's image.

    Raises:
        ValueError: the folder has images made with other settings; names them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made_with = {"height": height, "width": width, "steps": steps, "seed": seed, "negative": negative}
    _check_settings(folder / "settings.json", made_with | {"texts": list(texts)} | dict(settings or {}))
    paths = [folder / f"{i:05d}.png" for i in range(len(texts))]
    todo = [i for i, path in enumerate(paths) if not path.exists()]
    with tqdm(total=len(texts), initial=len(texts) - len(todo), desc="generate", unit="image") as progress:
        for at in range(0, len(todo), batch_size):
            rows = todo[at : at + batch_size]
            bank = PromptBank.encode(backbone, [texts[i] for i in rows], negative)
            x = backbone.initial_latents([seed + i for i in rows], height, width)
            cond = bank(torch.arange(len(rows), device=backbone.device))
            pixels = backbone.decode(ode_rollout(backbone, x, *cond, steps=steps, height=height, width=width))
            for i, image in zip(rows, pixels, strict=True):
                _save(image, paths[i])
            progress.update(len(rows))
    return dict(zip(texts, paths, strict=True))


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Leave ``settings`` beside the images, or compare them with those that are there."""
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in sorted(there.keys() | settings.keys()) if there.get(name) != settings.get(name)]
    if changed:
        was = "; ".join(
            f"{name} was {there.get(name)!r} and is {settings.get(name)!r}" if name != "texts" else "other prompts"
            for name in changed
        )
        raise ValueError(f"{path.parent} has images made with other settings: {was}. Give another folder, or empty it")


def _save(image: Tensor, path: Path) -> None:
    """Write ``image (3, H, W)`` in [0, 1] whole or not at all."""
    array = (image.clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(1, 2, 0).numpy()
    unfinished = path.with_suffix(".part")
    Image.fromarray(array).save(unfinished, format="png")
    os.replace(unfinished, path)


def read_image_map(path: str | PathLike, texts: Sequence[str]) -> dict[str, Path]:
    """The image of each text by a JSON file ``{prompt: path}``, as GenEval 2 has it; paths are relative to the file.

    Raises:
        ValueError: it is no such file, or lacks prompts, or names files that are not there.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise ValueError(f"{path} must be an object of prompts and the paths of their images")
    lacking = [text for text in texts if text not in value]
    if lacking:
        raise ValueError(f"{path} has no image of {len(lacking)} of {len(texts)} prompts, such as {lacking[0]!r}")
    paths = {text: path.parent / value[text] for text in texts}
    gone = [str(image) for image in paths.values() if not image.is_file()]
    if gone:
        raise ValueError(f"{path} names {len(gone)} images that are not there, such as {gone[0]}")
    return paths


def read_image(path: str | PathLike) -> Tensor:
    """An image file as ``(3, H, W)`` float32 in [0, 1]; transparent parts are white.

    Raises:
        ValueError: it is no image, or a damaged one.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGBA")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} is no image that can be read: {error}") from error
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def judge_images(
    judge: Judge, prompts: Sequence[Prompt], paths: Mapping[str, Path], batch_size: int = 8
) -> tuple[Tensor, Tensor]:
    """Scores and mask ``(N, K)`` of the N prompts' images, whatever their sizes.

    Args:
        judge: scores the images.
        prompts: N prompts with at most K atoms each.
        paths: the image of each prompt's text.
        batch_size: images at a time.
    """
    K = max(len(prompt.atoms) for prompt in prompts)
    scores, mask = torch.zeros(len(prompts), K), torch.zeros(len(prompts), K, dtype=torch.bool)
    with tqdm(total=len(prompts), desc="judge", unit="image") as progress:
        for at in range(0, len(prompts), batch_size):
            rows = range(at, min(at + batch_size, len(prompts)))
            images = {i: read_image(paths[prompts[i].text]) for i in rows}
            of_size: dict[torch.Size, list[int]] = defaultdict(list)
            for i, image in images.items():
                of_size[image.shape].append(i)
            for same in of_size.values():
                judged = ask(judge, torch.stack([images[i] for i in same]), [prompts[i].atoms for i in same], K)
                scores[same], mask[same] = judged.scores, judged.mask
            progress.update(len(rows))
    return scores, mask
