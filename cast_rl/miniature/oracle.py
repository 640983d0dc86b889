"""The exact judge of the miniature: parses an image into objects and scores every atom from them.

Every connected patch of colour counts as an object, down to :data:`MIN_AREA` pixels, so that neither fragments nor
speckles go unseen; a patch whose outline fits none of the known shapes has shape None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from cast_rl.judges.base import Judgement
from cast_rl.miniature.render import OUTLINES, RGB
from cast_rl.miniature.vocabulary import COLORS, SHAPES
from cast_rl.scene_graph import SKILLS, Atom

CHROMA = 0.30  # least difference between the largest and the smallest channel of a coloured pixel
MIN_AREA = 4  # pixels; below it a patch is sensor noise
MIN_IOU = 0.68  # least overlap with the best-fitting shape, in intersection over union
AREA = (30.0, 170.0)  # pixels; a shape's area outside this range is not one object of this world
MARGIN = 1.5  # pixels by which a group must lie beyond the other for a relation to hold
WINDOW = 19  # pixels; the side of the square in which a patch is fitted


T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A patch of one colour; positions and areas in pixels.

    Args:
        shape: the one it fits best, None if it fits none.
        fits: soft IoU in [0, 1] with each of :data:`SHAPES`, of which ``iou`` is the largest.
        mask: ``(S, S)`` bool.
    """

    shape: str | None
    color: str
    x: float
    y: float
    area: float
    iou: float
    fits: tuple[float, ...]
    mask: np.ndarray


def hue_and_chroma(rgb: Tensor) -> tuple[Tensor, Tensor]:
    """Hue in degrees and chroma in [0, 1] (hexagonal HSV) of ``rgb (B, 3, ...)``, each ``(B, ...)``."""
    top, index = rgb.max(1)
    chroma = top - rgb.min(1).values
    r, g, b = rgb.unbind(1)
    c = chroma.clamp(min=1e-6)
    sector = torch.where(index == 0, ((g - b) / c) % 6, torch.where(index == 1, (b - r) / c + 2, (r - g) / c + 4))
    return 60 * sector, chroma


@lru_cache(maxsize=1)
def _palette() -> Tensor:
    return hue_and_chroma(RGB)[0]


def color_masks(images: Tensor) -> Tensor:
    """Which pixels show which colour: ``(B, 3, S, S)`` in [0, 1] -> ``(B, len(COLORS), S, S)`` bool.

    The image is first smoothed by a 3x3 binomial filter, which takes pixel noise below the threshold and moves no
    straight edge: half the chroma of every colour of the palette is near :data:`CHROMA`.
    """
    k = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = (k[:, None] * k).expand(3, 1, 3, 3)
    smooth = F.conv2d(F.pad(images.float().clamp(0, 1), (1, 1, 1, 1), mode="replicate"), kernel, groups=3)
    hue, chroma = hue_and_chroma(smooth)
    away = (hue[:, None] - _palette()[None, :, None, None]).abs()
    nearest = torch.minimum(away, 360 - away).argmin(1)
    return F.one_hot(nearest, len(COLORS)).permute(0, 3, 1, 2).bool() & (chroma > CHROMA)[:, None]


@lru_cache(maxsize=1)
def _moments() -> tuple[Tensor, Tensor]:
    """Each shape's area, and how far below its centre its centroid lies, at unit radius, measured on a fine grid."""
    axis = torch.linspace(-2, 2, 801)
    inside = torch.stack([f(axis[None, :], axis[:, None], torch.ones(())) < 0 for f in OUTLINES]).float()
    return inside.mean((1, 2)) * 16, (inside * axis[:, None]).sum((1, 2)) / inside.sum((1, 2))


def _fit(cover: Tensor, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    """Best overlap of each patch with each shape: coverage ``(M, W, W)`` -> soft IoU ``(M, len(SHAPES))``.

    A shape is drawn, anti-aliased, with the patch's own area and centroid ``x, y (M,)`` (in the window's pixels), and
    a little larger and smaller. Soft IoU is the sum of minima over the sum of maxima.
    """
    areas, below = _moments()
    axis = torch.arange(cover.shape[-1]) + 0.5
    cover = cover.flatten(1)
    best = torch.zeros(len(cover), len(SHAPES))
    for s, outline in enumerate(OUTLINES):
        for scale in (0.95, 1.0, 1.06):
            r = (area / areas[s]).sqrt() * scale
            dx = axis[None, None, :] - x[:, None, None]
            dy = axis[None, :, None] - (y - below[s] * r)[:, None, None]
            drawn = (0.5 - outline(dx, dy, r[:, None, None])).clamp(0, 1).flatten(1)
            both = torch.minimum(drawn, cover).sum(1)
            best[:, s] = torch.maximum(best[:, s], both / (drawn.sum(1) + area - both))
    return best


def _coverage(image: Tensor, color: int, mask: np.ndarray, corner: tuple[int, int]) -> Tensor:
    """How much of each pixel a patch covers, ``(W, W)`` in [0, 1], in the window whose corner is ``(y, x)``.

    The image is projected on the colour's own direction, to which grey does not contribute; unlike chroma that is
    linear in the pixels, so noise does not bias it. Only the patch and its one-pixel rim count.
    """
    box = tuple(slice(c, c + WINDOW) for c in corner)
    direction = RGB[color] - RGB[color].mean()
    shade = torch.einsum("chw,c->hw", image[(slice(None), *box)], direction)
    inside = torch.from_numpy(mask[box])
    rim = torch.from_numpy(ndimage.binary_dilation(mask[box], ndimage.generate_binary_structure(2, 2)))
    full = shade[inside].quantile(0.75).clamp(min=1e-3)
    return (shade / full).clamp(0, 1) * rim


def _patches(masks: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Connected patches of at least :data:`MIN_AREA` pixels: ``(N, S, S)`` bool -> (plane, mask ``(S, S)``) each."""
    # No neighbours along the first axis: a patch lies within one image and colour.
    plane = np.stack([np.zeros((3, 3)), ndimage.generate_binary_structure(2, 1), np.zeros((3, 3))])
    labels, _ = ndimage.label(masks, structure=plane)
    out = []
    for label, box in enumerate(ndimage.find_objects(labels), start=1):
        inside = labels[box][0] == label
        if inside.sum() >= MIN_AREA:
            mask = np.zeros(masks.shape[1:], dtype=bool)
            mask[box[1:]] = inside
            out.append((box[0].start, mask))
    return out


def parse(images: Tensor) -> list[list[Found]]:
    """Every patch of colour in every image: ``(B, 3, S, S)`` in [0, 1] -> B lists, in reading order per colour.

    Raises:
        ValueError: not a batch of RGB images.
    """
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < WINDOW:
        raise ValueError(f"the oracle parses images (B, 3, H, W) of at least {WINDOW}, got {tuple(images.shape)}")
    images = images.detach().float().cpu().clamp(0, 1)
    out: list[list[Found]] = [[] for _ in range(len(images))]
    patches = _patches(color_masks(images).flatten(0, 1).numpy())
    if not patches:
        return out
    corners, cover = [], []
    for plane, mask in patches:
        b, c = divmod(plane, len(COLORS))
        middle = np.argwhere(mask).mean(0) + 0.5
        corner = tuple(
            int(np.clip(round(m - WINDOW / 2), 0, s - WINDOW)) for m, s in zip(middle, mask.shape, strict=True)
        )
        corners.append(corner)
        cover.append(_coverage(images[b], c, mask, corner))
    cover = torch.stack(cover)  # (M, W, W)
    axis = torch.arange(WINDOW) + 0.5
    area = cover.sum((1, 2)).clamp(min=1e-3)
    x, y = (cover.sum(1) @ axis) / area, (cover.sum(2) @ axis) / area
    fits = _fit(cover, x, y, area)
    iou, shape = fits.max(1)
    for m, (plane, mask) in enumerate(patches):
        b, c = divmod(plane, len(COLORS))
        known = iou[m] >= MIN_IOU and AREA[0] <= area[m] <= AREA[1]
        top, left = corners[m]
        # Smoothing rounds corners off; where the patch covers most of a pixel is the region as it was drawn.
        region = np.zeros_like(mask)
        region[top : top + WINDOW, left : left + WINDOW] = cover[m].numpy() > 0.5
        out[b].append(
            Found(
                shape=SHAPES[shape[m]] if known else None,
                color=COLORS[c],
                x=float(x[m]) + left,
                y=float(y[m]) + top,
                area=float(area[m]),
                iou=float(iou[m]),
                fits=tuple(fits[m].tolist()),
                mask=region if region.any() else mask,
            )
        )
    return out


def _of(entity, objects: Sequence[Found], colors: bool) -> list[Found]:
    """The objects of an entity's shape, and of its colour if ``colors``."""
    return [o for o in objects if o.shape == entity.noun and (not colors or o.color in entity.attributes)]


def beyond_by(predicate: str, a: Found, b: Found) -> float:
    """How many pixels the centre of ``a`` lies ``predicate`` that of ``b``; negative on the wrong side."""
    axis, sign = {"left of": ("x", 1), "right of": ("x", -1), "above": ("y", 1), "below": ("y", -1)}[predicate]
    return sign * (getattr(b, axis) - getattr(a, axis))


def check_atom(atom: Atom) -> None:
    """Refuses an atom that does not come from a scene graph of this world."""
    if not atom.entities or any(e.noun not in SHAPES for e in atom.entities):
        raise ValueError(
            f"the oracle only judges atoms of the miniature's scene graphs, got {atom.question!r}; other atoms "
            "need a vision-language judge"
        )
    judged = [skill for skill in SKILLS if skill != "verb"]  # nothing acts in this world
    if atom.skill not in judged:
        raise ValueError(f"the oracle knows no skill {atom.skill!r}; it knows {', '.join(judged)}")


def check(atom: Atom, objects: Sequence[Found]) -> tuple[bool, list[Found]]:
    """Whether an atom holds among the objects found, and the objects that show it (the evidence).

    A fact about "the circles" of a prompt with no other circles is about all circles in the image, of any colour.

    Raises:
        ValueError: an atom that does not come from a scene graph of this world.
    """
    check_atom(atom)
    entity = atom.entities[0]
    if atom.skill == "object":
        seen = _of(entity, objects, colors=False)
        return len(seen) > 0, seen
    if atom.skill == "attribute":
        kin = _of(entity, objects, colors=False)
        right = [o for o in kin if o.color == atom.value]
        if atom.qualified:
            return len(right) > 0, right or kin
        return len(kin) > 0 and len(right) == len(kin), kin
    if atom.skill == "count":
        seen = _of(entity, objects, colors=atom.qualified)
        return len(seen) == atom.value, seen
    if atom.skill == "position":
        a, b = (_of(e, objects, colors=atom.qualified) for e in atom.entities)
        return bool(a and b) and all(beyond_by(atom.value, p, q) > MARGIN for p in a for q in b), a + b
    return len(objects) == atom.value, list(objects)


def unrequested(atoms: Sequence[Atom], objects: Sequence[Found]) -> int:
    """How many objects no entity of the prompt asks for, fragments included; surplus ones of a kind count too."""
    entities = {e for a in atoms for e in a.entities}
    asked = [min(len(_of(e, objects, colors=True)), e.count or len(objects)) for e in entities]
    return len(objects) - sum(asked)


def judge_all(
    images: Tensor,
    atoms: Sequence[Sequence[Atom]],
    objects_of: Callable[[Tensor], list[T]],
    judge_one: Callable[[Atom, T], tuple[float, Tensor | None]],
) -> Judgement:
    """Every atom of every image ``(B, 3, S, S)``: scores and mask ``(B, K)``, evidence ``(B, K, S, S)``.

    ``objects_of`` turns the images into what is found in each, ``judge_one`` that and an atom into a score and the
    region that shows it, ``(S, S)``, or None. An atom about the whole scene is shown by the whole image, since an
    object too many or too few can be anywhere.
    """
    if len(atoms) != len(images):
        raise ValueError(f"got {len(images)} images but atoms for {len(atoms)}")
    B, K = len(images), max((len(a) for a in atoms), default=0)
    scores = torch.zeros(B, K)
    mask = torch.zeros(B, K, dtype=torch.bool)
    evidence = torch.zeros(B, K, *images.shape[-2:])
    for b, objects in enumerate(objects_of(images)):
        for k, atom in enumerate(atoms[b]):
            scores[b, k], region = judge_one(atom, objects)
            mask[b, k] = True
            if atom.skill == "scene":
                evidence[b, k] = 1
            elif region is not None:
                evidence[b, k] = region / region.mean()
    device = images.device
    return Judgement(scores.to(device), mask.to(device), evidence.to(device))


class Oracle:
    """The judge protocol over :func:`parse` and :func:`check`: scores are 0 or 1 and never unknown.

    Evidence is the exact region of the objects that show the fact, the whole image for the number of objects in the
    scene; an atom about something that is not there has none and its map is all zero.
    """

    def __call__(self, images: Tensor, atoms: Sequence[Sequence[Atom]]) -> Judgement:
        """Judge ``images (B, 3, S, S)`` in [0, 1]: scores and mask ``(B, K)``, evidence ``(B, K, S, S)``."""
        return judge_all(images, atoms, parse, self._judge_one)

    @staticmethod
    def _judge_one(atom: Atom, objects: Sequence[Found]) -> tuple[float, Tensor | None]:
        holds, seen = check(atom, objects)
        region = torch.from_numpy(np.any([o.mask for o in seen], axis=0)).float() if seen else None
        return float(holds), region
