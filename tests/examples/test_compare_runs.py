"""The table of a sweep."""

import json
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

SCRIPT = Path(__file__).parents[2] / "examples" / "compare_runs.py"


def compare(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def write_run(folder, window, seed, gain):
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save({"window": window, "seed": seed, "loss": {"maps": "none"}}, folder / ".hydra" / "config.yaml")
    figures = {"atom_score": gain, "atom_score_se": 0.01, "all_correct": 2 * gain, "all_correct_se": 0.02}
    (folder / "held_out.json").write_text(json.dumps({"gain": figures | {"hard_atom_score": 0.0}}))


def test_runs_are_averaged_by_the_settings_that_differ(tmp_path):
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        write_run(tmp_path / str(seed), [1, 3], seed, gain)
    write_run(tmp_path / "3", "measured", 0, 0.05)
    (tmp_path / "unfinished").mkdir()
    lines = compare(tmp_path, tmp_path / "0", "--by", "window", "loss.maps").stdout.splitlines()
    assert lines[0].startswith("| window | loss.maps | runs | mean atom score |") and len(lines) == 4
    assert "| [1, 3] | none | 3 | +0.200 +- 0.058 | +0.400 +- 0.115 | +0.000 +- 0.000 | - |" in lines[2]
    assert "| measured | none | 1 | +0.050 +- 0.010 | +0.100 +- 0.020 | +0.000 | - |" in lines[3]


def test_a_folder_without_finished_runs_says_so(tmp_path):
    done = compare(tmp_path, "--by", "window")
    assert done.returncode == 1 and "no finished run" in done.stderr


def test_a_setting_that_is_not_there_is_named(tmp_path):
    write_run(tmp_path / "0", [1, 3], 0, 0.1)
    done = compare(tmp_path, "--by", "windw")
    assert done.returncode == 1 and "no setting windw" in done.stderr
    (tmp_path / "0" / ".hydra" / "config.yaml").unlink()
    assert "no .hydra/config.yaml" in compare(tmp_path, "--by", "window").stderr
