"""`kpool demo`: what it serves, what it prints, and that it can fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kpool_graph
from kpool_graph._batching import (
    CHUNK_TOKENS,
    PADDING,
    Step,
    prompt_tokens,
    schedule,
)
from kpool_graph._demo_model import KPOOL
from kpool_graph._library import SOURCE_VARIABLE, source_dir
from kpool_graph.cli import main
from kpool_graph.demo import MAX_SLOTS, read_request, shipped_texts

PACKAGE_ROOT = Path(kpool_graph.__file__).parents[1]
ROW = re.compile(r"│ (\S+\.txt) +│ +([\d,]+) │ +([\d,]+) │ +([\d,]+) │")

APE_ROW_OFF = (
    "members.mojo",
    "(ape, m * Members.head_dim + channel)",
    "(ape, (m + 1) % Members.kpool * Members.head_dim + channel)",
)
WRONG_SLOT_IN_DECODE = (
    "decode.mojo",
    "slot=Int(load[1](self.slot_idx, row))",
    "slot=Int(load[1](self.slot_idx, row)) ^ 1",
)
WRONG_SLOT_IN_PREFILL = (
    "seed_tail.mojo",
    "slot = Int(load[1](self.slot_idx, request))",
    "slot = (Int(load[1](self.slot_idx, request)) + 1) % self.tail.max_slots",
)


def run_kpool(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kpool_graph", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGE_ROOT),
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "80",
            **variables,
        },
        capture_output=True,
        encoding="utf-8",
    )


def rows_for(*paths: Path) -> list[tuple[str, str, str, str]]:
    """The table's first columns, counted from the texts alone."""
    rows = []
    for path in paths:
        tokens = len(re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8")))
        closing = [p for p in range(prompt_tokens(tokens), tokens) if p % 4 == 3]
        rows.append((path.name, str(tokens), str(len(closing)), str(tokens // 4)))
    return rows


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    lengths = [len(read_request(path).token_ids) for path in shipped_texts()]
    return list(schedule(lengths, MAX_SLOTS))


def test_every_token_is_served_once_and_in_order(steps):
    served: dict[int, list[int]] = {}
    for step in steps:
        for chunk in step.prefill:
            served.setdefault(chunk.request, []).extend(range(chunk.start, chunk.end))
        for row in step.decode:
            if row.position != PADDING:
                served.setdefault(row.request, []).append(row.position)
    for request, path in enumerate(shipped_texts()):
        assert served[request] == list(range(len(read_request(path).token_ids)))


def test_no_two_requests_ever_hold_one_slot(steps):
    for step in steps:
        holders = {(row.slot, row.request) for row in [*step.prefill, *step.decode]}
        assert len({slot for slot, _ in holders}) == len(holders)


def test_the_shipped_texts_meet_every_situation_the_demo_promises(steps):
    batches = [[row.request for row in step.decode] for step in steps]
    owners: dict[int, set[int]] = {}
    for step in steps:
        for slot, request in step.slot_owners.items():
            owners.setdefault(slot, set()).add(request)
    paddings = [
        sum(row.position == PADDING for row in step.decode)
        for step in steps
        if step.decode
    ]

    prompts = [
        prompt_tokens(len(read_request(path).token_ids)) for path in shipped_texts()
    ]

    assert CHUNK_TOKENS % KPOOL != 0
    assert any(prompt % KPOOL != 0 for prompt in prompts), "no pool left open"
    assert any(len(step.prefill) > 1 for step in steps), "no ragged prefill"
    assert any(len(ids) > 1 for ids in owners.values()), "no slot reused"
    assert [0, 1] in batches and [1, 0] in batches, "no reordering"
    assert {1, 2} <= set(map(len, batches)), "no shrinking"
    assert 0 in paddings and 1 in paddings, "not both padded and full batches"
    assert any(
        row.position >= 0 and row.slot != index
        for step in steps
        for index, row in enumerate(step.decode)
    ), "every row is its slot"


def test_the_default_demo_passes_and_prints_a_row_for_each_text():
    run = run_kpool("demo")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first run takes" in run.stdout.splitlines()[0]
    texts = shipped_texts()
    assert len(texts) == 3
    assert ROW.findall(run.stdout) == rows_for(*texts)
    pools = sum(int(row[2]) for row in rows_for(*texts))
    assert f"All {pools} pools that decode closed agree" in run.stdout


def test_own_texts_are_served_whatever_they_are_called(tmp_path):
    short = tmp_path / "[b]one.txt"
    short.write_text("Word!", encoding="utf-8")
    accented = tmp_path / "zwei.txt"
    accented.write_text("Ebbe und Flut prägen die Küste. " * 5, encoding="utf-8")
    run = run_kpool("demo", "--text", str(short), str(accented))
    assert run.returncode == 0, run.stdout + run.stderr
    assert ROW.findall(run.stdout) == rows_for(short, accented)


def test_an_encoding_without_box_characters_does_not_end_the_demo():
    run = run_kpool("demo", PYTHONIOENCODING="ascii", COLUMNS="30")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "No such file", id="missing"),
        pytest.param(b"", "holds no text", id="empty"),
        pytest.param(b" \n\t", "holds no text", id="white space"),
        pytest.param(b"\xff\xfe\x00", "not UTF-8", id="binary"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(content, message, tmp_path, capsys):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", "--text", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error


def test_missing_kernels_end_the_demo_with_an_explanation(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path))
    assert main(["demo"]) == 2
    assert "kernels of kpool_graph are missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        pytest.param(
            APE_ROW_OFF,
            r"decode rows differ; the first is bread\.txt, position \d+: pool \d+"
            r" differs from the oracle",
            id="ape row off by one",
        ),
        pytest.param(
            WRONG_SLOT_IN_DECODE,
            r"decode rows differ; the first is bread\.txt, position \d+: pool \d+"
            r" differs from the oracle",
            id="wrong slot in decode",
        ),
        pytest.param(
            WRONG_SLOT_IN_PREFILL,
            r"ring entries differ; the first is bread\.txt, position \d+: entry \d of"
            r" slot \d does not hold this token's key and gate score",
            id="wrong slot in prefill",
        ),
    ],
)
def test_a_broken_kernel_fails_the_demo(mutation, message, tmp_path):
    name, right, wrong = mutation
    kernels = tmp_path / "kernels"
    shutil.copytree(source_dir(), kernels)
    source = (kernels / name).read_text(encoding="utf-8")
    assert source.count(right) == 1, "the mutation's anchor is gone"
    (kernels / name).write_text(source.replace(right, wrong), encoding="utf-8")

    run = run_kpool("demo", **{SOURCE_VARIABLE: str(kernels)})
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(message, run.stderr), run.stderr
    assert len(ROW.findall(run.stdout)) == 3


@pytest.mark.parametrize(
    ("module", "arguments", "begins", "ends"),
    [
        ("kpool_graph", ["demo"], "Compiling", "Interrupted."),
        (
            "benchmarks",
            ["run", "--quick"],
            "Compiling",
            "Interrupted: nothing was written.",
        ),
    ],
    ids=["demo", "benchmarks"],
)
def test_an_interrupted_command_ends_without_a_traceback(
    module: str, arguments: list[str], begins: str, ends: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=PACKAGE_ROOT.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stdout
        for line in command.stdout:
            if line.startswith(begins):
                break
        # As a terminal does: to the whole group.
        os.killpg(command.pid, signal.SIGINT)
        output, _ = command.communicate(timeout=120)
    assert command.returncode == 130, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == ends
