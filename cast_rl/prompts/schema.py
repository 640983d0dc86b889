"""The JSON schemas that ship with the package, and what is wrong with a value by one of them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

from cast_rl.prompts.jsonl import Problem

# To JSON Schema 3.0 is an integer; as a position it would be none to Python.
_Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)


@cache
def _validator(name: str) -> Draft202012Validator:
    return _Validator(json.loads(files("cast_rl.prompts").joinpath(f"{name}.schema.json").read_text("utf-8")))


def check_schema(value: Any, name: str) -> None:
    """Raises the most telling `Problem` of a JSON value by ``<name>.schema.json``, if there is one."""
    error = best_match(_validator(name).iter_errors(value))
    if error is not None:
        what = error.message
        if error.validator == "pattern":  # the schema says in words what the pattern does
            what = f"{error.instance!r} is not {error.schema['description']}"
        raise Problem(error.json_path.removeprefix("$").removeprefix("."), what)
