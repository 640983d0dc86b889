"""The benchmark from its command line: images made, images given, another run's hard case."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from cast_rl.miniature import miniature_prompts
from cast_rl.prompts import write_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "evaluate.py"


def test_a_model_and_then_its_images(tmp_path, monkeypatch, capsys):
    def evaluate(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--judge", "oracle", *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    prompts = miniature_prompts(4, 0, held_out=True)
    benchmark, made, given = tmp_path / "prompts.jsonl", tmp_path / "made", tmp_path / "given"
    write_prompts(benchmark, prompts)
    size = ["--height", 48, "--width", 48, "--steps", 4, "--guidance", 3]
    out = evaluate("--benchmark", benchmark, "--model", "miniature", *size, "--hard-share", 0.5, "--out", made)
    report = json.loads((made / "report.json").read_text())
    assert report["all"]["prompts"] == 4 and report["hard_case"]["prompts"] == 2 and f"{report['all']['am']:.4f}" in out
    assert set(report["skills"]) == {"object", "attribute", "count", "position", "scene"}
    assert [len(row) for row in json.loads((made / "scores.json").read_text())] == [len(p.atoms) for p in prompts]
    again = ["--images", made / "map.json", "--hard-case", made / "hard_case.json", "--out", given]
    evaluate("--benchmark", benchmark, *again)
    assert json.loads((given / "report.json").read_text()) == report
    (made / "map.json").write_text("{}")
    with pytest.raises(SystemExit, match="error: .* has no image of 4 of 4 prompts"):
        evaluate("--benchmark", benchmark, *again)
