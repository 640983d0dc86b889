"""Train the miniature's parts from scratch, or measure the shipped ones again.

- ``python examples/pretrain_miniature.py generator`` trains the generator; run it again to go on where it stopped.
- ``python examples/pretrain_miniature.py judge`` trains the judge, on samples of the shipped generator among others;
  again, run it again to go on.
- ``python examples/pretrain_miniature.py check`` measures the shipped weights and prints one JSON line.

Two processes of one thread each train faster on two cores than one process of two threads:
``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/pretrain_miniature.py generator``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

from cast_rl.backbones.single_frame import single_frame_vae
from cast_rl.judges import load_judge
from cast_rl.miniature import Oracle
from cast_rl.miniature.assemble import WEIGHTS
from cast_rl.miniature.judge_quality import judge_figures
from cast_rl.miniature.pretrain_codec import train_codec
from cast_rl.miniature.pretrain_generator import train_generator
from cast_rl.miniature.pretrain_judge import train_judge
from cast_rl.miniature.quality import fairness, generate, measure
from cast_rl.miniature.vocabulary import sample_graphs
from cast_rl.pictures import atoms_of_images
from cast_rl.prompts import PromptSet


def join_group() -> None:
    """Joins the other processes if ``torchrun`` started this one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")


def train(args: argparse.Namespace) -> None:
    """Autoencoder, then text encoder and transformer; the result is a pipeline folder in half precision."""
    join_group()
    vae = train_codec(args.folder, steps=args.codec_steps)
    pipe = train_generator(vae, args.folder, steps=args.steps)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    pipe.to(torch.float16).save_pretrained(args.output)
    print(f"wrote {args.output}; measure it with: python examples/pretrain_miniature.py check --weights {args.output}")


def teach(args: argparse.Namespace) -> None:
    """Scenes and samples, then the judge; the result is a model folder in half precision."""
    join_group()
    train_judge(args.generator, args.folder, args.output, steps=args.steps, sight_steps=args.sight_steps)
    if not dist.is_initialized() or dist.get_rank() == 0:
        measure = f"python examples/pretrain_miniature.py check --judge {args.output}"
        print(f"wrote {args.output}; measure it with: {measure}")


def check(args: argparse.Namespace) -> None:
    """Print what the docs claim of the generator and the judge as one JSON line."""
    start = time.monotonic()
    pipe = DiffusionPipeline.from_pretrained(args.weights, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(desc="generate", leave=False)
    single_frame_vae(pipe.vae)
    graphs = sample_graphs(args.prompts, seed=args.seed, held_out=True)
    images = generate(pipe, [g.render()[0] for g in graphs], seed=args.seed)
    report = measure(graphs, images)
    judge = Oracle() if args.judge == "none" else load_judge(args.judge)
    if args.picture:
        shown = PromptSet.from_graphs(graphs[:4])
        atoms_of_images(shown, images[:4], judge(images[:4], [p.atoms for p in shown]), args.picture)
    if args.judge != "none":
        report["judge"] = judge_figures(judge, graphs, images)
    if not args.quick:
        report |= fairness(pipe, graphs, args.seed, report["all_correct"])
    print(json.dumps(report | {"seconds": round(time.monotonic() - start, 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="generator | judge | check")
    a = commands.add_parser("generator", help="train the generator from scratch, or go on where it stopped")
    a.add_argument("--folder", type=Path, default=Path("runs/miniature"), help="checkpoints and training scenes")
    a.add_argument("--output", type=Path, default=WEIGHTS / "generator", help="where the pipeline is written")
    a.add_argument("--codec-steps", type=int, default=1100)
    a.add_argument("--steps", type=int, default=13_000)
    a.set_defaults(run=train)
    c = commands.add_parser("judge", help="train the judge from scratch, or go on where it stopped")
    c.add_argument("--generator", type=Path, default=WEIGHTS / "generator", help="whose samples it learns from")
    c.add_argument("--folder", type=Path, default=Path("runs/miniature"), help="checkpoints and training images")
    c.add_argument("--output", type=Path, default=WEIGHTS / "judge", help="where the model is written")
    c.add_argument("--sight-steps", type=int, default=1_000, help="of the vision tower alone, which come first")
    c.add_argument("--steps", type=int, default=3_000)
    c.set_defaults(run=teach)
    b = commands.add_parser("check", help="measure generator and judge on held-out prompts with the oracle")
    b.add_argument("--weights", type=Path, default=WEIGHTS / "generator")
    b.add_argument("--prompts", type=int, default=1000)
    b.add_argument("--seed", type=int, default=7_000_000, help="of the prompts and of the noise")
    b.add_argument("--quick", action="store_true", help="leave out the fairness measurements")
    b.add_argument("--judge", default="miniature", help="name or folder of the judge to measure, or none")
    b.add_argument("--picture", type=Path, help="write a PNG of four images with their atoms as the judge sees them")
    b.set_defaults(run=check)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
