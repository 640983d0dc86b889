"""Heads that look at the right place are found, and what is written is read."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from cast_rl.judges import EvidenceSettings, load_judge
from cast_rl.judges.calibration import Known, rank_heads, share_inside, spans_of

SCRIPT = Path(__file__).parents[2] / "examples" / "calibrate_judge.py"


class Looking:
    """Two layers of three heads: head (1, 2) looks at the region, (0, 1) half so, the others anywhere."""

    def __init__(self, regions, query):
        self.regions, self.query = regions, query

    def head_attention(self, images, atoms):
        out = torch.full((len(images), len(atoms[0]), 2, 3, 4, 4), 1 / 32)
        right = torch.nn.functional.adaptive_avg_pool2d(self.regions.float(), (4, 4))[None]
        right = right / right.sum((-2, -1), keepdim=True).clamp_min(1e-9)
        out[:, :, 1, 2] = right if self.query == "predict" else 0.9 * right + 0.1 / 16
        out[:, :, 0, 1] = 0.5 * right + 0.5 / 16
        return out


def test_heads_are_ranked_by_what_lies_inside():
    regions = torch.zeros(2, 16, 16, dtype=torch.bool)
    regions[0, :4, :8] = True  # two of 16 cells; atom 1 has no region and does not count
    known = [Known(torch.zeros(1, 3, 16, 16), [["a", "b"]], [regions])] * 2
    best, other = rank_heads(lambda query: Looking(regions, query), known, most=4)
    assert (best.query, other.query) == ("predict", "self")
    assert best.order[:2] == [(1, 2), (0, 1)]
    assert best.chance == pytest.approx(2 / 16)
    assert best.inside[1, 2] == pytest.approx(1) and best.inside[0, 1] == pytest.approx(0.5 + 1 / 16)
    assert best.inside[0, 0] == pytest.approx(2 / 16) and best.image[0, 0] == pytest.approx(0.5)
    assert best.together[1] == pytest.approx((1 + 0.5 + 1 / 16) / 2)
    assert best.settings == EvidenceSettings(heads=((1, 2),), query="predict")
    with pytest.raises(ValueError, match="no atom of the images"):
        rank_heads(lambda query: Looking(regions, query), [dataclasses.replace(known[0], regions=[regions & False])])


def test_share_inside():
    region = torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    maps = torch.stack([torch.ones(2, 2), torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.zeros(2, 2)])
    torch.testing.assert_close(share_inside(maps, region), torch.tensor([1.5 / 4, 3 / 4, 0]))


def test_spans_of_words():
    prompt = "a Red mug, redder than a mug-shaped plate"
    assert spans_of(prompt, ["red", "plate", "red mug"]) == ((2, 5), (36, 41), (2, 9))
    for word in ("edd", "cat", ""):
        with pytest.raises(ValueError, match="does not stand in the prompt"):
            spans_of(prompt, [word])


@pytest.fixture
def calibrate(monkeypatch, capsys):
    """Runs the script with arguments, in this process, and returns what it prints."""
    spec = importlib.util.spec_from_file_location("calibrate_judge", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *map(str, arguments)])
        script.main()
        return capsys.readouterr().out

    return run


def test_the_script_on_boxes_and_scenes(calibrate, judge_folders, tmp_path):
    folder = judge_folders("qwen3_vl")
    Image.new("RGB", (40, 32), "red").save(tmp_path / "1.png")
    thing = {"words": ["red mug"], "boxes": [[0, 0, 20, 16]]}
    line = {"image": "1.png", "prompt": "a red mug left of a plate", "things": [thing]}
    boxes, out = tmp_path / "boxes.jsonl", tmp_path / "cast_judge.json"
    boxes.write_text(json.dumps(line) + "\n\n")
    printed = calibrate("--judge", folder, "--boxes", boxes, "--most", 3, "--out", out)
    found = load_judge(folder, evidence=out).evidence
    assert 1 <= len(found.heads) <= 3 and f"{len(found.heads)} heads, query={found.query}" in printed
    line["things"][0]["words"] = ["blue mug"]
    boxes.write_text(json.dumps(line))
    with pytest.raises(ValueError, match="boxes.jsonl, line 1: ValueError: 'blue mug' does not stand in the prompt"):
        calibrate("--judge", folder, "--boxes", boxes, "--out", out)
    calibrate("--judge", folder, "--scenes", 3, "--out", out, "--relative")
    assert load_judge(folder, evidence=out).evidence.relative
