"""The bank gives each id its own prompt, at one padded length, and nothing else."""

import copy
import pickle

import pytest
import torch

from cast_rl.backbones import load_backbone
from cast_rl.prompt_bank import PromptBank

TEXTS = ["a cat", "A cat", "a photo of two red cats left of a blue dog and a bowl", "a green bench", "a cat"]


@pytest.fixture(scope="module")
def backbone(qwen_folder):
    return load_backbone(qwen_folder, guidance=4.0)


@pytest.fixture(scope="module")
def bank(backbone):
    return PromptBank.encode(backbone, TEXTS, batch_size=2)


def test_each_id_gets_the_encoding_of_its_prompt(backbone, bank):
    ids = torch.tensor([3, 0, 2, 3])
    cond, negative = bank(ids)
    for row, index in enumerate(ids.tolist()):
        alone = backbone.encode([TEXTS[index]])
        length = alone["embeds"].shape[1]
        torch.testing.assert_close(cond["embeds"][row, :length], alone["embeds"][0], rtol=0, atol=1e-5)
        assert cond["mask"][row].sum() == length and cond["mask"][row, :length].all()
        assert (cond["embeds"][row, length:] == 0).all()
    torch.testing.assert_close(negative["embeds"], backbone.encode([" "])["embeds"].expand(4, -1, -1))
    assert {len(value) for value in (*cond.values(), *negative.values())} == {4}


def test_prompts_that_differ_only_in_case_or_not_at_all_keep_their_ids(bank):
    """F12: the key is the id, not the text."""
    assert len(bank) == len(bank.texts) == 5
    cond, _ = bank(torch.tensor([0, 1, 4]))
    assert not torch.equal(cond["embeds"][0], cond["embeds"][1])
    torch.testing.assert_close(cond["embeds"][0], cond["embeds"][2])


def test_the_padded_length_does_not_depend_on_the_batch(bank):
    short, _ = bank(torch.tensor([0]))
    joint, _ = bank(torch.tensor([[2], [0]]))
    for key in ("embeds", "mask"):
        assert torch.equal(short[key][0], joint[key][1])


def test_velocity_takes_what_the_bank_gives(backbone, bank):
    x = backbone.initial_latents([1, 2], 64, 64)
    assert backbone.velocity(x, 0.5, *bank(torch.tensor([0, 2]))).shape == x.shape


def test_without_guidance_there_is_no_negative(qwen_folder):
    bank = PromptBank.encode(load_backbone(qwen_folder), TEXTS)
    assert bank(torch.tensor([0]))[1] is None


def test_the_table_is_shared_by_copies_and_no_part_of_the_weights(bank):
    assert not list(bank.parameters()) and not list(bank.buffers()) and not bank.state_dict()
    holder = torch.nn.ModuleDict({"bank": bank})
    clone = copy.deepcopy(holder)["bank"]
    assert clone._table is bank._table
    (cond, _), (same, _) = bank(torch.tensor([2])), clone(torch.tensor([2]))
    assert torch.equal(cond["embeds"], same["embeds"])
    assert bank.to(torch.bfloat16)(torch.tensor([2]))[0]["embeds"].dtype == torch.float32
    elsewhere = pickle.loads(pickle.dumps(bank))
    assert torch.equal(elsewhere(torch.tensor([2]))[0]["embeds"], cond["embeds"])


def test_bad_ids_are_named(bank):
    with pytest.raises(IndexError, match="prompt id 5 is outside 0 to 4"):
        bank(torch.tensor([0, 5]))
    with pytest.raises(IndexError, match="prompt id -1"):
        bank(torch.tensor([-1]))
    with pytest.raises(TypeError, match=r"integers, got torch\.float32"):
        bank(torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"got \(2, 2\)"):
        bank(torch.zeros(2, 2, dtype=torch.long))
    assert len(bank(torch.zeros(0, dtype=torch.long))[0]["embeds"]) == 0


def test_bad_tables_are_named(backbone):
    rows = backbone.encode(TEXTS)
    with pytest.raises(ValueError, match="5 rows for 1 prompts"):
        PromptBank(rows, None, ["a cat"])
    with pytest.raises(ValueError, match="must have one row, got 5"):
        PromptBank(rows, rows, TEXTS)
    with pytest.raises(ValueError, match="no prompts"):
        PromptBank.encode(backbone, [])
