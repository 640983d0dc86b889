"""The JSON schemas that ship with the package, and what is wrong with a value by one of them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from cast_rl.prompts.jsonl import Problem


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(files("cast_rl.prompts").joinpath(f"{name}.schema.json").read_text("utf-8")))


def check_schema(value: Any, name: str) -> None:
    """Raises the most telling `Problem` of a JSON value by ``<name>.schema.json``, if there is one."""
    error = best_match(_validator(name).iter_errors(value))
    if error is not None:
        raise Problem(error.json_path.removeprefix("$").removeprefix("."), error.message)
