"""From the judge's training images to what a step of its training sees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Tokenizer

from cast_rl.judges.chat import Branch, Chat
from cast_rl.miniature.judge_data import Images, found_in
from cast_rl.miniature.judge_model import MERGE, NUMBERS, PATCH
from cast_rl.miniature.judge_questions import ask
from cast_rl.miniature.processes import rank_and_world
from cast_rl.miniature.render import SIZE
from cast_rl.scene_graph import SceneGraph

BATCH = 48
SHARES = {"render": 0.4, "sample": 0.3, "rollout": 0.3}  # of a batch
QUESTIONS = 9  # per image
SHIFT = 2  # pixels by which an image is moved at most
BLURRED, NOISE = 0.3, 0.04  # share of the images that are blurred, and the largest standard deviation of pixel noise


@dataclass
class Batch:
    """B augmented images with up to M objects each.

    Args:
        pixels: ``(B, 3, S, S)`` in [0, 1].
        objects: ``(B, M, 4)`` and
        regions: ``(B, S, S)`` as in `cast_rl.miniature.judge_data.label`.
        cover: ``(B, M, N)``, the share of each image token that each object covers.
        branches: per image the caption and the questions.
        answers: per image the token ids of the answers.
    """

    pixels: Tensor
    objects: Tensor
    regions: Tensor
    cover: Tensor
    branches: list[list[Branch]]
    answers: list[list[int]]


def augment(pixels: Tensor, objects: Tensor, regions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mirror half of the images, move all a little, blur some, add noise; draws from torch's global generator.

    ``pixels (B, 3, S, S)`` uint8, ``objects (B, M, 4)``, ``regions (B, S, S)`` -> the same, pixels float in [0, 1].
    All shapes of this world are symmetric about the vertical.
    """
    B = len(pixels)
    rows = torch.arange(B)[:, None, None]
    mirror = torch.rand(B) < 0.5
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, B))
    axis = torch.arange(SIZE)
    ys = (axis - down[:, None]).clamp(0, SIZE - 1)  # (B, S): where each row of the result comes from
    xs = (axis - right[:, None]).clamp(0, SIZE - 1)
    xs = torch.where(mirror[:, None], SIZE - 1 - xs, xs)
    regions = regions[rows, ys[:, :, None], xs[:, None, :]]
    pixels = pixels.permute(0, 2, 3, 1)[rows, ys[:, :, None], xs[:, None, :]].permute(0, 3, 1, 2) / 255
    shape, color, x, y = objects.unbind(-1)
    x = torch.where(mirror[:, None], SIZE - x, x) + right[:, None]
    objects = torch.stack([shape, color, x, y + down[:, None]], -1)
    strength = (torch.rand(B) * (torch.rand(B) < BLURRED))[:, None, None, None]
    soft = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    pixels = torch.lerp(pixels, soft, strength)
    pixels = pixels + NOISE * torch.rand(B, 1, 1, 1) * torch.randn_like(pixels)
    return pixels.clamp(0, 1), objects, regions


def pool(regions: Tensor, objects: int) -> Tensor:
    """Which objects pixels show, ``(B, S, S)`` -> share of each image token that each covers, ``(B, objects, N)``."""
    each = (regions[:, None] == torch.arange(1, objects + 1)[:, None, None]).float()
    return F.avg_pool2d(each, PATCH * MERGE).flatten(2)


class Asker:
    """Rows of the training images -> a :class:`Batch`.

    Args:
        tokenizer: of the judge.
        chat: of the judge.
        images: by kind of source.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer, chat: Chat, images: dict[str, Images]) -> None:
        self.chat, self.images = chat, images
        self.token_of = {word: tokenizer.convert_tokens_to_ids(word) for word in (*NUMBERS, "Yes", "No")}

    def __call__(self, step: int, batch: int = BATCH, *, ask: bool = True) -> Batch:
        """This process's share of a step's batch, without questions unless ``ask``.

        Draws from torch's global generator, too.
        """
        rank, world = rank_and_world()
        g = torch.Generator().manual_seed(step)
        kinds = list(self.images)
        share = torch.tensor([SHARES[kind] for kind in kinds])
        of = torch.multinomial(share, batch, replacement=True, generator=g)[rank::world]
        parts, prompts = [], []
        for k, kind in enumerate(kinds):
            source = self.images[kind]
            rows = torch.randint(len(source.pixels), (int((of == k).sum()),))
            parts.append((source.pixels[rows], source.objects[rows], source.regions[rows]))
            prompts += [source.prompts[i] for i in rows.tolist()]
        pixels, objects, regions = augment(*(torch.cat(t) for t in zip(*parts, strict=True)))
        branches, answers = self.ask(prompts, objects, random.Random(step * world + rank)) if ask else ([], [])
        return Batch(pixels, objects, regions, pool(regions, objects.shape[1]), branches, answers)

    def ask(
        self, prompts: list[SceneGraph], objects: Tensor, rng: random.Random
    ) -> tuple[list[list[Branch]], list[list[int]]]:
        """The branches about each image, caption first, and the token ids of the questions' answers."""
        branches, answers = [], []
        for prompt, row in zip(prompts, objects, strict=True):
            asked, caption = ask(prompt, found_in(row), QUESTIONS, rng)
            branches.append([self.chat.caption(caption.render()[0]), *(self.chat.question(a.question) for a in asked)])
            answers.append([self.token_of[a.answer] for a in asked])
        return branches, answers
