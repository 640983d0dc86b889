"""``python -m cast_rl.prompts sample|check|show``: make a set of prompts, check a file, look at a prompt."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.draw import tree
from cast_rl.prompts.files import write_prompts
from cast_rl.prompts.geneval2 import unlocated
from cast_rl.prompts.load import read_file
from cast_rl.prompts.parse import parse
from cast_rl.prompts.picture import save_picture
from cast_rl.prompts.vocabulary import load_vocabulary


def sample(args: argparse.Namespace) -> None:
    prompts = PromptSet.sample(
        args.n,
        seed=args.seed,
        atomicity=args.atomicity,
        skills=args.skills,
        vocabulary=args.vocabulary,
        held_out=args.held_out,
    )
    write_prompts(args.file, prompts)
    print(summary(prompts))


def check(args: argparse.Namespace) -> None:
    prompts = read_file(args.file)
    print(summary(prompts))
    for i, atom in unlocated(prompts):
        print(f"prompt {i}: no words found for {atom.question!r} in {prompts[i].text!r}")
    for text, times in Counter(prompts.texts).items():
        if times > 1:
            print(f"{times} times: {text!r}")


def show(args: argparse.Namespace) -> None:
    if os.path.isfile(args.prompt):  # Path.is_file fails on a text that is too long for a name
        prompts = read_file(args.prompt)
        if not 0 <= args.index < len(prompts):
            raise ValueError(f"--index {args.index}: {args.prompt} has prompts 0 to {len(prompts) - 1}")
        prompt = prompts[args.index]
    else:
        prompt = Prompt.from_graph(parse(args.prompt, load_vocabulary(args.vocabulary)))
    print(tree(prompt))
    if args.picture:
        save_picture(prompt, args.picture)


def summary(prompts: PromptSet) -> str:
    """Numbers of prompts, of atoms of each skill, and of prompts of each atomicity."""
    atoms = [atom for prompt in prompts for atom in prompt.atoms]
    skills = ", ".join(f"{skill} {n}" for skill, n in Counter(atom.skill for atom in atoms).most_common())
    sizes = Counter(prompt.atomicity for prompt in prompts)
    worded = sum(bool(atom.spans) or atom.skill == "scene" for atom in atoms)
    return (
        f"{len(prompts)} prompts, {len(atoms)} atoms ({skills}); words known of {worded}\n"
        f"atomicity: {', '.join(f'{size}: {sizes[size]}' for size in sorted(sizes))}"
    )


def numbers(text: str) -> list[int]:
    """``"3-10"``, ``"5"`` or ``"3,5,7"``."""
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            return list(range(first, last + 1))
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none of '5', '3-10' and '3,5,7'") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cast_rl.prompts", description=__doc__)
    commands = parser.add_subparsers(required=True)
    words = {"default": "common", "help": "common, miniature, or a YAML file"}

    command = commands.add_parser("sample", help="make a set of prompts")
    command.set_defaults(run=sample)
    command.add_argument("file", help="JSON lines to write")
    command.add_argument("-n", type=int, default=1000, help="how many")
    command.add_argument(
        "--atomicity", type=numbers, default=numbers("3-10"), help="facts per prompt: 5, 3-10 or 3,5,7"
    )
    command.add_argument(
        "--skills", type=lambda text: text.split(","), help="such as object,attribute,count; all if left out"
    )
    command.add_argument("--vocabulary", **words)
    command.add_argument("--seed", type=int, default=0)
    split = command.add_mutually_exclusive_group()
    split.add_argument(
        "--held-out", dest="held_out", action="store_true", default=None, help="only with held-out pairs"
    )
    split.add_argument("--training", dest="held_out", action="store_false", help="only without held-out pairs")

    command = commands.add_parser("check", help="read a file, list what is wrong with it, and count what it holds")
    command.set_defaults(run=check)
    command.add_argument("file", help="JSON lines, GenEval 2's or ours")

    command = commands.add_parser("show", help="print or draw a prompt with its atoms and their words")
    command.set_defaults(run=show)
    command.add_argument("prompt", help="a file of JSON lines, or a text such as 'two red cats left of a dog'")
    command.add_argument("--index", type=int, default=0, help="which prompt of the file, from 0")
    command.add_argument("--vocabulary", **words)
    command.add_argument("--picture", help="a file to draw into: .svg, .png or .pdf")

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
