"""Where the kernels come from, and how a graph gets them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, KernelLibrary

import kpool_graph
from asserts import assert_same_bits
from cases import ring_for, update_operands
from kpool_graph import KernelBuildError, _library
from models import Call, Ring, TailUpdate, declare

SOURCES = Path(__file__).parents[1] / "kernels"
OP = declare(TailUpdate(DType.float32, 8, 4, 9, 4))


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Keeps what a test compiles out of the user's cache."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(
        _library.platformdirs, "user_cache_dir", lambda name: str(cache / name)
    )
    return cache


@pytest.fixture
def kernels_copy(monkeypatch, tmp_path):
    """A copy of the sources, which the package is told to use."""
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setenv("KPOOL_GRAPH_KERNELS", str(copy))
    return copy


def sources(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.mojo")}


def build(**options):
    with Graph("library", input_types=OP.input_types, **options) as graph:
        graph.output(*kpool_graph.tail_update(*graph.inputs, kpool=OP.kpool))
    return graph


def test_the_sources_are_the_repositorys(monkeypatch):
    monkeypatch.delenv("KPOOL_GRAPH_KERNELS", raising=False)
    found = sources(_library.source_dir())
    assert found == sources(SOURCES)
    assert "__init__.mojo" in found


def test_the_environment_variable_names_other_sources(kernels_copy):
    assert _library.source_dir() == kernels_copy


def test_equal_sources_share_one_library_and_an_edit_makes_another(
    own_cache, kernels_copy
):
    first = kpool_graph.kernels_path()
    assert first.is_file()
    assert first.is_relative_to(own_cache)
    assert first.name == "kpool_ops.mojoc"

    elsewhere = kernels_copy.with_name("elsewhere")
    kernels_copy.rename(elsewhere)
    shutil.copytree(elsewhere, kernels_copy)
    built = first.stat().st_mtime_ns
    assert kpool_graph.kernels_path() == first
    assert first.stat().st_mtime_ns == built

    helper = kernels_copy / "pooling.mojo"
    helper.write_text(helper.read_text() + "\ncomptime UNUSED = 1\n")
    second = kpool_graph.kernels_path()
    assert second != first
    assert second.is_file()
    assert second.read_bytes() != first.read_bytes()

    shutil.copyfile(elsewhere / helper.name, helper)
    assert kpool_graph.kernels_path() == first
    assert {path.name for path in own_cache.glob("*/*/*")} == {first.name}


def test_another_compiler_never_meets_a_library_of_this_one(
    own_cache, kernels_copy, monkeypatch
):
    compiled = []
    monkeypatch.setattr(
        _library, "_compile", lambda source, library: compiled.append(library)
    )
    kpool_graph.kernels_path()
    monkeypatch.setattr(_library, "mojo_version", lambda: "Mojo 99.0.0")
    kpool_graph.kernels_path()
    assert len(set(compiled)) == 2


def test_a_missing_folder_is_named_with_the_variable_that_named_it(
    monkeypatch, tmp_path
):
    missing = tmp_path / "nowhere"
    monkeypatch.setenv("KPOOL_GRAPH_KERNELS", str(missing))
    with pytest.raises(KernelBuildError) as error:
        kpool_graph.kernels_path()
    assert f"looked in {missing}" in str(error.value)
    assert "unset KPOOL_GRAPH_KERNELS" in str(error.value)


def test_a_kernel_that_does_not_compile_gives_the_compilers_text(
    own_cache, kernels_copy
):
    ring = kernels_copy / "ring.mojo"
    ring.write_text(ring.read_text() + "\ncomptime BROKEN = not_a_name\n")
    for _ in range(2):
        with pytest.raises(KernelBuildError) as error:
            kpool_graph.kernels_path()
        assert f"the kernels in {kernels_copy} do not compile with Mojo" in str(
            error.value
        )
        assert "not_a_name" in str(error.value)
    assert not list(own_cache.glob("*/*/*")), "half a library is left"


def test_a_missing_compiler_is_reported_with_what_to_install(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise FileNotFoundError("mojo")

    monkeypatch.setattr(_library, "subprocess_run_mojo", no_compiler)
    _library.mojo_version.cache_clear()
    with pytest.raises(KernelBuildError, match=r"no Mojo compiler: mojo\. Install"):
        kpool_graph.kernels_path()


def test_a_compiler_that_fails_to_tell_its_version_is_reported(monkeypatch):
    def fails(*args, **kwargs):
        raise subprocess.CalledProcessError(1, "mojo")

    monkeypatch.setattr(_library, "subprocess_run_mojo", fails)
    _library.mojo_version.cache_clear()
    with pytest.raises(KernelBuildError, match="no Mojo compiler"):
        kpool_graph.kernels_path()


def test_the_builder_needs_a_graph():
    with pytest.raises(LookupError):
        _library.load_kernels()


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_library_is_in_the_graph_once_however_often_it_was_named(times):
    library = kpool_graph.kernels_path()
    graph = build(custom_extensions=[library] * times)
    assert graph.kernel_libraries_paths == [library]


def test_a_kernel_library_of_the_callers_is_used_as_it_is():
    library = kpool_graph.kernels_path()
    graph = build(kernel_library=KernelLibrary([library]))
    assert graph.kernel_libraries_paths == [library]


def test_several_ops_in_one_graph_share_the_library():
    with Graph("twice", input_types=OP.input_types) as graph:
        for _ in range(2):
            kpool_graph.tail_update(*graph.inputs, kpool=OP.kpool)
        graph.output()
    assert graph.kernel_libraries_paths == [kpool_graph.kernels_path()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by_itself", "named_twice", "source_folder"])
def test_case_34_every_way_to_name_the_kernels_gives_the_same_bits(models, way):
    """Regression case 34: by the helper alone, twice, or as the source folder."""
    library = kpool_graph.kernels_path()
    graph, extensions = {
        "by_itself": (build(), []),
        "named_twice": (build(custom_extensions=[library] * 2), [library]),
        "source_folder": (build(custom_extensions=[_library.source_dir()]), []),
    }[way]
    session = InferenceSession(devices=[CPU()])
    call = Call(OP, session.load(graph, custom_extensions=extensions))
    rng = np.random.default_rng(34)
    requests = [(2, 6), (0, 3)]
    positions = [np.arange(start, start + 9) for _, start in requests]
    operands = update_operands(rng, OP, positions, [slot for slot, _ in requests])
    tail = ring_for(rng, OP, requests)
    ring, other = Ring(tail, OP.dtype), Ring(tail, OP.dtype)
    for got, want in zip(
        call(ring, *operands), models[OP](other, *operands), strict=True
    ):
        assert_same_bits(got, want, way)
    assert_same_bits(ring.storage(), other.storage(), "ring")
