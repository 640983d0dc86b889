"""One entry for every source of prompts."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from cast_rl.prompts.base import PromptSet
from cast_rl.prompts.files import read_prompts
from cast_rl.prompts.geneval2 import read_geneval2
from cast_rl.prompts.jsonl import PromptFileError, TextsError, read_texts

HELD_OUT_PERCENT = 20


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
        held_out: whether prompts are to evaluate with (True), to train on (False), or whatever there is (None). Sampled
            prompts to evaluate with have pairs of words that those to train on never have; of a file's prompts about
            :data:`HELD_OUT_PERCENT` percent are held out, by a hash of their texts, whatever else is in the file.
        parser: for a text file: makes a `PromptSet` of its lines, as `LanguageModelParser` does. Of a `TextsError`
            that it raises, the lines of the file are named.
        sampling: further arguments of `PromptSet.sample`.

    Raises:
        ValueError: says what is missing or wrong; for a file, every bad line (`PromptFileError`).
        FileNotFoundError: there is no such file.
    """
    path = Path(source)
    if source in ("miniature", "common") or path.suffix in (".yaml", ".yml"):
        if n is None:
            raise ValueError(f"prompts are sampled from {source}: say how many with n")
        if source == "miniature" and not sampling:
            from cast_rl.miniature import miniature_prompts  # the miniature builds on this package

            return miniature_prompts(n, seed, held_out=held_out)
        return PromptSet.sample(n, seed=seed, vocabulary=source, held_out=held_out, **sampling)
    if sampling:
        raise ValueError(f"{source} is a file: {', '.join(sampling)} is only for prompts that are sampled")
    if path.suffix == ".txt":
        if parser is None:
            raise ValueError(f"{source} holds plain texts: pass a parser such as LanguageModelParser.load(...)")
        prompts = _parse_texts(path, parser)
    else:
        prompts = read_file(path)
    if held_out is not None:
        chosen = [p for p in prompts if _is_held_out(p.text) == held_out]
        if not chosen:
            side = "held out" if held_out else "to train on"
            raise ValueError(f"none of the {len(prompts)} prompts of {source} is {side}; give it more prompts")
        prompts = PromptSet(chosen)
    if n is None or n == len(prompts):
        return prompts
    if n > len(prompts):
        kind = {True: "held-out prompts", False: "prompts to train on", None: "prompts"}[held_out]
        raise ValueError(f"{source} has {len(prompts)} {kind}, fewer than the {n} asked for")
    return PromptSet(prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), n)))


def _parse_texts(path: Path, parser: Callable[[Sequence[str]], PromptSet]) -> PromptSet:
    lines = read_texts(path)
    try:
        return parser([text for _, text in lines])
    except TextsError as error:
        raise PromptFileError(path, [(lines[i][0], problem) for i, problem in error.problems]) from error
    except ValueError as error:  # a parser that stops at the first text it does not take
        raise ValueError(f"{path}: {error}") from error


def _is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % 100 < HELD_OUT_PERCENT


def read_file(path: str | PathLike) -> PromptSet:
    """The prompts of a file of JSON lines, in GenEval 2's format if its first line has a ``vqa_list``, else in ours."""
    with Path(path).open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return read_geneval2(path) if b'"vqa_list"' in first else read_prompts(path)
