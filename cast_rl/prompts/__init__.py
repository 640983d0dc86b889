"""Prompts with the atoms that verify them: sampled from a vocabulary, read from files, or parsed from text."""

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.files import read_prompts, write_prompts
from cast_rl.prompts.geneval2 import read_geneval2
from cast_rl.prompts.jsonl import PromptFileError, TextsError
from cast_rl.prompts.language_model import LanguageModelParser
from cast_rl.prompts.load import load_prompts
from cast_rl.prompts.parse import ParseError, parse
from cast_rl.prompts.vocabulary import Vocabulary, load_vocabulary

__all__ = [
    "LanguageModelParser",
    "ParseError",
    "Prompt",
    "PromptFileError",
    "PromptSet",
    "TextsError",
    "Vocabulary",
    "load_prompts",
    "load_vocabulary",
    "parse",
    "read_geneval2",
    "read_prompts",
    "write_prompts",
]
