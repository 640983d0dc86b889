"""Training the miniature's judge: answers to many questions per image, and where to look while they are read.

Questions and caption of an image go through the code that judges, so that the judge is used as it was trained. Where
words should look, and what each image token shows, is taught with what the oracle finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

from cast_rl.judges.attention_tap import Tap
from cast_rl.judges.chat import Chat
from cast_rl.judges.evidence import FILE_NAME, EvidenceSettings
from cast_rl.judges.families.qwen3_vl import Qwen3VL
from cast_rl.judges.images import ImageSettings, patches
from cast_rl.judges.packing import Packed, pack
from cast_rl.miniature.fit import Recipe, fit
from cast_rl.miniature.judge_batches import BATCH, Asker, Batch
from cast_rl.miniature.judge_data import SOURCES, Source, judge_images
from cast_rl.miniature.judge_model import (
    DIM,
    GRID,
    LOOKING,
    MERGE,
    NUMBERS,
    PATCH,
    VISION_DIM,
    build_judge,
    build_judge_tokenizer,
    save_judge,
)
from cast_rl.miniature.processes import rank_and_world
from cast_rl.miniature.render import SIZE
from cast_rl.miniature.vocabulary import COLORS, SHAPES
from cast_rl.scene_graph import plural

WEIGHTS = {"answers": 2.0, "looking": 1.0, "pixels": 2.0, "cells": 1.0}
SHARPNESS = 4 * DIM**-0.5  # of the comparison of an image token with words
PLACE_WEIGHT = 16.0  # of the squared error of centres, in image sides
LEAST_SHARE = 0.12  # of an image token that an object must cover for the token to show it


class Words(nn.Module):
    """What each token of the vocabulary says: ``shape``, ``color`` and ``number (V,)`` long, -1 for none.

    And the other way round: ``shapes (2, 4)``, singular and plural, and ``colors (6,)``, the tokens of the words.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        super().__init__()
        V = len(tokenizer)
        meanings = (
            ("shape", {form: i for i, noun in enumerate(SHAPES) for form in (noun, plural(noun))}),
            ("color", {word: i for i, word in enumerate(COLORS)}),
            ("number", dict.fromkeys((*NUMBERS, "a", "an", "the"), 0)),
        )
        for name, meaning in meanings:
            table = torch.full((V,), -1)
            for word, value in meaning.items():
                for form in (word, f" {word}"):
                    ids = tokenizer.encode(form, add_special_tokens=False)
                    if len(ids) == 1:
                        table[ids[0]] = value
            self.register_buffer(name, table, persistent=False)
        spell = tokenizer.convert_tokens_to_ids
        nouns = [[spell(f"Ġ{noun}") for noun in form] for form in (SHAPES, map(plural, SHAPES))]
        self.register_buffer("shapes", torch.tensor(nouns), persistent=False)
        self.register_buffer("colors", torch.tensor([spell(f"Ġ{word}") for word in COLORS]), persistent=False)

    def targets(self, batch: Batch, packed: Packed) -> tuple[Tensor, Tensor]:
        """Which tokens should look where.

        A noun looks at what it names, in the colour it is given, a colour at what has it, a number in a caption at
        all objects; each object gets attention as it covers an image token. What is not there is not looked for in
        the image at all, but in a caption, which states what should be there, another colour of the shape will do.

        Returns:
            where: ``(n, 2)`` row and column of each token; share: ``(n, 1 + N)`` of attention, first that beside the
            image, then that of each image token.
        """
        shape, color = self.shape[packed.ids], self.color[packed.ids]
        before = self.color[packed.ids.roll(1, 1)]
        color = torch.where(shape >= 0, before, color)
        caption = packed.branch == 0
        number = (self.number[packed.ids] >= 0) & caption
        where = (((shape >= 0) | (color >= 0) | number) & (packed.branch >= 0)).nonzero()
        b, t = where.unbind(1)
        there = batch.objects[b, :, 0] >= 0  # (n, M)
        s, c = shape[b, t, None], color[b, t, None]
        of_shape = there & ((s < 0) | (batch.objects[b, :, 0] == s))
        match = of_shape & ((c < 0) | (batch.objects[b, :, 1] == c))
        other = caption[b, t, None] & (s >= 0) & ~match.any(1, keepdim=True)
        match = torch.where(other, of_shape, match)
        image = torch.einsum("nm,nmc->nc", match.float(), batch.cover[b])
        total = image.sum(1, keepdim=True)
        share = torch.cat([(total == 0).float(), image / total.clamp(min=1e-6)], 1)
        keep = (total[:, 0] > 0) | ~caption[b, t]
        return where[keep], share[keep]


class Learner(nn.Module):
    """The judge, and heads that say what each image token shows, which only training needs."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        super().__init__()
        self.model = build_judge(tokenizer)
        self.family = Qwen3VL(self.model)
        self.model.requires_grad_(True)
        self.words = Words(tokenizer)
        self.outline = nn.Linear(VISION_DIM, PATCH**2)  # which of a patch's pixels show an object
        self.absent = nn.Parameter(0.7 * torch.randn(3, DIM))  # no object, no known shape, no colour
        self.centre = nn.Linear(DIM, 3)  # whether a centre is here, and where that of the object shown lies
        self.settings = ImageSettings(PATCH, MERGE, 2, (0.5,) * 3, (0.5,) * 3, SIZE**2, SIZE**2)

    @contextmanager
    def _watched(self) -> Iterator[dict[str, Tensor]]:
        """Collects, as the vision tower runs, what its first block and its merger put out."""
        tower, seen = self.model.model.visual, {}
        hooks = [
            part.register_forward_hook(lambda module, given, out, name=name: seen.update({name: out}))
            for name, part in (("early", tower.blocks[0]), ("merged", tower.merger))
        ]
        yield seen
        for hook in hooks:
            hook.remove()

    def see(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss that need the vision tower alone."""
        grid = torch.tensor([[1, GRID * MERGE, GRID * MERGE]]).expand(len(batch.pixels), -1)
        with self._watched() as seen:
            self.model.model.visual(patches(batch.pixels, self.settings).flatten(0, 1), grid_thw=grid)
        return self._seeing(seen, batch)

    def loss(self, batch: Batch, chat: Chat) -> dict[str, Tensor]:
        """The weighted terms of the loss of one batch, those of :data:`WEIGHTS`."""
        ids, columns = chat.prefix(GRID**2)
        with self._watched() as seen:
            prefix = self.family.prefix(patches(batch.pixels, self.settings), (GRID, GRID), ids, columns)
        packed = pack([[branch.ids for branch in row] for row in batch.branches])
        where, share = self.words.targets(batch, packed)
        queries, slot = _slots(where, len(batch.branches))
        eye = torch.eye(queries.shape[1]).expand(len(queries), -1, -1)
        heads = {layer: torch.tensor([h for at, h in LOOKING if at == layer]) for layer, _ in LOOKING}
        tap = Tap(queries, eye, slice(0, prefix.length), heads, keep_heads=True)
        hidden = self.family.branches(prefix, packed, tap)
        looked = torch.cat([tap.rows[layer] for layer in heads], 1)  # (B, H, Q, P)
        looked = looked[where[:, 0], :, slot]  # (n, H, P)
        image = looked[..., columns]
        beside = looked.sum(-1, keepdim=True) - image.sum(-1, keepdim=True)
        chance = torch.cat([beside, image], -1).clamp(min=1e-5)
        asked = [(b, last) for b, lasts in enumerate(packed.lasts) for last in lasts[1:]]
        rows, at = torch.tensor(asked).T
        answers = torch.tensor([a for row in batch.answers for a in row])
        terms = {
            "answers": F.cross_entropy(self.family.logits(hidden[rows, at]), answers),
            # The Kullback-Leibler divergence of where heads look from where they should.
            "looking": F.kl_div(chance.log(), share[:, None].expand_as(chance), reduction="none").sum(-1).mean(),
        }
        return {name: WEIGHTS[name] * value for name, value in terms.items()} | self._seeing(seen, batch)

    def _seeing(self, seen: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The weighted terms about what the vision tower's first block and image tokens show."""
        # The pixels of objects, cut into patches as the image is; one channel and frame of them.
        drawn = patches((batch.regions[:, None] > 0).float().expand(-1, 3, -1, -1), self.settings)
        drawn = (drawn[..., : PATCH**2] > 0).float().flatten(0, 1)
        return {
            "pixels": WEIGHTS["pixels"] * F.binary_cross_entropy_with_logits(self.outline(seen["early"]), drawn),
            "cells": WEIGHTS["cells"] * self._cell_loss(seen["merged"].unflatten(0, (-1, GRID**2)), batch),
        }

    def _cell_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """How well image tokens' ``features (B, N, DIM)`` say which objects they show and where centres lie.

        What they show is told by the embeddings of the words for it, so that words and what they name are alike to
        the decoder from the start; otherwise it is long before words look at what they name.
        """
        shape, color, x, y = batch.objects.unbind(-1)
        cover, index = batch.cover.max(1)  # (B, N)
        shows = cover > LEAST_SHARE
        shape_here = torch.where(shows, shape.gather(1, index) + 1, 0).long()
        color_here = torch.where(shows, color.gather(1, index) + 1, 0).long()
        side = PATCH * MERGE
        column, row = ((v / side).floor().clamp(0, GRID - 1) for v in (x, y))
        b, m = (shape >= 0).nonzero(as_tuple=True)
        centre = torch.zeros(cover.shape)
        centre[b, (row * GRID + column).long()[b, m]] = 1.0
        place = torch.stack([x.gather(1, index), y.gather(1, index)], -1) / SIZE - 0.5  # (B, N, 2)
        embed, (nothing, odd, colorless) = self.model.get_input_embeddings(), self.absent[:, None].unbind(0)
        shapes = torch.cat([nothing, embed(self.words.shapes).mean(0), odd])
        colors = torch.cat([colorless, embed(self.words.colors)])
        says = self.centre(features)
        miss = (says[..., 1:] - place).pow(2).mean(-1)
        return (
            F.cross_entropy((SHARPNESS * features @ shapes.T).flatten(0, 1), shape_here.flatten())
            + F.cross_entropy((SHARPNESS * features @ colors.T).flatten(0, 1), color_here.flatten())
            + F.binary_cross_entropy_with_logits(says[..., 0], centre)
            + PLACE_WEIGHT * (miss * shows).sum() / shows.sum().clamp(min=1)
        )


def _slots(where: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Tokens ``(n, 2)``, sorted by image -> columns per image ``(B, Q)``, padded with 0, and each one's place there."""
    counts = torch.bincount(where[:, 0], minlength=images)
    slot = torch.arange(len(where)) - (counts.cumsum(0) - counts)[where[:, 0]]
    queries = torch.zeros(images, max(1, int(counts.max())), dtype=torch.long)
    queries[where[:, 0], slot] = where[:, 1]
    return queries, slot


def sight(learner: Learner) -> set[nn.Parameter]:
    """The parameters that :meth:`Learner.see` depends on."""
    tower = learner.model.model.visual
    late = set(tower.deepstack_merger_list.parameters())
    parts = (tower, learner.model.get_input_embeddings(), learner.outline, learner.centre)
    return {learner.absent, *(p for part in parts for p in part.parameters())} - late


def split_parameters(learner: Learner, some: Collection[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """``some`` parameters: matrices inside layers, blocks and mergers, for Muon, and all others, for AdamW."""
    inside = {
        p
        for n, p in learner.model.named_parameters()
        if p.ndim == 2 and any(part in n for part in (".layers.", ".blocks.", "merger"))
    }
    chosen = [p for p in learner.parameters() if p in some]
    return [p for p in chosen if p in inside], [p for p in chosen if p not in inside]


def train_judge(
    generator: Path,
    folder: Path,
    output: Path,
    steps: int = 3_000,
    save_every: int = 150,
    sight_steps: int = 1_000,
    sources: tuple[Source, ...] = SOURCES,
    batch: int = BATCH,
) -> None:
    """Train, or go on training, the judge and write its folder; images and checkpoints live in ``folder``.

    The vision tower learns first, ``sight_steps`` by itself: shapes take long to tell apart, and a step of it alone
    costs a quarter of one of the whole, ``steps`` of which follow. In a ``torchrun`` group each process takes its share
    of every batch. Randomness is a function of the step, so that a resumed run repeats what an uninterrupted one does.
    """
    images = judge_images(generator, folder / "judge_images", sources)
    torch.manual_seed(0)
    tokenizer = build_judge_tokenizer()
    learner = Learner(tokenizer).train()
    config = learner.model.config
    chat = Chat(tokenizer, config.image_token_id, config.vision_end_token_id)
    asker = Asker(tokenizer, chat, images)

    def see(step: int) -> dict[str, Tensor]:
        return learner.see(asker(step, batch, ask=False))

    def answer(step: int) -> dict[str, Tensor]:
        return learner.loss(asker(step, batch), chat)

    parts = split_parameters(learner, sight(learner))
    seeing = fit(learner, *parts, see, Recipe(sight_steps, save_every), folder / "sight")
    learner.load_state_dict(seeing.state_dict())
    parts = split_parameters(learner, set(learner.parameters()))
    average = fit(learner, *parts, answer, Recipe(steps, save_every), folder / "judge")
    if rank_and_world()[0] == 0:
        save_judge(average.model, tokenizer, output)
        EvidenceSettings(heads=LOOKING).save(output / FILE_NAME)
