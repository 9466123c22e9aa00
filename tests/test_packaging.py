"""Pins agree, pixi and make run the same commands, the wheel works by itself."""

import copy
import importlib.resources
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fastjsonschema
import pytest

from kpool_graph import _versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
EXTRAS = PROJECT["optional-dependencies"]
# A pixi environment has no .venv to fill; its install task takes that place.
TASKS = {name: task for name, task in PIXI["tasks"].items() if name != "install"}


def environment():
    """Returns the environment without what points at this checkout or make."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "KPOOL_GRAPH_KERNELS", "MAKEFLAGS", "ARGS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def run(*command, cwd):
    """Runs a command to its end; its output is in the error if it fails."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}"
    return result.stdout


def test_every_pin_of_max_is_the_version_the_package_names():
    pin = f"=={_versions.MAX_VERSION}"
    assert f"max{pin}" in PROJECT["dependencies"]
    assert f"mblack{pin}" in EXTRAS["lint"]
    assert EXTRAS["serve"] == [f"modular{pin}"]
    assert PIXI["dependencies"]["max"] == pin
    assert PIXI["dependencies"]["modular"] == pin


def test_pixi_pins_the_linters_that_pip_installs():
    for requirement in EXTRAS["lint"]:
        name, version = requirement.split("==")
        assert PIXI["dependencies"][name] == f"=={version}"


def test_pixi_asks_for_no_older_libraries_than_pip():
    for requirement in PROJECT["dependencies"]:
        name, bound = re.match(r"([a-z]+)(.*)", requirement).groups()
        assert PIXI["dependencies"][name] == bound


PIXI_SCHEMA = json.loads(
    importlib.resources.files("validate_pyproject_schema_store")
    .joinpath("resources/pixi.schema.json")
    .read_text()
)
FAULTS = {
    "a command's name": lambda pixi: pixi["tasks"]["test"].update(cmdd="pytest"),
    "a version": lambda pixi: pixi["dependencies"].update(max=26.7),
    "a dependency": lambda pixi: pixi["tasks"]["test"].update({"depends-on": 1}),
}


def test_pixi_manifest_is_valid_by_the_published_schema():
    fastjsonschema.validate(PIXI_SCHEMA, PIXI)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_finds_what_is_wrong(fault):
    manifest = copy.deepcopy(PIXI)
    FAULTS[fault](manifest)
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        fastjsonschema.validate(PIXI_SCHEMA, manifest)


def test_pixi_workspace_is_this_version_for_every_platform_with_max():
    workspace = PIXI["workspace"]
    assert workspace["name"] == PROJECT["name"]
    assert workspace["version"] == _versions.__version__
    assert workspace["channels"] == [
        "https://conda.modular.com/max",
        "conda-forge",
    ]
    assert workspace["platforms"] == ["linux-64", "linux-aarch64", "osx-arm64"]


@pytest.mark.parametrize("name", TASKS)
def test_pixi_task_runs_the_commands_of_the_make_target(name):
    # Told that the stamps are old news, make prints the target's own recipe.
    environments = (".venv", ".venv-bench", ".venv-serve")
    stamps = [f"{each}/.installed" for each in environments] + [".venv/.linters"]
    old = [argument for stamp in stamps for argument in ("-o", stamp)]
    recipe = run("make", "--no-print-directory", "-n", *old, name, cwd=ROOT)
    commands = " && ".join(line.strip() for line in recipe.splitlines())
    for environment in environments:
        commands = commands.replace(f"{environment}/bin/", "")
    assert TASKS[name]["cmd"].strip() == commands


@pytest.mark.parametrize("name", TASKS)
def test_pixi_task_installs_the_package_first_and_says_what_it_does(name):
    assert TASKS[name]["depends-on"] == ["install"]
    assert TASKS[name]["description"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the sdist, which is built from this checkout."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT), cwd=dist)
    return next(dist.glob("*.whl"))


def find_python(version):
    """Finds an interpreter of that version: this one, or PATH's, or pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    # Last, because of pyenv's shims, which find nothing of their own accord.
    return str(installed[-1]) if installed else shutil.which(f"python{version}")


def install_alone(python, wheel, home):
    """Installs the wheel into an empty environment, and returns its scripts."""
    run(python, "-m", "venv", "--without-pip", str(home / "venv"), cwd=home)
    scripts = home / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", str(scripts / "python"))
    run(*pip, "install", str(wheel), cwd=home)
    return scripts


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    return install_alone(sys.executable, wheel, tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.slow
def test_wheel_carries_the_modules_the_kernels_and_the_examples(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = ROOT / "python/kpool_graph"
    modules = {str(path.relative_to(sources)) for path in sources.rglob("*.py")}
    kernels = {f"kernels/{path.name}" for path in (ROOT / "kernels").glob("*.mojo")}
    texts = {
        f"examples/texts/{path.name}"
        for path in (ROOT / "examples/texts").glob("*.txt")
    }
    served = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.md")
        for path in (ROOT / "examples/serve").rglob(pattern)
    }
    assert modules and kernels and texts and served
    wanted = modules | {"py.typed"} | kernels | texts | served
    assert packed == {f"kpool_graph/{name}" for name in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_installed_wheel_runs_away_from_the_sources(command, scripts, tmp_path):
    where = "import kpool_graph, kpool_graph._library as l; print(l.source_dir())"
    found = run(str(scripts / "python"), "-c", where, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(scripts.parent.resolve())
    run(str(scripts / "kpool"), command, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_wheel_works_on_every_python_that_is_here(version, wheel, tmp_path):
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    scripts = install_alone(python, wheel, tmp_path)
    report = run(str(scripts / "kpool"), "doctor", cwd=tmp_path)
    assert f"Python: {version}." in report and "All is well." in report


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_wheel_resolves_for_every_python(version, wheel, tmp_path):
    # MAX's wheels name the oldest C library they run with.
    platforms = ("manylinux_2_34", "manylinux_2_28", "manylinux2014")
    run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
        *("--target", str(tmp_path / "nowhere"), "--only-binary", ":all:"),
        *("--python-version", version),
        *(f"--platform={each}_{platform.machine()}" for each in platforms),
        str(wheel),
        cwd=tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_resolves(extra, wheel, tmp_path):
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed")
    run(*pip, f"{wheel}[{extra}]", cwd=tmp_path)
