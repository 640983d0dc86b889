"""Prompts with the atoms that verify them: sampled from a vocabulary, read from files, or parsed from text."""

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.geneval2 import read_geneval2
from cast_rl.prompts.jsonl import PromptFileError

__all__ = ["Prompt", "PromptFileError", "PromptSet", "read_geneval2"]
