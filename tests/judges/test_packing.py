"""Texts are cut where tokens end, branches do not see each other, and budgets hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_judges import judge_tokenizer

from cast_rl.judges import EvidenceSettings
from cast_rl.judges.chat import Chat, tokens_of
from cast_rl.judges.packing import batches, pack, rounds


def test_prefix_and_branch_are_the_tokens_of_the_whole_text():
    tokenizer = judge_tokenizer()
    image, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
    chat = Chat(tokenizer, image, end)
    ids, columns = chat.prefix(3)
    assert ids[columns] == [image] * 3 and ids[-1] == end
    head = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|>"
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    question = chat.question("Is the circle red?")
    asked = tokenizer.encode(f"{head}Is the circle red? Answer in one word.{tail}")
    assert [*ids, *question.ids] == asked and question.caption_start == len(question.ids)
    said = chat.caption("a red circle")
    assert [*ids, *said.ids] == tokenizer.encode(f"{head}Describe this image.{tail}a red circle")
    red = tokens_of(said, ((2, 5),), "self")
    assert [tokenizer.decode([said.ids[i]]).strip() for i in red] == ["red"]
    assert tokens_of(said, ((2, 5),), "predict") == [red[0] - 1]
    assert tokens_of(said, ((0, 1),), "predict") == [said.caption_start - 1]
    assert tokens_of(said, ((12, 20),), "self") == []


def test_a_token_sees_the_prefix_and_its_own_branch():
    packed = pack([[[5, 6], [7, 8, 9]], [[4]]])
    assert packed.ids.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert packed.offset[0].tolist() == [0, 1, 0, 1, 2]
    assert packed.starts == [[0, 2], [0]] and packed.lasts == [[1, 4], [0]]
    mask = packed.mask(2)
    assert mask.shape == (2, 1, 5, 7) and mask[..., :2].all()
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert torch.equal(mask[0, 0, :, 2:], torch.tensor(expected).bool())


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50), st.integers(1, 300))
def test_budgets_hold(lengths, prefix, budget):
    found = batches(lengths, prefix, budget)
    assert [b for part in found for b in part] == list(range(len(lengths)))
    assert all(len(p) == 1 or len(p) * (prefix + max(lengths[b] for b in p)) <= budget for p in found)
    found = rounds(lengths, budget)
    assert [b for part in found for b in part] == list(range(len(lengths)))
    assert all(len(p) == 1 or sum(lengths[b] for b in p) <= budget for p in found)


def test_layers_and_heads_that_are_read():
    assert EvidenceSettings().chosen(36, 32) == dict.fromkeys(range(20, 29))
    assert EvidenceSettings().chosen(1, 2) == {0: None}
    assert EvidenceSettings(layers=(4, 2, 4)).chosen(6, 2) == {2: None, 4: None}
    assert EvidenceSettings(heads=((3, 1), (0, 0), (3, 0))).chosen(4, 2) == {0: (0,), 3: (0, 1)}
