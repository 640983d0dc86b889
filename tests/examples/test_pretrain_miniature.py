"""The miniature's figures from the command line."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from cast_rl.miniature.quality import fairness

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_miniature.py"


@pytest.fixture
def script(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_check_prints_one_line_of_json(script, tmp_path):
    out = script("check", "--quick", "--prompts", 9, "--judge", "oracle", "--picture", tmp_path / "atoms.png")
    (line,) = out.strip().splitlines()
    report = json.loads(line)
    skills = {"object", "attribute", "count", "position", "scene"}
    assert set(report) >= skills | {"all_correct", "strict", "hard", "crisp", "atoms", "seconds"}
    assert report["prompts"] == 9 and 0 <= report["strict"] <= report["all_correct"] <= 1
    assert report["judge"]["correlation"] == 1 and report["judge"]["hits"] == 1
    assert min(Image.open(tmp_path / "atoms.png").size) > 200


def test_fairness_compares_with_more_guidance_and_more_steps_and_sees_what_varies(monkeypatch):
    """Images whose facts depend on how they are drawn, so that each figure has a known value."""
    from cast_rl.miniature import quality
    from cast_rl.miniature.render import render_graphs
    from cast_rl.miniature.vocabulary import sample_graphs

    graphs, calls = sample_graphs(6, seed=0, held_out=True), []

    def generate(pipe, texts, seed, *, steps=quality.STEPS, guidance=quality.GUIDANCE, batch=100):
        calls.append((len(texts), seed, steps, guidance))
        right = dict(zip((g.render()[0] for g in graphs), graphs, strict=True))
        # More guidance spoils the first image, more steps none; within a group every other image is the first scene.
        drawn = [right[t] for t in texts]
        if guidance > quality.GUIDANCE:
            drawn[0] = drawn[1]
        elif steps == quality.STEPS:
            drawn = [graphs[0] if j % 2 and g is not graphs[0] else g for j, g in enumerate(drawn)]
        return render_graphs(drawn, 1)

    monkeypatch.setattr(quality, "generate", generate)
    found = fairness(None, graphs, seed=3, base=0.5, group=2, hard=2)
    assert found["more_guidance"] == pytest.approx(5 / 6 - 0.5, abs=1e-4) and found["more_steps"] == 0.5
    # Two of the 19 atoms of the hard prompts hold in the other scene, too.
    assert found["varied"] == pytest.approx(17 / 19, abs=1e-4)
    assert calls == [
        (6, 3, 10, 1.5 * quality.GUIDANCE),
        (6, 3, 20, quality.GUIDANCE),
        (4, 1_000_003, 10, quality.GUIDANCE),
    ]
