"""A frozen vision-language model as a judge: Soft-TIFA scores and evidence, one pass for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cast_rl.fingerprint import tokenizer_fingerprint, weights_fingerprint
from cast_rl.judges.answers import AnswerMode
from cast_rl.judges.base import Judgement
from cast_rl.judges.chat import Chat
from cast_rl.judges.evidence import EvidenceSettings, evidence_maps
from cast_rl.judges.families.base import Family
from cast_rl.judges.images import ImageSettings, usable
from cast_rl.judges.questions import Asked, Asker
from cast_rl.judges.reader import Reader
from cast_rl.scene_graph import Atom

LIST_GRID = (32, 32)  # of the evidence of images that may differ in size: Qwen3-VL's token grid at 1024x1024


class VLMJudge:
    """Asks a vision-language model about every atom of every image; docs/judge.md says what it computes.

    The score of an atom is the probability of its answer's tokens after ``<question> Answer in one word.``; its
    evidence is the attention from the words that state it to the image while the model says the prompt. An image goes
    through the vision tower once, and what all questions share through the decoder once; all questions and the
    caption follow in one packed pass.

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
        evidence: EvidenceSettings | None = EvidenceSettings(),  # noqa: B008 (it is frozen)
        evidence_size: tuple[int, int] | None = None,
        token_budget: int = 16384,
    ) -> None:
        config = family.model.config
        attention = family.text_model.config._attn_implementation
        if attention != "sdpa":
            raise ValueError(
                f"the model's text attention is {attention!r}, which cannot take the judge's tree mask; load it with "
                "attn_implementation='sdpa' (the vision tower may keep another: {'text_config': 'sdpa', "
                "'vision_config': 'flash_attention_2'})"
            )
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget} must be at least 1")
        self.family, self.tokenizer, self.images = family, tokenizer, images
        self.evidence, self.evidence_size = evidence, evidence_size
        chat = Chat(tokenizer, config.image_token_id, config.vision_end_token_id)
        self._ask = Asker(chat, answers, None if evidence is None else evidence.query)
        self._reader = Reader(family, chat, images, token_budget)
        self._heads = {} if evidence is None else evidence.chosen(family.layers, family.heads)

    def identity(self) -> dict[str, Any]:
        """Everything its judgements follow from, in JSON's types: weights, tokenizer and settings."""
        return {
            "model": type(self.family.model).__name__,
            "weights": weights_fingerprint(self.family.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "images": asdict(self.images),
            "answers": self._ask.mode,
            "evidence": None if self.evidence is None else asdict(self.evidence),
            "evidence_size": self.evidence_size,
        }

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
        for b, asked, grid, score, attention in self._each(images, atoms, self._heads):
            k = len(asked.questions)
            mask[b, :k] = score.isfinite()
            scores[b, :k] = torch.where(mask[b, :k], score, 0.0)
            if attention is not None:
                shown = self._evidence(attention.unflatten(-1, grid), asked, maps.shape[-2:])
                maps[b, :k] = torch.where(mask[b, :k, None, None], shown, 0.0)
        return Judgement(scores, mask, maps)

    @torch.no_grad()
    def head_attention(self, images: Tensor, atoms: Sequence[Sequence[Atom]]) -> Tensor:
        """Every head's attention from each atom's words to the image, to choose heads by.

        Args:
            images: ``(B, 3, H, W)``.
            atoms: B lists of at most K atoms.

        Returns:
            ``(B, K, layers, heads, h, w)`` float32 on the grid of image tokens: shares of all that a row attends to,
            text included. Zero beyond an image's atoms and without a prompt.

        Raises:
            ValueError: as a call of the judge; also if it was made with ``evidence=None``.
        """
        if self.evidence is None:
            raise ValueError("this judge was made with evidence=None; it reads no attention")
        layers, heads = self.family.layers, self.family.heads
        grid = self.images.token_grid(*images.shape[-2:])
        out = torch.zeros(len(atoms), max(map(len, atoms), default=0), layers, heads, *grid, device=self.device)
        for b, asked, _, _, attention in self._each(images, atoms, dict.fromkeys(range(layers)), keep_heads=True):
            if attention is not None:
                k = len(asked.questions)
                out[b, :k] = attention[:, :, :k].permute(2, 0, 1, 3).unflatten(-1, grid)
        return out

    def _each(
        self, images: Tensor | Sequence[Tensor], atoms: Sequence[Sequence[Atom]], heads: Mapping, keep_heads=False
    ) -> Iterator[tuple[int, Asked, tuple[int, int], Tensor, Tensor | None]]:
        """Per image that can be judged: its place, what was asked, its token grid, scores ``(K,)`` and attention."""
        groups = _by_size(images, len(atoms))
        asked = [self._ask(row) for row in atoms]
        usable_rows = [usable(pixels).tolist() for _, pixels in groups]
        # All that can be wrong with the call is known by now, before anything expensive.
        for (places, pixels), good in zip(groups, usable_rows, strict=True):
            keep = [i for i, b in enumerate(places) if good[i] and asked[b].questions]
            if not keep:
                continue
            grid = self.images.token_grid(*pixels.shape[-2:])
            wanted = [asked[places[i]] for i in keep]
            for reading in self._reader.read(pixels[keep], wanted, heads, keep_heads):
                for n, row in enumerate(reading.rows):
                    one = wanted[row]
                    attention = None if reading.attention is None else reading.attention[n]
                    yield places[keep[row]], one, grid, reading.scores[n, : len(one.questions)], attention

    def _map_size(self, images: Tensor | Sequence[Tensor]) -> tuple[int, int]:
        if self.evidence_size is not None:
            return self.evidence_size
        # A map must not depend on what other sizes are in the list.
        return self.images.token_grid(*images.shape[-2:]) if isinstance(images, Tensor) else LIST_GRID

    def _evidence(self, attention: Tensor, asked: Asked, size: Sequence[int]) -> Tensor:
        """One image's attention ``(L, A, h, w)``, heads averaged, to maps ``(K, *size)``; heads count the same."""
        heads = [self.family.heads if chosen is None else len(chosen) for chosen in self._heads.values()]
        rows = torch.einsum("l,lahw->ahw", attention.new_tensor(heads) / sum(heads), attention)
        K = len(asked.questions)
        generic = None
        if self.evidence.relative:
            generic = rows[[K + (0 if caption is None else caption) for caption, _ in asked.words]]
        return evidence_maps(rows[:K], generic, tuple(size))


def _by_size(images: Tensor | Sequence[Tensor], count: int) -> list[tuple[list[int], Tensor]]:
    """Images of one size and type together: their places in the call, and ``(n, 3, H, W)``."""
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
    return [(places, torch.stack([images[b] for b in places])) for places in groups.values()]
