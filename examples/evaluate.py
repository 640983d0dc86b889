"""Score a model, or a folder of images, on GenEval 2 or any other file of prompts.

- ``python examples/evaluate.py --benchmark geneval2_data.jsonl --images map.json --judge DIR`` scores images that are
  there; ``map.json`` maps each prompt to the path of its image, as GenEval 2's own script takes it;
- ``python examples/evaluate.py --benchmark geneval2_data.jsonl --model DIR_OR_ID --lora DIR --judge DIR`` makes them
  first; started again with the same settings, it goes on where it was killed;
- ``--hard-case runs/evaluate/base/hard_case.json`` reports on the prompts that were hardest for another model.

The folder ``--out`` gets ``report.json``, ``scores.json`` (per prompt, in its atoms' order), ``hard_case.json`` and,
with ``--model``, ``images/`` and ``map.json``. Soft-TIFA AM is the mean of a prompt's atom scores, GM their geometric
mean; both are averaged over prompts.
"""

import argparse
import json
import sys
from pathlib import Path

from cast_rl.backbones import load_backbone
from cast_rl.benchmark import hardest, report, table
from cast_rl.image_files import generate_images, judge_images, read_image_map
from cast_rl.judges import load_judge
from cast_rl.prompts import PromptSet, load_prompts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--benchmark", required=True, help="JSON lines: GenEval 2's, or as `cast_rl.prompts` writes them"
    )
    parser.add_argument("--prompts", type=int, help="only so many of the prompts, drawn with --seed")
    parser.add_argument("--out", type=Path, default=Path("runs/evaluate"), help="folder of the results")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--images", type=Path, help="JSON that maps each prompt to the path of its image")
    source.add_argument("--model", help="a pipeline in diffusers' format, a hub id, or 'miniature'")
    parser.add_argument("--lora", type=Path, help="a folder as `save_lora` writes it, on top of --model")
    parser.add_argument("--judge", required=True, help="a vision-language model: a folder or a hub id; 'oracle'")
    parser.add_argument("--answers", choices=["robust", "official"], help="how the judge's answers are read")
    parser.add_argument("--judge-dtype", help="such as bfloat16")
    parser.add_argument("--hard-case", type=Path, help="hard_case.json of another run; else this run's hardest prompts")
    parser.add_argument("--hard-share", type=float, default=0.25, help="how many of the prompts are the hardest")
    parser.add_argument("--batch-size", type=int, default=8, help="images at a time")
    parser.add_argument("--device", help="where model and judge compute; the CPU if left out")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="prompt i starts from the noise of seed + i")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance", type=float, help="the pipeline's own guidance argument")
    parser.add_argument("--negative-prompt", default=" ")
    args = parser.parse_args()
    if args.lora and not args.model:
        parser.error("--lora needs --model")
    if args.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {args.batch_size}")
    return args


def generate(args: argparse.Namespace, prompts: PromptSet) -> dict[str, Path]:
    """Make the images and list them in ``map.json``."""
    backbone = load_backbone(args.model, dtype=args.dtype, device=args.device or "cpu", guidance=args.guidance)
    if args.lora:
        backbone.load_lora(args.lora)
    names = {"model": args.model, "lora": args.lora and str(args.lora), "dtype": args.dtype, "guidance": args.guidance}
    paths = generate_images(
        backbone,
        prompts.texts,
        args.out / "images",
        height=args.height,
        width=args.width,
        steps=args.steps,
        seed=args.seed,
        negative=args.negative_prompt,
        batch_size=args.batch_size,
        settings=names,
    )
    write(args.out / "map.json", {text: f"images/{path.name}" for text, path in paths.items()})
    return paths


def write(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    args = arguments()
    prompts = load_prompts(args.benchmark, args.prompts, seed=args.seed)
    if len(set(prompts.texts)) < len(prompts):
        raise ValueError(f"{args.benchmark} has a prompt twice; python -m cast_rl.prompts check names it")
    hard_case = json.loads(args.hard_case.read_text(encoding="utf-8")) if args.hard_case else None
    args.out.mkdir(parents=True, exist_ok=True)
    paths = generate(args, prompts) if args.model else read_image_map(args.images, prompts.texts)
    options = {"device": args.device, "dtype": args.judge_dtype, "answers": args.answers}
    judge = load_judge(args.judge, **{name: value for name, value in options.items() if value is not None})
    scores, mask = judge_images(judge, prompts, paths, args.batch_size)
    kept = [
        [score if judged else None for score, judged, _ in zip(*row, strict=False)]
        for row in zip(scores.tolist(), mask.tolist(), (prompt.atoms for prompt in prompts), strict=True)
    ]
    write(args.out / "scores.json", kept)
    if hard_case is None:
        hard_case = hardest(prompts, scores, mask, args.hard_share)
        write(args.out / "hard_case.json", hard_case)
    figures = report(prompts, scores, mask, hard_case)
    write(args.out / "report.json", figures)
    print(table(figures))
    print(f"figures, scores and the hard case: {args.out}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
