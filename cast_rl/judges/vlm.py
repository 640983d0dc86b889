"""A frozen vision-language model as a judge: Soft-TIFA scores and evidence, one pass for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cast_rl.judges.answers import AnswerMode, answer_tokens
from cast_rl.judges.attention_tap import Tap
from cast_rl.judges.base import Judgement
from cast_rl.judges.chat import Chat
from cast_rl.judges.evidence import EvidenceSettings, evidence_maps, selected_rows
from cast_rl.judges.families.base import Family, Prefix
from cast_rl.judges.images import ImageSettings, patches, usable
from cast_rl.judges.packing import Packed, batches, pack, rounds
from cast_rl.judges.questions import Asked, Asker
from cast_rl.scene_graph import Atom

LIST_GRID = (32, 32)  # of the evidence of images that may differ in size: Qwen3-VL's token grid at 1024x1024


@dataclass(frozen=True)
class _Read:
    """What one batch of n images gave.

    Args:
        rows: which images of the call they are.
        grid: rows and columns of their image tokens, N in all.
        scores: ``(n, K)``, 0 beyond an image's atoms.
        attention: ``(n, L, A, N)``, or ``(n, L, H, A, N)`` with heads apart, over the layers read; None if none was.
            Row k belongs to atom k, row K_i + c of image i, which has K_i atoms, to its caption c as a whole.
    """

    rows: list[int]
    grid: tuple[int, int]
    scores: Tensor
    attention: Tensor | None


class VLMJudge:
    """Asks a vision-language model about every atom of every image; docs/judge.md says what it computes.

    The score of an atom is the probability of its answer's tokens after ``<question> Answer in one word.``; its evidence
    is the attention from the words that state it to the image while the model says the prompt. An image goes through the
    vision tower once, and what all questions share through the decoder once; all questions and the caption follow in one
    packed pass.

    Args:
        family: the model, as `cast_rl.judges.load_judge` wraps it.
        tokenizer: with the model's chat template.
        images: how the model wants its pixels.
        answers: ``"robust"`` or ``"official"``, see `cast_rl.judges.answers`.
        evidence: which attention counts; None for scores alone, without captions.
        evidence_size: ``(h, w)`` of the maps; None for the grid of image tokens, or 32x32 if images come as a list.
        token_budget: tokens that the decoder takes at a time, prefixes included. Bounds memory and changes no result;
            one image with its longest branch always goes through.

    Raises:
        ValueError: settings that the model cannot follow; a decoder whose attention takes no tree mask.
    """

    def __init__(
        self,
        family: Family,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageSettings,
        *,
        answers: AnswerMode = "robust",
        evidence: EvidenceSettings | None = EvidenceSettings(),  # noqa: B008 (frozen)
        evidence_size: tuple[int, int] | None = None,
        token_budget: int = 16384,
    ) -> None:
        config = family.model.config
        family.check(config)
        attention = family.text_model.config._attn_implementation
        if attention != "sdpa":
            raise ValueError(
                f"the model's text attention is {attention!r}, which the judge's tree mask and attention tap do not work "
                "with; load it with attn_implementation='sdpa' (the vision tower may keep another: "
                "{'text_config': 'sdpa', 'vision_config': 'flash_attention_2'})"
            )
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget} must be at least 1")
        answer_tokens(tokenizer, "", "Yes", answers)  # refuses an unknown mode now
        self.family, self.images, self.evidence = family, images, evidence
        self.evidence_size, self.token_budget = evidence_size, token_budget
        self.chat = Chat(tokenizer, config.image_token_id, config.vision_end_token_id)
        self.ask = Asker(self.chat, tokenizer, answers, None if evidence is None else evidence.query)
        self._chosen = {} if evidence is None else evidence.chosen(family.layers, family.heads)

    @property
    def device(self) -> torch.device:
        """Where the model is, and where images are best given."""
        return self.family.device

    @torch.no_grad()
    def __call__(self, images: Tensor | Sequence[Tensor], atoms: Sequence[Sequence[Atom]]) -> Judgement:
        """Judge images, float in [0, 1] or uint8; ``atoms[b]`` are the facts asked of image b.

        Args:
            images: ``(B, 3, H, W)``, or B tensors ``(3, H, W)`` of any sizes.
            atoms: B lists of any lengths.

        Returns:
            scores and mask ``(B, K)`` and evidence ``(B, K, h, w)`` on the judge's device. The mask is false beyond an
            image's atoms, for an image with pixels that are not finite, and for a score that is not. Evidence is zero
            where the mask is false and for an atom that names no prompt.

        Raises:
            ValueError: no image, atoms for another number of images, images of a wrong shape or type, pixels outside
                [0, 1], a special token in a prompt or question, an answer that no token stands for.
        """
        B, K = len(atoms), max(map(len, atoms), default=0)
        scores = torch.zeros(B, K, device=self.device)
        mask = torch.zeros_like(scores, dtype=torch.bool)
        maps = None
        if self.evidence is not None:
            maps = torch.zeros(B, K, *self._map_size(images), device=self.device)
        for read in self._reads(images, atoms, self._chosen, keep_heads=False):
            for i, b in enumerate(read.rows):
                k = len(atoms[b])
                mask[b, :k] = read.scores[i, :k].isfinite()
                scores[b, :k] = torch.where(mask[b, :k], read.scores[i, :k], 0.0)
                if read.attention is not None:
                    shown = self._evidence(read.attention[i], self.ask(atoms[b]), read.grid, maps.shape[-2:])
                    maps[b, :k] = shown * mask[b, :k, None, None]
        return Judgement(scores, mask, maps)

    @torch.no_grad()
    def head_attention(self, images: Tensor, atoms: Sequence[Sequence[Atom]]) -> Tensor:
        """Every head's attention from each atom's words to the image, to choose heads by.

        Args:
            images: ``(B, 3, H, W)``.
            atoms: B lists of at most K atoms.

        Returns:
            ``(B, K, layers, heads, h, w)`` on the grid of image tokens: shares of the whole attention of a row, which
            sum to less than 1 over the image. Zero beyond an image's atoms and without a prompt.
        """
        if self.evidence is None:
            raise ValueError("this judge was made with evidence=None; it reads no attention")
        K = max(map(len, atoms), default=0)
        every = dict.fromkeys(range(self.family.layers))
        grid = self.images.token_grid(*images.shape[-2:])
        out = torch.zeros(len(atoms), K, self.family.layers, self.family.heads, *grid, device=self.device)
        for read in self._reads(images, atoms, every, keep_heads=True):
            for i, b in enumerate(read.rows):
                k = len(atoms[b])
                out[b, :k] = read.attention[i, :, :, :k].permute(2, 0, 1, 3).unflatten(-1, grid)
        return out

    def _map_size(self, images: Tensor | Sequence[Tensor]) -> tuple[int, int]:
        if self.evidence_size is not None:
            return self.evidence_size
        # A list's maps must not depend on what other sizes are in it.
        return self.images.token_grid(*images.shape[-2:]) if isinstance(images, Tensor) else LIST_GRID

    def _evidence(self, attention: Tensor, asked: Asked, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """One image's ``(L, A, N)`` to maps ``(K, *size)``; layers count as many times as heads of them were averaged."""
        heads = [self.family.heads if chosen is None else len(chosen) for chosen in self._chosen.values()]
        weight = attention.new_tensor(heads) / sum(heads)
        rows = torch.einsum("l,lan->an", weight, attention).unflatten(-1, grid)
        K = len(asked.words)
        generic = None
        if self.evidence.relative and asked.captions:
            generic = rows[[K + (0 if word is None else word[0]) for word in asked.words]]
        return evidence_maps(rows[:K], generic, size)

    def _reads(self, images, atoms, chosen: dict, keep_heads: bool) -> Iterator[_Read]:
        """Everything that is asked of the images, batch by batch, each of images of one size within the budget."""
        groups = _by_size(images, len(atoms))
        asked = [self.ask(row) for row in atoms]
        fine = [usable(pixels) for _, pixels in groups]
        heads = {
            layer: None if some is None else torch.tensor(some, device=self.device) for layer, some in chosen.items()
        }
        for (rows, pixels), good in zip(groups, fine, strict=True):
            keep = [i for i, b in enumerate(rows) if asked[b].questions and good[i]]
            if not keep:
                continue
            grid = self.images.token_grid(*pixels.shape[-2:])
            ids, columns = self.chat.prefix(grid[0] * grid[1])
            lengths = [sum(asked[rows[i]].lengths) for i in keep]
            for batch in batches(lengths, len(ids), self.token_budget):
                some = [keep[i] for i in batch]
                shown = patches(pixels[some].to(self.device), self.images)
                prefix = self.family.prefix(shown, grid, ids, columns)
                wanted = [asked[rows[i]] for i in some]
                yield _Read([rows[i] for i in some], grid, *self._answer(prefix, wanted, heads, keep_heads))

    def _answer(
        self, prefix: Prefix, asked: list[Asked], heads: dict, keep_heads: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scores ``(n, K)`` and attention, as in `_Read`, of n images behind their prefix."""
        capacity = max(1, self.token_budget // len(asked) - prefix.length)
        turns = [rounds(one.lengths, capacity) for one in asked]
        scores = torch.zeros(len(asked), max(len(one.questions) for one in asked), device=self.device)
        attention = None
        for turn in range(max(map(len, turns))):
            parts = [of[turn] if turn < len(of) else range(0) for of in turns]
            rows = [[one.branches[j].ids for j in part] for one, part in zip(asked, parts, strict=True)]
            packed = pack(rows, self.device)
            tap = self._tap(prefix, asked, parts, packed, heads, keep_heads)
            hidden = self.family.branches(prefix, packed, tap)
            if tap is not None:
                # An atom's words are in one caption, which is in one round: other rounds add zero.
                read = torch.stack([tap.rows[layer] for layer in sorted(heads)], 1)
                attention = read if attention is None else attention + read
            self._score(scores, hidden, asked, parts, packed)
        return scores, attention

    def _tap(self, prefix, asked, parts, packed: Packed, heads: dict, keep_heads: bool) -> Tap | None:
        if not heads or not any(part.start < len(one.captions) for one, part in zip(asked, parts, strict=True) if part):
            return None
        words: list[list[list[int]]] = []
        for i, (one, part) in enumerate(zip(asked, parts, strict=True)):
            start = {j: packed.starts[i][j - part.start] for j in part}
            atoms = [[start[word[0]] + t for t in word[1]] if word and word[0] in part else [] for word in one.words]
            before = [
                [start[c] + one.captions[c].caption_start - 1] if c in part else [] for c in range(len(one.captions))
            ]
            words.append(atoms + before)
        queries, weights = (t.to(self.device) for t in selected_rows(words))
        return Tap(queries, weights, prefix.columns, heads, keep_heads)

    def _score(self, scores: Tensor, hidden: Tensor, asked, parts, packed: Packed) -> None:
        """Writes the scores of the questions among the branches of this round."""
        at = []
        for i, (one, part) in enumerate(zip(asked, parts, strict=True)):
            at += [(i, j - len(one.captions), packed.lasts[i][j - part.start]) for j in part if j >= len(one.captions)]
        if not at:
            return
        image, atom, column = torch.tensor(at, device=self.device).T
        logits = self.family.logits(hidden[image, column])
        scores[image, atom] = answer_probability(logits, [asked[i].answers[k] for i, k, _ in at])


def answer_probability(logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """``logits (n, V)`` and token ids per row -> their summed probabilities ``(n,)`` float32.

    At most 1: the duplicates of the official lists could add up to more.
    """
    most = max(map(len, answers))
    ids = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in answers], device=logits.device)
    counts = torch.tensor([[n < len(row) for n in range(most)] for row in answers], device=logits.device)
    logits = logits.float()
    chance = (logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)).exp()
    return (chance * counts).sum(1).clamp_max(1)


def _by_size(images: Tensor | Sequence[Tensor], count: int) -> list[tuple[list[int], Tensor]]:
    """Images of one size together: their places in the call, and ``(n, 3, H, W)``."""
    if len(images) != count:
        raise ValueError(f"got {len(images)} images but atoms for {count}")
    if not count:
        raise ValueError("there is no image to judge")
    if isinstance(images, Tensor):
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be (B, 3, H, W), got {tuple(images.shape)}")
        return [(list(range(count)), images)]
    groups: dict[tuple, list[int]] = {}
    for b, image in enumerate(images):
        if image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(f"image {b} must be (3, H, W), got {tuple(image.shape)}")
        groups.setdefault((tuple(image.shape), image.dtype), []).append(b)
    return [(rows, torch.stack([images[b] for b in rows])) for rows in groups.values()]
