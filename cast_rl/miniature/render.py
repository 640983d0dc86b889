"""Shape scenes: where objects go and what they look like, vectorised over a batch.

Distances are in pixels of a :data:`SIZE` x :data:`SIZE` image, y pointing down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cast_rl.miniature.vocabulary import COLORS, MAX_OBJECTS, SHAPES
from cast_rl.scene_graph import SceneGraph

SIZE = 48
RADIUS = (4.3, 5.2)
BORDER = 6.7  # no centre nearer to an edge
GAP = 7.0  # least distance between two outlines: where little room is left, a generator draws objects that touch
BETWEEN = 4.0  # least distance of a related object's centre from the line that separates the groups
RGB = torch.tensor(
    [
        [0.90, 0.10, 0.10],
        [0.10, 0.75, 0.15],
        [0.12, 0.25, 0.95],
        [0.95, 0.90, 0.10],
        [0.62, 0.12, 0.85],
        [1.0, 0.50, 0.05],
    ]
)
EXTENT = 1.22  # furthest point of any shape's outline from its centre, in radii (roughly)


@dataclass
class Layout:
    """Objects of B scenes, padded to K = :data:`MAX_OBJECTS` each.

    ``xy (B, K, 2)`` centres, ``radius (B, K)``, ``shape``, ``color`` and ``group (B, K)`` int64, ``present (B, K)``
    bool, ``ok (B,)`` bool: whether every object found a place.
    """

    xy: Tensor
    radius: Tensor
    shape: Tensor
    color: Tensor
    group: Tensor
    present: Tensor
    ok: Tensor

    def __getitem__(self, index) -> Layout:
        return Layout(*(getattr(self, f.name)[index] for f in fields(self)))


def _circle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return (dx * dx + dy * dy).sqrt() - r


def _square(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return torch.maximum(dx.abs(), dy.abs()) - 0.9 * r


def _triangle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    R = 1.4 * r  # circumradius; moved so that the bounding box is about centred
    y = dy - 0.22 * R
    return torch.maximum(y, 0.8660254 * dx.abs() - 0.5 * y) - 0.5 * R


def _cross(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    ax, ay = dx.abs(), dy.abs()
    long, short = 1.12 * r, 0.40 * r
    return torch.minimum(torch.maximum(ax - long, ay - short), torch.maximum(ax - short, ay - long))


# In the order of SHAPES: the distance to the outline at an offset (dx, dy) from the centre, negative inside; all
# broadcastable. Exact for the circle, elsewhere that to the nearest edge's line, as an anti-aliased fill needs.
OUTLINES = (_circle, _square, _triangle, _cross)


def signed_distance(shape: Tensor, dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    """:data:`OUTLINES` of the shapes that the int64 tensor ``shape`` names; all broadcastable."""
    d = OUTLINES[0](dx, dy, r)
    for index, outline in enumerate(OUTLINES[1:], start=1):
        d = torch.where(shape == index, outline(dx, dy, r), d)
    return d


def _tabulate(graphs: Sequence[SceneGraph]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``shape, color, group (B, K)`` int64 and ``present (B, K)`` bool of the graphs' objects."""
    B, K = len(graphs), MAX_OBJECTS
    table = torch.zeros(3, B, K, dtype=torch.long)
    present = torch.zeros(B, K, dtype=torch.bool)
    for b, graph in enumerate(graphs):
        rows = [
            (SHAPES.index(e.noun), COLORS.index(e.attributes[0]), g)
            for g, e in enumerate(graph.entities)
            for _ in range(e.count)
        ]
        if len(rows) > K:
            raise ValueError(f"a scene holds at most {K} objects, got {len(rows)}: {graph.render()[0]!r}")
        table[:, b, : len(rows)] = torch.tensor(rows).T
        present[b, : len(rows)] = True
    return *table, present


def _bounds(graphs: Sequence[SceneGraph], group: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lowest and highest centre of every object, ``(B, K, 2)`` each, such that the relations hold.

    A relation splits the image by a line between its two groups, nearer to the smaller one; its place varies.
    """
    B, K = group.shape
    low = torch.full((B, K, 2), BORDER)
    high = torch.full((B, K, 2), SIZE - BORDER)
    jitter = torch.rand(B, generator=g).tolist()
    for b, graph in enumerate(graphs):
        for r in graph.relations:
            axis = 0 if r.predicate in ("left of", "right of") else 1
            first, second = (r.subject, r.object) if r.predicate in ("left of", "above") else (r.object, r.subject)
            n = graph.entities[first].count - graph.entities[second].count
            line = SIZE * (0.5 + 0.04 * n + 0.1 * (jitter[b] - 0.5))
            high[b, group[b] == first, axis] = line - BETWEEN
            low[b, group[b] == second, axis] = line + BETWEEN
    return low, high


def place(graphs: Sequence[SceneGraph], g: torch.Generator, tries: int = 48) -> Layout:
    """Random places for the objects of B graphs; each object takes the first of ``tries`` that is free."""
    shape, color, group, present = _tabulate(graphs)
    B, K = shape.shape
    base = RADIUS[0] + (RADIUS[1] - RADIUS[0]) * torch.rand(B, 1, generator=g)
    radius = base * (0.95 + 0.1 * torch.rand(B, K, generator=g))
    low, high = _bounds(graphs, group, g)
    candidates = low[:, :, None] + torch.rand(B, K, tries, 2, generator=g) * (high - low)[:, :, None]
    order = torch.rand(B, K, generator=g).masked_fill(~present, 9.0).argsort(1)
    xy = torch.full((B, K, 2), -99.0)
    ok = torch.ones(B, dtype=torch.bool)
    rows = torch.arange(B)
    for k in order.unbind(1):
        c, r = candidates[rows, k], radius[rows, k]  # (B, tries, 2), (B,)
        distance = (c[:, :, None] - xy[:, None]).norm(dim=-1)  # (B, tries, K)
        free = (distance > EXTENT * (r[:, None, None] + radius[:, None]) * 0.94 + GAP).all(-1)
        pick = free.float().argmax(1)
        here = present[rows, k]
        ok &= free[rows, pick] | ~here
        xy[rows, k] = torch.where(here[:, None], c[rows, pick], xy[rows, k])
    return Layout(xy, radius, shape, color, group, present, ok)


def layouts(graphs: Sequence[SceneGraph], g: torch.Generator, attempts: int = 400) -> Layout:
    """As :func:`place`, trying again where an object found no place.

    Raises:
        RuntimeError: a scene could not be laid out in ``attempts``.
    """
    layout = place(graphs, g)
    for _ in range(attempts):
        bad = (~layout.ok).nonzero().flatten()
        if not len(bad):
            return layout
        again = place([graphs[i] for i in bad], g)
        for f in fields(layout):
            getattr(layout, f.name)[bad] = getattr(again, f.name)
    text = graphs[int(bad[0])].render()[0]
    raise RuntimeError(f"no place found for the objects of {text!r} in {attempts} attempts")


def render(layout: Layout, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images ``(B, 3, S, S)`` in [0, 1] and each object's coverage ``(B, K, S, S)`` in [0, 1].

    Backgrounds are grey with a slight gradient; colours and radii vary a little.
    """
    B, K = layout.radius.shape
    axis = torch.arange(SIZE) + 0.5
    dx = axis[None, :] - layout.xy[..., 0, None, None]
    dy = axis[:, None] - layout.xy[..., 1, None, None]
    d = signed_distance(layout.shape[..., None, None], dx, dy, layout.radius[..., None, None])
    coverage = (0.5 - d).clamp(0, 1) * layout.present[..., None, None]
    grey = 0.08 + 0.27 * torch.rand(B, 1, 1, generator=g)
    slope = 0.10 * (torch.rand(B, 2, 1, 1, generator=g) - 0.5)
    background = grey + slope[:, 0] * (axis / SIZE - 0.5)[None, :] + slope[:, 1] * (axis / SIZE - 0.5)[:, None]
    paint = (RGB[layout.color] + 0.05 * (torch.rand(B, K, 3, generator=g) - 0.5)).clamp(0, 1)
    objects = torch.einsum("bkhw,bkc->bchw", coverage, paint)
    image = background[:, None] * (1 - coverage.sum(1, keepdim=True).clamp(max=1)) + objects
    return image.clamp(0, 1), coverage


def render_graphs(graphs: Sequence[SceneGraph], seed: int) -> Tensor:
    """One image per graph, ``(B, 3, S, S)`` in [0, 1]; the same for the same seed and graphs."""
    g = torch.Generator().manual_seed(seed)
    return render(layouts(graphs, g), g)[0]
