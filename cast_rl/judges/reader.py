"""Runs what is asked of images through the model: one prefix per image, all branches behind it in packed passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_rl.judges.attention_tap import Tap
from cast_rl.judges.chat import Chat
from cast_rl.judges.evidence import selected_rows
from cast_rl.judges.families.base import Family, Prefix
from cast_rl.judges.images import ImageSettings, patches
from cast_rl.judges.packing import Packed, batches, pack, rounds
from cast_rl.judges.questions import Asked


@dataclass(frozen=True)
class Reading:
    """What one batch of n images gave.

    Args:
        rows: which of the images given they are.
        scores: ``(n, K)`` float32, 0 beyond an image's atoms.
        attention: ``(n, L, A, N)``, or ``(n, L, H, A, N)`` with heads apart, over the L layers that are read and the N
            image tokens; None if no layer is read or there is no caption. Row k of an image belongs to its atom k; the
            rows behind its atoms to its captions as a whole, as seen before their first word.
    """

    rows: list[int]
    scores: Tensor
    attention: Tensor | None


class Reader:
    """Bounds memory by reading some images, and some branches of each, at a time.

    Args:
        family: the model.
        chat: its texts.
        images: how it wants its pixels.
        token_budget: tokens of the decoder at a time, prefixes included; one image and one branch always go through.
    """

    def __init__(self, family: Family, chat: Chat, images: ImageSettings, token_budget: int) -> None:
        self.family, self.chat, self.images, self.token_budget = family, chat, images, token_budget

    def read(
        self,
        images: Tensor,
        asked: Sequence[Asked],
        heads: Mapping[int, Sequence[int] | None],
        keep_heads: bool = False,
    ) -> Iterator[Reading]:
        """Everything that is asked of images of one size, batch by batch.

        Args:
            images: ``(B, 3, H, W)`` float in [0, 1] or uint8, all pixels finite.
            asked: B items with at least one question each.
            heads: per layer to read the heads to average, None for all of them; layers ascending.
            keep_heads: keep heads apart instead.
        """
        device = self.family.device
        grid = self.images.token_grid(*images.shape[-2:])
        ids, columns = self.chat.prefix(grid[0] * grid[1])
        chosen = {at: None if some is None else torch.tensor(some, device=device) for at, some in heads.items()}
        for batch in batches([sum(one.lengths) for one in asked], len(ids), self.token_budget):
            shown = patches(images[batch.start : batch.stop].to(device), self.images)
            prefix = self.family.prefix(shown, grid, ids, columns)
            some = asked[batch.start : batch.stop]
            yield Reading(list(batch), *self._continue(prefix, some, chosen, keep_heads))

    def _continue(
        self, prefix: Prefix, asked: Sequence[Asked], heads: Mapping[int, Tensor | None], keep_heads: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scores and attention of n images behind their prefix."""
        capacity = self.token_budget // len(asked) - prefix.length
        splits = [rounds(one.lengths, capacity) for one in asked]
        scores = torch.zeros(len(asked), max(len(one.questions) for one in asked), device=self.family.device)
        attention = None
        for turn in range(max(map(len, splits))):
            parts = [split[turn] if turn < len(split) else range(0) for split in splits]
            branches = [[one.branches[j].ids for j in part] for one, part in zip(asked, parts, strict=True)]
            packed = pack(branches, self.family.device)
            words = _words(asked, parts, packed)
            tap = None
            if heads and any(atom for image in words for atom in image):
                queries, weights = (t.to(self.family.device) for t in selected_rows(words))
                tap = Tap(queries, weights, prefix.columns, heads, keep_heads)
            hidden = self.family.branches(prefix, packed, tap)
            if tap is not None:
                # The words of an atom stand in one caption, which is in one round; in the others its rows are zero.
                seen = torch.stack([tap.rows[layer] for layer in heads], 1)
                attention = seen if attention is None else attention + seen
            at = _last_columns(asked, parts, packed)
            if at:
                image, atom, column = torch.tensor(at, device=hidden.device).T
                logits = self.family.logits(hidden[image, column])
                scores[image, atom] = answer_probability(logits, [asked[i].answers[k] for i, k, _ in at])
        return scores, attention


def _words(asked: Sequence[Asked], parts: Sequence[range], packed: Packed) -> list[list[list[int]]]:
    """Per image the packed columns of each atom's words, then of the token before each caption; empty if not there."""
    out: list[list[list[int]]] = []
    for one, part, starts in zip(asked, parts, packed.starts, strict=True):
        start = dict(zip(part, starts, strict=True))
        atoms = [[start[c] + t for t in tokens] if c in start else [] for c, tokens in one.words]
        before = [[start[c] + cap.caption_start - 1] if c in start else [] for c, cap in enumerate(one.captions)]
        out.append(atoms + before)
    return out


def _last_columns(asked: Sequence[Asked], parts: Sequence[range], packed: Packed) -> list[tuple[int, int, int]]:
    """``(image, atom, packed column of its question's last token)`` of the questions that are there."""
    return [
        (i, j - len(one.captions), last)
        for i, (one, part, lasts) in enumerate(zip(asked, parts, packed.lasts, strict=True))
        for j, last in zip(part, lasts, strict=True)
        if j >= len(one.captions)
    ]


def answer_probability(logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """``logits (n, V)`` and token ids per row -> their summed probabilities ``(n,)`` float32.

    At most 1: rounding, and the duplicates in official lists, could add up to more.
    """
    most = max(map(len, answers))
    ids = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in answers], device=logits.device)
    counts = torch.tensor([[n < len(row) for n in range(most)] for row in answers], device=logits.device)
    logits = logits.float()
    chance = (logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)).exp()
    return (chance * counts).sum(1).clamp_max(1)
