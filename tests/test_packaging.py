"""The package imports from a checkout and from a wheel, and takes no top-level name but its own."""

import ast
import importlib.metadata
import multiprocessing
import operator
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


def python(code, cwd, path=None):
    """Run `code` in a fresh interpreter; the working folder comes first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that no build folders appear in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("cast_rl", "envs", "objectives"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = python(build, source)
    assert done.returncode == 0, done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_a_checkout_imports_without_being_installed_and_without_torchvision():
    code = (
        "import sys; sys.modules['torchvision'] = None;"
        "import cast_rl.backbones, cast_rl.judges, cast_rl.envs as e, cast_rl.objectives as o;"
        "print(e.__name__, o.__name__, e.__file__, o.__file__, sep='\\n')"
    )
    done = python(code, ROOT)
    assert done.returncode == 0, done.stderr
    envs, objectives, *files = done.stdout.split()
    assert (envs, objectives) == ("cast_rl.envs", "cast_rl.objectives")
    expected = [ROOT / "envs" / "__init__.py", ROOT / "objectives" / "__init__.py"]
    assert [Path(file).resolve() for file in files] == expected


@pytest.mark.parametrize("name", ["envs", "objectives"])
def test_the_bare_names_are_refused(name):
    done = python(f"import {name}", ROOT)
    assert done.returncode != 0
    assert "ImportError" in done.stderr and f"cast_rl.{name}" in done.stderr


@pytest.mark.parametrize("name", ["envs", "objectives"])
def test_the_links_of_a_checkout_are_relative(name):
    assert os.readlink(ROOT / "cast_rl" / name) == f"../{name}"


def test_the_top_module_is_light_and_has_the_version():
    done = python("import cast_rl, sys; print(cast_rl.__version__, 'torch' in sys.modules)", ROOT)
    assert done.stdout.split()[1] == "False", done.stderr
    assert done.stdout.split()[0].count(".") == 2


def test_every_package_folder_is_declared():
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_the_wheel_holds_the_package_its_data_and_no_other_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names} == {"cast_rl"}
    expected = {"cast_rl/py.typed"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT / folder)
            weights = relative.parts[:2] == ("miniature", "weights") and path.is_file()
            words = relative.parts[0] == "prompts" and path.suffix in (".json", ".yaml")
            if path.suffix == ".py" or weights or words:
                expected.add(f"{package.replace('.', '/')}/{relative.as_posix()}")
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("name", ["cast_rl.envs", "cast_rl.objectives", "cast_rl.backbones"])
def test_the_wheel_is_found_away_from_the_checkout(wheel, tmp_path, name):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import importlib.util as u; print(u.find_spec({name!r}).origin)"
    done = python(code, tmp_path, site)
    assert done.stdout.strip() == str(site.joinpath(*name.split("."), "__init__.py")), done.stderr


def test_classes_of_the_linked_folders_reach_a_spawned_process():
    from cast_rl.envs import DenoisingEnv

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        module = pool.apply(operator.attrgetter("__module__"), (DenoisingEnv,))
    assert module == DenoisingEnv.__module__ and module.startswith("cast_rl.envs")


def test_every_dependency_is_bounded_on_both_sides():
    extras = PROJECT["project"]["optional-dependencies"]
    required = PROJECT["project"]["dependencies"] + extras["vision"] + extras["dev"]
    assert [name for name in required if ">=" not in name or "<" not in name] == []
    assert not any(name.startswith("torchvision") for name in PROJECT["project"]["dependencies"])


def test_what_is_imported_is_declared():
    modules = set()
    for folder in (*FOLDERS.values(), "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules.add(node.module.split(".")[0])
    declared = {re.split("[<>=]", name)[0] for name in PROJECT["project"]["dependencies"]}
    providers = importlib.metadata.packages_distributions()
    unknown = {
        module
        for module in modules - set(sys.stdlib_module_names) - {"cast_rl"}
        if not declared & {name.lower() for name in providers.get(module, [])}
    }
    assert not unknown, f"imported, but not among the dependencies in pyproject.toml: {sorted(unknown)}"


def test_the_ci_script_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    install, run = 'pip install -e ".[dev]"', "pytest"
    assert f"{install} && {run}" in (ROOT / "README.md").read_text()
    lines = [line.replace(" --quiet", "") for line in script.read_text().splitlines()]
    assert install in lines and run in lines
