"""One entry for every source of prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from cast_rl.prompts.base import PromptSet
from cast_rl.prompts.files import read_prompts
from cast_rl.prompts.geneval2 import read_geneval2


def load_prompts(
    source: str | PathLike,
    n: int | None = None,
    *,
    seed: int = 0,
    held_out: bool | None = None,
    parser: Callable[[Sequence[str]], PromptSet] | None = None,
    **sampling,
) -> PromptSet:
    """Prompts with their atoms, sampled or read.

    Args:
        source: ``"miniature"`` (its own mixture of prompts); ``"common"`` or a vocabulary in YAML, to sample from; a
            file of JSON lines, GenEval 2's or this library's own; or a text file with a prompt per line.
        n: how many prompts: sampled, or drawn from a file without replacement, in its order. None: all of a file.
        seed: of the draws.
        held_out: for sampled prompts: with pairs of words that those of ``held_out=False`` never have.
        parser: for a text file: makes a `PromptSet` of its lines, as `LanguageModelParser` does.
        sampling: further arguments of `PromptSet.sample`.

    Raises:
        ValueError: says what is missing or wrong; for a file, every bad line.
        FileNotFoundError: there is no such file.
    """
    path = Path(source)
    if source in ("miniature", "common") or path.suffix in (".yaml", ".yml"):
        if n is None:
            raise ValueError(f"prompts are sampled from {source}: say how many with n")
        if source == "miniature" and not sampling and held_out is not None:
            from cast_rl.miniature import miniature_prompts  # the miniature builds on this package

            return miniature_prompts(n, seed, held_out=held_out)
        return PromptSet.sample(n, seed=seed, vocabulary=source, held_out=held_out, **sampling)
    if sampling or held_out is not None:
        names = ", ".join([*sampling, *(["held_out"] if held_out is not None else [])])
        raise ValueError(f"{source} is a file whose prompts are fixed; {names} is only for prompts that are sampled")
    if path.suffix == ".txt":
        if parser is None:
            raise ValueError(f"{source} holds plain texts: pass a parser such as LanguageModelParser.load(...)")
        prompts = parser([line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()])
    else:
        prompts = read_file(path)
    if n is None or n == len(prompts):
        return prompts
    if n > len(prompts):
        raise ValueError(f"{source} has {len(prompts)} prompts, fewer than the {n} asked for")
    return PromptSet(prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), n)))


def read_file(path: str | PathLike) -> PromptSet:
    """The prompts of a file of JSON lines, in GenEval 2's format if its first line has a ``vqa_list``, else in ours."""
    with Path(path).open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return read_geneval2(path) if b'"vqa_list"' in first else read_prompts(path)
