"""The built wheel, installed into an environment that does not see the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command away from the checkout."""
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("boundary_tracer-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel; dependencies are borrowed from this interpreter, the checkout is not."""
    folder = tmp_path_factory.mktemp("clean")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "env/bin/python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    (Path(site) / "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n")
    return folder / "env"


def test_wheel_carries_the_package_and_every_map(wheel: Path) -> None:
    """The wheel holds every module, template and boundary map, and nothing outside the package."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kinds = (".py", ".yaml", ".j2")
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tracer").rglob("*") if path.suffix in kinds}
    maps = {f"tracer/boundary_maps/{path.name}" for path in (ROOT / "boundary_maps").glob("*.yaml")}
    assert maps
    assert names == modules | maps


def test_wheel_imports_from_its_own_place(environment: Path) -> None:
    """In a clean environment the package comes from the wheel, with the version of the source."""
    code = "import tracer, importlib.metadata as m; assert m.version('boundary-tracer') == tracer.__version__; print(tracer.__file__)"
    found = run(environment / "bin/python", "-c", code, cwd=environment)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).is_relative_to(environment)


def test_wheel_finds_its_maps(environment: Path) -> None:
    """The installed command lists the maps that travel in the wheel."""
    listed = run(environment / "bin/tracer", "map", "list", cwd=environment)
    assert listed.returncode == 0, listed.stderr
    assert "qwen3_moe" in listed.stdout


def test_wheel_runs_the_demo(environment: Path, tmp_path: Path) -> None:
    """The installed command traces two models and finds what was planted."""
    demo = run(environment / "bin/tracer", "demo", "--fault", "routing-weights", "--out", tmp_path / "demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "layers.2.moe.topk_weights" in demo.stdout
