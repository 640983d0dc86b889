"""Finds the attention heads of a judge that look where the words point, and writes them for `load_judge`.

    python examples/calibrate_judge.py
    python examples/calibrate_judge.py --judge Qwen/Qwen3-VL-8B-Instruct --device cuda --dtype bfloat16 \\
        --boxes boxes.jsonl --out cast_judge.json

Without ``--boxes`` the images are the miniature's scenes. A line of a boxes file is one image, its caption and what
some words of it point at, in pixels (left, top, right, bottom); paths are relative to the file:

    {"image": "1.png", "prompt": "a red mug left of a plate",
     "things": [{"words": ["red mug"], "boxes": [[10, 20, 90, 110]]}]}

Put the result beside the weights as ``cast_judge.json``, or give it as ``load_judge(..., evidence="cast_judge.json")``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from cast_rl.judges import EvidenceSettings, VLMJudge, load_judge
from cast_rl.judges.calibration import Known, Ranking, rank_heads, spans_of
from cast_rl.scene_graph import Atom


def scenes(count: int, seed: int, batch: int = 16) -> list[Known]:
    """The miniature's scenes with the regions of its objects; facts about the scene as a whole are left out."""
    from cast_rl.miniature.oracle import Oracle
    from cast_rl.miniature.render import render_graphs
    from cast_rl.miniature.vocabulary import sample_graphs

    graphs = sample_graphs(count, seed, held_out=False)
    images = render_graphs(graphs, seed)
    atoms = [[atom for atom in graph.atoms() if atom.spans] for graph in graphs]
    regions = [found[: len(row)] > 0 for found, row in zip(Oracle()(images, atoms).evidence, atoms, strict=True)]
    cuts = [slice(i, i + batch) for i in range(0, count, batch)]
    return [Known(images[cut], atoms[cut], regions[cut]) for cut in cuts]


def boxed(path: Path) -> list[Known]:
    """The images of a boxes file, one at a time.

    Raises:
        ValueError: a line that is not as it should be, with its number.
    """
    known = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            with Image.open(path.parent / entry["image"]) as file:
                image = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
            atoms, regions = [], []
            for thing in entry["things"]:
                spans = spans_of(entry["prompt"], thing["words"])
                atoms.append(Atom("object", f"Is there {' '.join(thing['words'])}?", "Yes", entry["prompt"], spans))
                region = torch.zeros(image.shape[1:], dtype=torch.bool)
                for left, top, right, bottom in thing["boxes"]:
                    region[round(top) : round(bottom), round(left) : round(right)] = True
                regions.append(region)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        if atoms:
            known.append(Known(image[None], [atoms], [torch.stack(regions)]))
    return known


def report(ranking: Ranking, shown: int) -> None:
    """Prints the best heads of a ranking."""
    print(f"\nquery={ranking.query}, chance {ranking.chance:.3f}")
    print(f"{'layer':>6s} {'head':>5s} {'inside':>8s} {'x chance':>9s} {'on image':>9s} {'together':>9s}")
    for (layer, head), together in zip(ranking.order[:shown], ranking.together, strict=False):
        inside, image = float(ranking.inside[layer, head]), float(ranking.image[layer, head])
        print(f"{layer:6d} {head:5d} {inside:8.3f} {inside / ranking.chance:9.2f} {image:9.3f} {together:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", default="miniature", help="miniature, a folder or a hub id")
    parser.add_argument("--boxes", type=Path, help="JSONL of images with boxes; the miniature's scenes by default")
    parser.add_argument("--scenes", type=int, default=128, help="how many scenes of the miniature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=16, help="heads that may be averaged")
    parser.add_argument("--relative", action="store_true", help="write relative=true; heads are ranked without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("cast_judge.json"))
    args = parser.parse_args()

    loaded = load_judge(args.judge, device=args.device, dtype=args.dtype, evidence=EvidenceSettings())
    if not isinstance(loaded, VLMJudge):
        parser.error(f"--judge {args.judge} has no attention to calibrate")
    known = boxed(args.boxes) if args.boxes else scenes(args.scenes, args.seed)

    def judge(query: str) -> VLMJudge:
        settings = EvidenceSettings(query=query)
        return VLMJudge(loaded.family, loaded.tokenizer, loaded.images, evidence=settings)

    rankings = rank_heads(judge, tqdm(known, desc="images"), args.most)
    for ranking in rankings:
        report(ranking, args.most)
    best = rankings[0].settings
    settings = EvidenceSettings(heads=best.heads, query=best.query, relative=args.relative)
    settings.save(args.out)
    together = max(rankings[0].together)
    print(f"\n{args.out}: {len(settings.heads)} heads, query={settings.query}, {together:.3f} inside, "
          f"{together / rankings[0].chance:.2f} x chance")  # fmt: skip


if __name__ == "__main__":
    main()
