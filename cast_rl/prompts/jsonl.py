"""Reading files of JSON lines, or of texts, so that every bad line is reported at once, with its number and field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MAX_LINE = 1_000_000  # bytes; a prompt with a hundred atoms takes about 20,000
_SHOWN = 200  # characters of a problem that are reported


class Problem(ValueError):
    """What is wrong with one field (``""``: the line as a whole)."""

    def __init__(self, field: str, what: str) -> None:
        self.field = field
        self.what = what if len(what) <= _SHOWN else f"{what[:_SHOWN]}..."
        super().__init__(f"{field}: {self.what}" if field else self.what)


class PromptFileError(ValueError):
    """A file has bad lines.

    Args:
        path: the file.
        problems: line number (from 1) and problem, of every bad line.
    """

    def __init__(self, path: str | PathLike, problems: list[tuple[int, Problem]]) -> None:
        self.path, self.problems = path, problems
        lines = "\n".join(f"  line {number}: {problem}" for number, problem in problems)
        many = f"{len(problems)} bad line{'s' if len(problems) > 1 else ''}"
        super().__init__(f"{path} has {many}; mend or remove them:\n{lines}")


class TextsError(ValueError):
    """A parser could not make prompts of some texts.

    Args:
        texts: all that were to be parsed.
        problems: position (from 0) and problem, of every text that could not be.
    """

    def __init__(self, texts: Sequence[str], problems: list[tuple[int, Problem]]) -> None:
        self.problems = problems
        lines = "\n".join(f"  text {i + 1}, {texts[i]!r}: {problem}" for i, problem in problems)
        super().__init__(f"{len(problems)} of {len(texts)} texts could not be parsed:\n{lines}")


def read_lines(path: str | PathLike, convert: Callable[[Any], T]) -> list[T]:
    """``convert`` of the JSON value of every line that is not blank.

    Args:
        path: a file of JSON lines in UTF-8; a byte order mark is allowed.
        convert: raises `Problem` for a value that it does not take.

    Raises:
        PromptFileError: some lines are bad.
        ValueError: the file has no line.
        OSError: it cannot be read.
    """
    return [value for _, value in _read(path, lambda line: convert(_parse(line)))]


def read_texts(path: str | PathLike) -> list[tuple[int, str]]:
    """Number (from 1) and text of every line that is not blank, without blanks around it; errors as in `read_lines`."""
    texts = [(number, text.strip()) for number, text in _read(path, _decode)]
    texts = [(number, text) for number, text in texts if text]  # a no-break space is blank, too, once decoded
    if not texts:
        raise ValueError(f"{path} has no prompt in it")
    return texts


def _read(path: str | PathLike, convert: Callable[[bytes], T]) -> list[tuple[int, T]]:
    values, problems = [], []
    for number, line in _lines(Path(path)):
        try:
            values.append((number, convert(line)))
        except Problem as problem:
            problems.append((number, problem))
        except RecursionError:  # the JSON was read, but what works on its value runs out of stack
            problems.append((number, Problem("", "too deeply nested")))
    if problems:
        raise PromptFileError(path, problems)
    if not values:
        raise ValueError(f"{path} has no prompt in it")
    return values


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the lines that are not blank. Only a newline ends a line: JSON text may hold others."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line


def _decode(line: bytes) -> str:
    if len(line) > MAX_LINE:
        raise Problem("", f"{len(line):,} bytes long; at most {MAX_LINE:,} are read")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Problem("", f"not UTF-8 at byte {error.start}") from error


def _parse(line: bytes) -> Any:
    text = _decode(line)
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
        # A lone surrogate is valid in JSON, but not in text that is to be encoded again.
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Problem("", "has half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        raise Problem("", f"not JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise Problem("", "too deeply nested") from error
    except Problem:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise Problem("", f"not JSON that can be read: {error}") from error
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Problem(twice, "is given twice")
    return value


def _no_constant(name: str) -> Any:
    raise Problem("", f"{name} is not a value of JSON")
