"""How well a judge does on the miniature, measured against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

from cast_rl.judges.base import Judge
from cast_rl.miniature.oracle import Oracle
from cast_rl.scene_graph import SKILLS, SceneGraph

POINTED = ("object", "attribute", "count")  # skills whose evidence is a thing that lies somewhere
LEAST_SHARE = 0.125  # of a map's cell that the region must cover for the cell to show it


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: how often a true fact ``(n,)`` scores higher than a false one, ties counting half.

    NaN if the labels ``(n,)`` bool are all alike.
    """
    positive = int(labels.sum())
    negative = len(labels) - positive
    if not (positive and negative):
        return float("nan")
    ranks = torch.from_numpy(rankdata(scores.double().numpy()))
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def pointing(evidence: Tensor, region: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per map of ``evidence (n, h, w)``: its mass on the region, the region's share of the image, and 1 if it hits.

    ``region (n, h, w)`` in [0, 1] is the share of each cell that shows the fact. The mass is 0 for an empty map. A map
    hits if at least :data:`LEAST_SHARE` of the cell with most evidence shows it. All ``(n,)``.
    """
    shown, there = evidence.flatten(1), region.flatten(1)
    mass = (shown * there).sum(1) / shown.sum(1).clamp(min=1e-12)
    top = there.gather(1, shown.argmax(1, keepdim=True))[:, 0]
    return mass, there.mean(1), ((top >= LEAST_SHARE) & (shown.sum(1) > 0)).float()


def judge_figures(
    judge: Judge, graphs: Sequence[SceneGraph], images: Tensor, batch: int = 100
) -> dict[str, float | dict[str, float]]:
    """Figures over N prompts with one image each, ``images (N, 3, S, S)`` in [0, 1].

    - ``auc``: per skill, over the facts that have a score, against whether the oracle says they hold;
    - ``correlation``: Pearson's, of the Soft-TIFA AM (the mean score of an image's facts) with the oracle's;
    - ``unjudged``: share of the facts without a score;
    - ``mass``: per skill of :data:`POINTED`, mean mass of the evidence on the oracle's region over the mean that even
      maps put there, over the facts that have a region; and ``hits``: share of the object facts that hold whose
      map's maximum lies on the region. Only if the judge gives evidence.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {skill: [] for skill in SKILLS}
    looks: dict[str, list[Tensor]] = {skill: [] for skill in POINTED}
    means, judged, facts = [], 0, 0
    for at in range(0, len(images), batch):
        atoms = [graph.atoms() for graph in graphs[at : at + batch]]
        said, true = (j(images[at : at + batch], atoms) for j in (judge, Oracle()))
        scores, known = said.scores.cpu(), said.mask.cpu()
        facts, judged = facts + int(true.mask.sum()), judged + int(known.sum())
        means += [(scores[b, k].mean(), true.scores[b, k].mean()) for b, k in enumerate(known) if k.any()]
        skill_of = torch.full(known.shape, -1)
        for b, row in enumerate(atoms):
            skill_of[b, : len(row)] = torch.tensor([SKILLS.index(atom.skill) for atom in row])
        for s, skill in enumerate(SKILLS):
            of = known & (skill_of == s)
            parts[skill].append((scores[of], true.scores[of] > 0.5))
            if said.evidence is not None and skill in POINTED:
                of &= true.evidence.flatten(2).any(2)
                shown = said.evidence.cpu()[of]
                region = F.adaptive_avg_pool2d((true.evidence[of] > 0).float(), shown.shape[-2:])
                looks[skill].append(torch.stack(pointing(shown, region)))
    ranked = {skill: [torch.cat(column) for column in zip(*pairs, strict=True)] for skill, pairs in parts.items()}
    figures: dict[str, float | dict[str, float]] = {
        "auc": {skill: round(roc_auc(*both), 4) for skill, both in ranked.items() if len(both[0])},
        "correlation": round(float(torch.tensor(means).T.corrcoef()[0, 1]), 4),
        "unjudged": round(1 - judged / max(facts, 1), 4),
    }
    if any(looks.values()):
        mean = {skill: torch.cat(columns, 1).mean(1).tolist() for skill, columns in looks.items()}
        figures["mass"] = {skill: round(mass / chance, 2) for skill, (mass, chance, _) in mean.items()}
        figures["hits"] = round(mean["object"][2], 4)
    return figures
