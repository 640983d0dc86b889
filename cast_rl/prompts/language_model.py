"""Reading plain text prompts with a local instruction model, whose answer is checked before it is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from cast_rl.prompts.base import Prompt, PromptSet
from cast_rl.prompts.files import graph_from_json
from cast_rl.prompts.jsonl import Problem, TextsError
from cast_rl.prompts.schema import check_schema
from cast_rl.prompts.spans import locate
from cast_rl.scene_graph import Atom, SceneGraph
from cast_rl.wording import plural

Messages = list[dict[str, str]]

_INSTRUCTION = """\
Turn the description of an image into a scene graph. Answer with JSON only:
{"entities": [{"noun": "cat", "count": 2, "attributes": ["black"]}, {"noun": "table", "count": 1, "attributes": []}],
 "relations": [{"subject": 0, "predicate": "under", "object": 1}]}
is the answer to "two black cats under a table". Nouns are in the singular; count is null where no number is given;
subject and object are positions in the list of entities. Use only words of the description, as they stand there."""


class LanguageModelParser:
    """Texts to prompts with atoms; a prompt's words stay as they are.

    Every answer must be JSON of a possible scene graph, each fact of which is found in the text. One that is not is
    asked for again, with what was wrong.

    Args:
        generate: from the messages of a chat to the answer.
        attempts: how often a text is asked about.
    """

    def __init__(self, generate: Callable[[Messages], str], attempts: int = 3) -> None:
        self.generate, self.attempts = generate, attempts

    @classmethod
    def load(
        cls, path_or_id: str, *, device: str = "cpu", dtype: str = "auto", max_new_tokens: int = 512
    ) -> LanguageModelParser:
        """With an instruction model from a folder or the hub, decoded greedily."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=False)
        if tokenizer.chat_template is None:
            raise ValueError(f"{path_or_id} has no chat template: the parser needs an instruction model")
        model = AutoModelForCausalLM.from_pretrained(
            path_or_id, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        model = model.to(device).eval()

        def generate(messages: Messages) -> str:
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            ).to(device)
            output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

        return cls(generate)

    def __call__(self, texts: Sequence[str]) -> PromptSet:
        """A prompt for every text, in their order.

        Raises:
            TextsError: lists every text that no attempt gave a valid graph of, with what was wrong last.
        """
        prompts, problems = [], []
        for i, text in enumerate(texts):
            try:
                prompts.append(self._parse(text))
            except Problem as problem:
                problems.append((i, problem))
        if problems:
            raise TextsError(texts, problems)
        return PromptSet(prompts)

    def _parse(self, text: str) -> Prompt:
        messages = [{"role": "user", "content": f"{_INSTRUCTION}\n\nDescription: {text}"}]
        for left in reversed(range(self.attempts)):
            answer = self.generate(messages)
            try:
                return _believe(answer, text)
            except Problem as problem:
                if not left:
                    raise
                complaint = f"That is not right: {problem}. Answer with the corrected JSON only."
                messages = [
                    *messages,
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": complaint},
                ]
        raise ValueError(f"attempts must be at least 1, got {self.attempts}")


def _believe(answer: str, text: str) -> Prompt:
    """The prompt of a model's answer, if it is valid and the text states every fact of it.

    Raises:
        Problem: what is wrong.
    """
    start = answer.find("{")
    if start < 0:
        raise Problem("", "the answer has no JSON in it")
    try:
        value, _ = json.JSONDecoder().raw_decode(answer, start)
        check_schema({"prompt": text, "graph": value}, "prompts")
    except Problem:
        raise
    except (ValueError, RecursionError) as error:
        raise Problem("", f"the answer is not JSON that can be read: {error}") from error
    graph = graph_from_json(value, "graph")
    return Prompt(text, tuple(_place(atom, text, graph) for atom in graph.atoms()), graph)


def _place(atom: Atom, text: str, graph: SceneGraph) -> Atom:
    """The atom with its words in ``text`` instead of the graph's own rendering."""
    if atom.skill == "scene":
        return replace(atom, prompt=text)
    e = atom.entities[0]
    if atom.qualified and atom.skill in ("object", "attribute"):
        # Of two things of one noun, the one whose attributes the text says.
        things = " ".join((*e.attributes, plural(e.noun)))
        found = locate(text, "object", f"Are there any {things} in the image?", "Yes")
        if found and atom.skill == "attribute":
            (thing,) = found.spans
            word = re.compile(rf"(?<!\w){re.escape(atom.value)}(?!\w)", re.IGNORECASE).search(text, *thing)
            found = None if word is None else replace(found, spans=(word.span(), thing))
    else:
        found = locate(text, atom.skill, atom.question, atom.answer)
    if found is None:
        words = [" ".join((*e.attributes, e.noun)) for e in atom.entities]
        raise Problem(
            atom.skill, f"the text does not say {atom.value or words[0]!r} of {' and '.join(map(repr, words))}"
        )
    return replace(atom, prompt=text, spans=found.spans)
