"""`kpool serve-demo` where the packages it needs are missing, and what it ships."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kpool_graph.serve_demo import ServeDemoError, example_folder

# As if MAX's serving packages were not installed, whether they are or not.
WITHOUT_THEM = "import sys; sys.modules['max.pipelines.lib'] = None; "
HOW_TO_INSTALL = "Install it with: pip install 'kpool-graph[serve]'"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_package_does_without_the_serving_packages():
    done = run(
        WITHOUT_THEM + "import kpool_graph, kpool_graph.testing;"
        " assert 'kpool_graph.serve' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_importing_serve_without_them_says_what_to_install():
    done = run(WITHOUT_THEM + "import kpool_graph.serve")
    assert done.returncode == 1
    assert "ImportError: kpool_graph.serve needs what MAX serves models with" in (
        done.stderr
    )
    assert done.stderr.rstrip().endswith(HOW_TO_INSTALL)


def test_the_demo_without_them_says_what_to_install():
    done = run(
        WITHOUT_THEM
        + "from kpool_graph.cli import main; raise SystemExit(main(['serve-demo']))"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kpool serve-demo: kpool_graph.serve needs")
    assert done.stderr.rstrip().endswith(HOW_TO_INSTALL)
    assert "Traceback" not in done.stderr


def test_the_model_to_serve_ships_with_the_package():
    folder = example_folder()
    assert (folder / "kpool_llama" / "__init__.py").is_file()
    assert (folder / "make_checkpoint.py").is_file()


def test_a_missing_model_is_told_with_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "kpool_graph._shipped.__file__", str(tmp_path / "a" / "b" / "_shipped.py")
    )
    with pytest.raises(ServeDemoError) as error:
        example_folder()
    assert str(tmp_path / "a" / "b" / "examples" / "serve") in str(error.value)
    assert str(error.value).endswith("Reinstall the package.")
