"""What the README says can be done."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_there_are_exactly_two_commands_and_they_name_real_things():
    commands = [block.strip() for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S)]
    assert commands == ["pip install -e . && python examples/train_cast.py", 'pip install -e ".[dev]" && pytest']
    assert (ROOT / "examples" / "train_cast.py").exists()


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    local = [t for t in targets if not t.startswith("http")]
    assert local and all((ROOT / t).exists() for t in local)


@pytest.mark.slow
def test_the_python_example_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(code.splitlines()) <= 50
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "my_lora" / "pytorch_lora_weights.safetensors").exists()
