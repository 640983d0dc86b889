"""The bank gives each id its own prompt, at one padded length, and nothing else."""

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from cast_rl.backbones import free_text_encoders, load_backbone
from cast_rl.fingerprint import encoding_fingerprint
from cast_rl.miniature import GENERATOR
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


def test_a_bank_on_disk_gives_the_same_rows_and_maps_its_file(backbone, bank, tmp_path):
    stored = PromptBank.encode(backbone, TEXTS, batch_size=2, folder=tmp_path / "bank")
    path, ids = stored._table.path, torch.tensor([3, 0, 4])
    assert stored.texts == bank.texts and [p.name for p in path.parent.iterdir()] == [path.name]
    for ours, theirs in zip(stored(ids), bank(ids), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert str(path) in Path("/proc/self/maps").read_text()
    pickled = pickle.dumps(stored)
    assert len(pickled) < 1500 < len(pickle.dumps(bank))
    elsewhere = pickle.loads(pickled)
    assert torch.equal(elsewhere(ids)[0]["embeds"], bank(ids)[0]["embeds"])
    assert torch.equal(copy.deepcopy(stored)(ids)[1]["embeds"], bank(ids)[1]["embeds"])


def test_a_second_run_reads_the_file_and_encodes_nothing(backbone, tmp_path, monkeypatch):
    PromptBank.encode(backbone, TEXTS, folder=tmp_path)
    monkeypatch.setattr(backbone, "encode", lambda prompts: pytest.fail("encoded again"))
    assert PromptBank.encode(backbone, TEXTS, folder=tmp_path).texts == tuple(TEXTS)


def test_whatever_encodings_depend_on_is_in_the_fingerprint(qwen_folder, backbone, tmp_path):
    known = encoding_fingerprint(backbone, TEXTS, " ")
    moved = tmp_path / "moved"
    shutil.copytree(qwen_folder, moved)
    same = load_backbone(moved, guidance=7.0)
    same.add_lora(rank=2)
    assert encoding_fingerprint(same, TEXTS, " ") == known, "neither place, adapters nor strength of guidance matter"

    others = [encoding_fingerprint(backbone, TEXTS, ""), encoding_fingerprint(backbone, TEXTS[:-1], " ")]
    others.append(encoding_fingerprint(load_backbone(qwen_folder, max_sequence_length=8), TEXTS, " "))
    others.append(encoding_fingerprint(load_backbone(qwen_folder, dtype="bfloat16"), TEXTS, " "))
    with torch.no_grad():
        list(same.pipe.text_encoder.parameters())[-1].mul_(1.001)
    others.append(encoding_fingerprint(same, TEXTS, " "))
    assert len({known, *others}) == 1 + len(others)
    free_text_encoders(same)
    with pytest.raises(RuntimeError, match="text_encoder were freed, so that encodings cannot be told apart"):
        encoding_fingerprint(same, TEXTS, " ")


def test_files_that_are_no_such_bank_are_named(backbone, bank, tmp_path):
    path = tmp_path / "bank.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        PromptBank.open(path)
    bank.save(path, fingerprint="abc")
    assert PromptBank.open(path).texts == bank.texts
    with pytest.raises(ValueError, match="other prompts, encoders or settings .*'abc', not 'abd'"):
        PromptBank.open(path, fingerprint="abd")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="no safetensors file"):
        PromptBank.open(path)
    with pytest.raises(ValueError, match="names no texts"):
        PromptBank.open(next(Path(GENERATOR).rglob("*.safetensors")))
