"""What imports what, what a wheel holds, and what must never stand in the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"tenure": ROOT / "src" / "tenure"} | {
    f"tenure/{name}": ROOT / name for name in ("ledger", "tasks", "workflows")
}


def run(*args: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(args, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{args} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def imported_by(module: str, tmp_path: Path) -> set[str]:
    """The top-level modules that a fresh interpreter holds after one import."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(run(sys.executable, "-c", code, cwd=tmp_path).split())


def source_files() -> dict[str, Path]:
    """Every file of the packages, by its place in site-packages."""
    return {
        f"{place}/{path.relative_to(folder).as_posix()}": path
        for place, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, which neither leaves anything in the tree nor takes up what lies there."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in PACKAGES.values():
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(folder, copy / folder.relative_to(ROOT), ignore=ignore)
    wheels = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, ".", cwd=copy)
    (found,) = wheels.iterdir()
    return found


def test_a_wheel_puts_nothing_but_tenure_at_the_top_of_site_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tenure"}


def test_a_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == set(source_files())


def test_imports_point_one_way(wheel, tmp_path):
    """The contracts in pyproject.toml, checked on the wheel: an editable install hides the tree from the linter."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    linter = Path(sys.executable).with_name("lint-imports")
    installed = str(tmp_path / "installed")
    output = run(linter, "--no-cache", ROOT / "pyproject.toml", cwd=tmp_path, PYTHONPATH=installed)
    analyzed = re.search(r"Analyzed (\d+) files", output)
    assert analyzed, output
    assert int(analyzed[1]) >= sum(name.endswith(".py") for name in source_files())


def test_the_ledger_loads_neither_celery_nor_a_process_table(tmp_path):
    assert imported_by("tenure.ledger", tmp_path) & {"celery", "kombu", "redis", "psutil"} == set()


# Put together here, so that this file does not hold what it looks for.
MARKER = re.compile(rb"\b(TO" rb"DO|FIX" rb"ME|XX" rb"X|HA" rb"CK)\b")
MACHINE_PATH = re.compile(
    rb"(?<![\w.-])/(root|home/\w+|Users/\w+|work|workspace|mnt|tmp/venv|tmp/link)(?=[/\"'`\s,;)\]]|$)"
    rb"|[A-Z]:\\\\?Users"
)


def tracked_files() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(git, "ls-files", "-z", cwd=ROOT).split("\0")
    # A recorded run speaks of the machine it was recorded on.
    return [path for name in listed if name and (path := ROOT / name).is_file() and path.suffix != ".traj"]


@pytest.mark.parametrize("pattern", [MARKER, MACHINE_PATH], ids=["markers", "machine paths"])
def test_no_tracked_file_holds(pattern):
    held = [
        f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()}"
        for path in tracked_files()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert held == []
