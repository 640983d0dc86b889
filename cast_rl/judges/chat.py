"""The texts that a vision-language model is shown, cut where the image ends.

All questions about an image, and the caption, share everything up to the end of the image: the *prefix*. What follows
is a *branch*. The marker that ends the image is a special token, which no other token reaches across, so that the
tokens of prefix and branch, joined, are those of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from cast_rl.scene_graph import Span

QUESTION = "{} Answer in one word."  # GenEval 2's wording
CAPTION_REQUEST = "Describe this image."


@dataclass(frozen=True)
class Branch:
    """One continuation of the prefix.

    Args:
        ids: token ids.
        caption_start: index of the first token of a teacher-forced caption; ``len(ids)`` if there is none.
        offsets: for each token of the caption, the characters ``[start, end)`` of it that the token covers.
    """

    ids: tuple[int, ...]
    caption_start: int
    offsets: tuple[Span, ...] = ()


class Chat:
    """Renders questions and captions with the tokenizer's own chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template that knows images.
        image_token_id, vision_end_token_id: from the model's configuration.

    Raises:
        ValueError: the tokenizer has no chat template, is not a fast one, or its template shows no image.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_token_id: int, vision_end_token_id: int) -> None:
        if not tokenizer.is_fast:
            raise ValueError("the judge needs a fast tokenizer, whose tokens know the characters they stand for")
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; save it with one (chat_template.jinja)")
        self.tokenizer, self.image_token_id = tokenizer, image_token_id
        self._image = tokenizer.convert_ids_to_tokens(image_token_id)
        self._end = tokenizer.convert_ids_to_tokens(vision_end_token_id)
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        text = self._render("")
        if text.count(self._image) != 1 or self._end not in text.partition(self._image)[2]:
            raise ValueError(
                f"the chat template must show an image as one {self._image} before {self._end}; it renders {text!r}"
            )
        # The same few texts come back for every image of a group and in every epoch.
        self.question = lru_cache(16384)(self._question)
        self.caption = lru_cache(4096)(self._caption)

    def prefix(self, image_tokens: int) -> tuple[list[int], slice]:
        """Token ids up to the end of an image of ``image_tokens`` tokens, and where among them the image lies."""
        head = self._render("").partition(self._end)[0] + self._end
        before, _, after = head.partition(self._image)
        first, last = (self.tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        ids = [*first, *[self.image_token_id] * image_tokens, *last]
        return ids, slice(len(first), len(first) + image_tokens)

    def _question(self, question: str) -> Branch:
        """The branch that asks ``question``; the answer is what the model makes of its last token."""
        self._check(question, "question")
        text = self._render(QUESTION.format(question)).partition(self._end)[2]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Branch(tuple(ids), len(ids))

    def _caption(self, prompt: str) -> Branch:
        """The branch in which the model says ``prompt`` when asked to describe the image.

        Raises:
            ValueError: also if the first word of the caption shares a token with what precedes it.
        """
        self._check(prompt, "prompt")
        request = self._render(CAPTION_REQUEST).partition(self._end)[2]
        encoded = self.tokenizer(request + prompt, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(start - len(request), end - len(request)) for start, end in encoded["offset_mapping"]]
        first = next((i for i, (_, end) in enumerate(offsets) if end > 0), len(offsets))
        return Branch(tuple(encoded["input_ids"]), first, tuple(offsets[first:]))

    def _render(self, user: str) -> str:
        content = [{"type": "image", "image": ""}, {"type": "text", "text": user}]
        messages = [{"role": "user", "content": content}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _check(self, text: str, what: str) -> None:
        found = sorted(token for token in self._special if token in text)
        if found:
            raise ValueError(
                f"the {what} {text!r} contains the special token {found[0]!r} of the judge's tokenizer, which would be "
                "read as a command, not as words; take it out of the prompt"
            )


def tokens_of(branch: Branch, spans: Sequence[Span], query: str) -> list[int]:
    """Positions in a caption branch that stand for the words in ``spans``, ascending.

    ``self``: the tokens of the words; ``predict``: the tokens before each of them, from which the model predicts it.
    Empty if no token covers a character of the spans.
    """
    own = [
        branch.caption_start + i
        for i, (start, end) in enumerate(branch.offsets)
        if any(start < stop and end > begin for begin, stop in spans)
    ]
    return own if query == "self" else [i - 1 for i in own]
