"""The oracle as a judge that is unsure, as a vision-language model is: every score is a probability.

A patch of colour is a given shape with a probability that grows with how well it fits, and the probability of a fact
follows from those, patches being independent. An image that nearly shows a fact scores higher than one that does not,
which gives reinforcement learning more to go by than yes and no.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import torch
from scipy.special import expit, softmax
from torch import Tensor

from cast_rl.judges.base import Judgement
from cast_rl.miniature.oracle import AREA, MARGIN, MIN_AREA, MIN_IOU, Found, beyond_by, check_atom, judge_all, parse
from cast_rl.miniature.vocabulary import SHAPES
from cast_rl.scene_graph import Atom, Entity

IOU_SCALE = 0.05  # how unsure: widths of the logistic curves that replace the exact oracle's thresholds
SHAPE_SCALE = 0.04
AREA_SCALE = 6.0  # pixels
PLACE_SCALE = 1.5  # pixels
CERTAIN = 0.02  # below it a possibility is left out of the sum over what patches may be

Belief = tuple[Found, float]


def _above(value: float, threshold: float, scale: float) -> float:
    """Logistic in place of ``value > threshold``."""
    return float(expit((value - threshold) / scale))


def shape_chances(found: Found) -> dict[str, float]:
    """The probability that a patch is one object of each shape; what is missing to 1 is that it is none."""
    one = _above(found.iou, MIN_IOU, IOU_SCALE)
    one *= _above(found.area, AREA[0], AREA_SCALE) * _above(-found.area, -AREA[1], AREA_SCALE)
    which = softmax(np.array(found.fits) / SHAPE_SCALE).tolist()
    return {shape: one * p for shape, p in zip(SHAPES, which, strict=True)}


def exactly(chances: Sequence[float], n: int) -> float:
    """The probability that ``n`` of independent events happen (Poisson binomial distribution)."""
    distribution = [1.0]
    for p in chances:
        happened, not_yet = [0.0, *distribution], [*distribution, 0.0]
        distribution = [a * p + b * (1 - p) for a, b in zip(happened, not_yet, strict=True)]
    return distribution[n] if n < len(distribution) else 0.0


def _any(beliefs: Sequence[Belief]) -> float:
    return 1 - prod(1 - p for _, p in beliefs)


def _position(predicate: str, ends: Sequence[Sequence[Belief]]) -> float:
    """The probability that both ends are there and every object of one lies ``predicate`` every one of the other.

    A sum over what each patch may be: an object of the first end, of the second, or neither. Only patches that are in
    doubt multiply the terms, and doubts below :data:`CERTAIN` are dropped.
    """
    first, second = ({id(o): (o, p) for o, p in end} for end in ends)
    options = []
    for key in first | second:
        found = (first.get(key) or second[key])[0]
        p, q = (end[key][1] if key in end else 0.0 for end in (first, second))
        likely = [(role, found, c) for role, c in enumerate((p, q, 1 - p - q)) if c > CERTAIN]
        if any(role < 2 for role, _, _ in likely):
            options.append(likely)
    total = 0.0
    for roles in product(*options):
        a, b = ([found for role, found, _ in roles if role == end] for end in (0, 1))
        if a and b:
            beyond = prod(_above(beyond_by(predicate, x, y), MARGIN, PLACE_SCALE) for x in a for y in b)
            total += beyond * prod(c for _, _, c in roles)
    return total


def chance(atom: Atom, objects: Sequence[tuple[Found, dict[str, float]]]) -> tuple[float, list[Belief]]:
    """The probability that an atom holds, and the patches that would show it with their weights.

    ``objects`` are patches with their :func:`shape_chances`. The facts are those of `cast_rl.miniature.oracle.check`.

    Raises:
        ValueError: an atom that does not come from a scene graph of this world.
    """
    check_atom(atom)

    def of(entity: Entity, colors: bool) -> list[Belief]:
        return [(o, p[entity.noun]) for o, p in objects if not colors or o.color in entity.attributes]

    entity = atom.entities[0]
    if atom.skill == "object":
        seen = of(entity, colors=False)
        return _any(seen), seen
    if atom.skill == "attribute":
        kin = of(entity, colors=False)
        right = [(o, p) for o, p in kin if o.color == atom.value]
        if atom.qualified:
            return _any(right), right if _any(right) > 0.5 else kin
        return _any(right) * prod(1 - p for o, p in kin if o.color != atom.value), kin
    if atom.skill == "count":
        seen = of(entity, colors=atom.qualified)
        return exactly([p for _, p in seen], atom.value), seen
    if atom.skill == "position":
        ends = [of(e, colors=atom.qualified) for e in atom.entities]
        return _position(atom.value, ends), ends[0] + ends[1]
    # The scene: every patch counts, whatever it is; the smallest that the exact oracle sees may be noise.
    seen = [(o, _above(o.area, MIN_AREA, MIN_AREA / 4)) for o, _ in objects]
    return exactly([p for _, p in seen], atom.value), seen


class SoftOracle:
    """The judge protocol over :func:`chance`; evidence is the region of the patches, weighted by their chances."""

    def __call__(self, images: Tensor, atoms: Sequence[Sequence[Atom]]) -> Judgement:
        """Judge ``images (B, 3, S, S)`` in [0, 1]: scores and mask ``(B, K)``, evidence ``(B, K, S, S)``."""
        return judge_all(images, atoms, self._objects_of, self._judge_one)

    @staticmethod
    def _objects_of(images: Tensor) -> list[list[tuple[Found, dict[str, float]]]]:
        return [[(o, shape_chances(o)) for o in found] for found in parse(images)]

    @staticmethod
    def _judge_one(atom: Atom, objects: Sequence[tuple[Found, dict[str, float]]]) -> tuple[float, Tensor | None]:
        score, seen = chance(atom, objects)
        region = np.max([o.mask * p for o, p in seen], axis=0, initial=0.0) if seen else np.zeros(1)
        return score, torch.from_numpy(region) if region.mean() > 1e-3 else None  # else nothing worth looking at
