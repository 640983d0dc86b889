"""Many short continuations of one prefix in one forward pass.

The branches of an image lie behind each other in one row. A tree mask lets a token see the prefix and its own branch,
and positions start anew in each branch, so that each one is computed as if it were alone behind the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Branches of B images, padded to T tokens.

    Args:
        ids: ``(B, T)`` token ids, 0 where padded.
        branch: ``(B, T)`` which branch of its image a token belongs to, -1 where padded.
        offset: ``(B, T)`` position of a token in its branch.
        starts: for each image the first column of each of its branches.
        lasts: for each image the last one.
    """

    ids: Tensor
    branch: Tensor
    offset: Tensor
    starts: list[list[int]]
    lasts: list[list[int]]

    def mask(self, prefix: int) -> Tensor:
        """``(B, 1, T, prefix + T)`` bool, true where a token (row) may look at another (column)."""
        B, T = self.ids.shape
        tree = (self.branch[:, :, None] == self.branch[:, None, :]).tril()
        # The padding sees the prefix too: a row of a softmax in which nothing is allowed is not a number.
        return torch.cat([tree.new_ones(B, T, prefix), tree], 2)[:, None]


def pack(rows: Sequence[Sequence[Sequence[int]]], device: torch.device | str = "cpu") -> Packed:
    """Token ids of branches, per image, to one padded row per image."""
    T = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), T)
    ids, offset = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    branch = torch.full(shape, -1)
    starts: list[list[int]] = []
    lasts: list[list[int]] = []
    for b, row in enumerate(rows):
        column = 0
        starts.append([])
        lasts.append([])
        for k, tokens in enumerate(row):
            stop = column + len(tokens)
            ids[b, column:stop] = torch.tensor(tokens)
            branch[b, column:stop] = k
            offset[b, column:stop] = torch.arange(len(tokens))
            starts[-1].append(column)
            lasts[-1].append(stop - 1)
            column = stop
    return Packed(ids.to(device), branch.to(device), offset.to(device), starts, lasts)


def batches(lengths: Sequence[int], prefix: int, budget: int) -> list[range]:
    """Splits images, in order, into batches of at most ``budget`` tokens, prefixes included, but at least one image.

    ``lengths`` are the tokens of all branches of each image; a row is as long as the longest of its batch.
    """
    out: list[range] = []
    start, longest = 0, 0
    for b, length in enumerate(lengths):
        longest = max(longest, length)
        if b > start and (b + 1 - start) * (prefix + longest) > budget:
            out.append(range(start, b))
            start, longest = b, length
    return [*out, range(start, len(lengths))]


def rounds(lengths: Sequence[int], capacity: int) -> list[range]:
    """Splits an image's branches, in order, into rounds of at most ``capacity`` tokens, but at least one branch."""
    out: list[range] = []
    start, total = 0, 0
    for k, length in enumerate(lengths):
        if k > start and total + length > capacity:
            out.append(range(start, k))
            start, total = k, 0
        total += length
    return [*out, range(start, len(lengths))]
