"""Where a judge looked: from attention rows to one map per atom.

The model is made to say the prompt about the image. While it says the words that state a fact, its attention to the
image tokens shows where it sees that fact. *Relative* attention (arXiv 2502.17422) divides by the attention of the
last token before the caption, which has heard none of it: what is looked at whatever is said, cancels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

QUERIES = ("self", "predict")
FILE_NAME = "cast_judge.json"
RELATIVE_FLOOR = 1e-6  # of the generic map's mean, so that a column nobody looks at divides nothing by nothing


@dataclass(frozen=True)
class EvidenceSettings:
    """Which attention counts as evidence. `examples/calibrate_judge.py` finds it and writes it as JSON.

    Args:
        layers: decoder layers whose heads are averaged; None for those from 55 % to 78 % of the stack's depth.
        heads: ``(layer, head)`` pairs to average, in place of ``layers``.
        query: ``"self"``, the rows of the words' own tokens, or ``"predict"``, those the words are predicted from.
        relative: divide by the generic caption's attention.

    Raises:
        ValueError: both ``layers`` and ``heads``, none of either, or an unknown ``query``.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    query: str = "self"
    relative: bool = False

    def __post_init__(self) -> None:
        if self.layers is not None and self.heads is not None:
            raise ValueError("give layers or heads, not both: heads are (layer, head) pairs")
        if self.layers is not None and not self.layers or self.heads is not None and not self.heads:
            raise ValueError("layers and heads must name at least one, or be None")
        if self.query not in QUERIES:
            raise ValueError(f"query={self.query!r} is not one of {', '.join(QUERIES)}")

    @classmethod
    def load(cls, path: str | Path) -> EvidenceSettings:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: not a JSON object, an unknown key, or a value of a wrong kind.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            known = [f.name for f in fields(cls)]
            if unknown := sorted(set(found) - set(known)):
                raise ValueError(f"unknown key {unknown[0]!r}; keys are {', '.join(known)}")
            if found.get("layers") is not None:
                found["layers"] = tuple(int(layer) for layer in found["layers"])
            if found.get("heads") is not None:
                found["heads"] = tuple((int(layer), int(head)) for layer, head in found["heads"])
            return cls(**found)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no calibration of a judge: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes JSON that :meth:`load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def chosen(self, layers: int, heads: int) -> dict[int, tuple[int, ...] | None]:
        """For a stack of ``layers`` layers of ``heads`` heads: the heads to read in each layer, None for all of them.

        Raises:
            ValueError: a layer or head that the model does not have.
        """
        if self.heads is not None:
            pairs = sorted(set(self.heads))
        else:
            low, high = round(0.55 * layers), round(0.78 * layers)
            named = range(min(low, layers - 1), min(high, layers - 1) + 1) if self.layers is None else self.layers
            pairs = [(layer, 0) for layer in sorted(set(named))]
        for layer, head in pairs:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise ValueError(
                    f"evidence is asked of layer {layer}, head {head}; the model has {layers} layers of {heads} heads"
                )
        if self.heads is None:
            return {layer: None for layer, _ in pairs}
        return {layer: tuple(h for at, h in pairs if at == layer) for layer, _ in pairs}


def selected_rows(words: Sequence[Sequence[Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Token positions per image and atom -> the tokens to read, and how they are averaged per atom.

    ``words[b][a]`` are columns of image b. Returns ``queries (B, Q)`` long, padded with 0, and ``weights (B, A, Q)``
    float32, whose rows sum to 1, or to 0 for an atom without tokens.
    """
    columns = [sorted({i for atom in image for i in atom}) for image in words]
    queries = torch.zeros(len(words), max(1, *map(len, columns)), dtype=torch.long)
    weights = torch.zeros(len(words), max(map(len, words)), queries.shape[1])
    for b, (image, wanted) in enumerate(zip(words, columns, strict=True)):
        queries[b, : len(wanted)] = torch.tensor(wanted, dtype=torch.long)
        for a, atom in enumerate(image):
            for i in atom:
                weights[b, a, wanted.index(i)] = 1 / len(atom)
    return queries, weights


def unit_mean(maps: Tensor) -> Tensor:
    """``(..., h, w)`` scaled to unit spatial mean; all zero where a map is zero or not finite."""
    mean = maps.mean((-2, -1), keepdim=True)
    usable = (mean > 0) & mean.isfinite()
    return torch.where(usable, maps / torch.where(usable, mean, 1.0), 0.0)


def evidence_maps(rows: Tensor, generic: Tensor | None, size: tuple[int, int] | None) -> Tensor:
    """Attention to the image tokens ``(n, h, w)`` -> maps ``(n, *size)`` float32 with unit spatial mean.

    Args:
        rows: attention of each atom's words, averaged over tokens, layers and heads.
        generic: the same of the generic caption, ``(n, h, w)``; divides ``rows`` if given.
        size: of the maps, by area averaging; None for the grid of image tokens.
    """
    if generic is not None:
        rows = rows / (generic + RELATIVE_FLOOR * generic.mean((-2, -1), keepdim=True))
    if size is not None and tuple(size) != tuple(rows.shape[-2:]):
        rows = F.adaptive_avg_pool2d(unit_mean(rows), size)
    return unit_mean(rows)
