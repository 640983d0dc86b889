"""Compare finished runs of `train_cast.py` that differ in a setting, such as those of a sweep over seeds.

``python examples/train_cast.py -m 'window=[1,3],[0,5]' seed=0,1,2`` and then
``python examples/compare_runs.py runs/train_cast/<time> --by window`` print a table in Markdown: the mean gain on
held-out prompts of the runs of each value, with its standard error over runs; with one run, over its prompts where that
is known.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

MISSING = object()
FIGURES = {
    "atom_score": "mean atom score",
    "all_correct": "all-correct",
    "hard_atom_score": "atom score, hard third",
    "hard_all_correct": "all-correct, hard third",
}


def read_runs(folders: Sequence[Path], keys: Sequence[str]) -> dict[tuple[str, ...], list[dict[str, float]]]:
    """The gains of every finished run at or below the folders, under the values of its settings ``keys``."""
    runs: dict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
    for path in sorted({path.resolve() for folder in folders for path in folder.rglob("held_out.json")}):
        settings = path.parent / ".hydra" / "config.yaml"
        if not settings.is_file():
            sys.exit(f"{path.parent} has no .hydra/config.yaml that says how it was run; leave it out")
        config = OmegaConf.load(settings)
        if unknown := [key for key in keys if OmegaConf.select(config, key, default=MISSING) is MISSING]:
            sys.exit(f"{path.parent} has no setting {', '.join(unknown)}")
        runs[tuple(str(OmegaConf.select(config, key)) for key in keys)].append(json.loads(path.read_text())["gain"])
    return runs


def cell(gains: Sequence[dict[str, float]], name: str) -> str:
    """Mean and standard error of one figure; "-" where a run lacks it."""
    values = [gain.get(name, math.nan) for gain in gains]
    if any(map(math.isnan, values)):
        return "-"
    one = gains[0].get(f"{name}_se", math.nan)
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else one
    return f"{statistics.fmean(values):+.3f}" + ("" if math.isnan(error) else f" +- {error:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of runs or sweeps")
    parser.add_argument("--by", nargs="+", required=True, metavar="KEY", help="settings that differ, such as window")
    args = parser.parse_args()
    runs = read_runs(args.folders, args.by)
    if not runs:
        sys.exit(f"no finished run below {', '.join(map(str, args.folders))}: none has a held_out.json")
    print(f"| {' | '.join(args.by)} | runs | {' | '.join(FIGURES.values())} |")
    print("|---" * (len(args.by) + 1 + len(FIGURES)) + "|")
    for setting, gains in runs.items():
        print(f"| {' | '.join(setting)} | {len(gains)} | {' | '.join(cell(gains, name) for name in FIGURES)} |")


if __name__ == "__main__":
    main()
