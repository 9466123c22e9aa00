"""The example on a real `max serve`: every answer is right, whoever is served beside.

Each test runs one server with 8 slots. Its log is in the failure's message.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prompts import PAGE, SLOTS, separate_prompts, shared_prompts
from safetensors.numpy import load_file, save_file

from kpool_graph.serve_demo import example_folder
from kpool_graph.testing import (
    MaxServer,
    Prompt,
    check_alone_equals_concurrent,
    check_answers,
)

DOCS = Path(__file__).parents[2] / "docs"
BROKEN = Path(__file__).parent / "broken"
KPOOL_LLAMA = example_folder() / "kpool_llama"
CHUNK = 13


@pytest.fixture
def serve(tmp_path):
    """Starts a server; one that fails a test adds its log to the failure."""

    @contextmanager
    def start(
        checkpoint: Path, *options: str, architecture: Path | str = KPOOL_LLAMA
    ) -> Iterator[MaxServer]:
        server = MaxServer(
            checkpoint,
            architecture,
            f"--max-batch-size={SLOTS}",
            *options,
            log=tmp_path / "server.log",
        )
        with server:
            try:
                yield server
            except BaseException:
                print(server.tail(), file=sys.stderr)
                raise

    return start


def check_traffic(server, prompts, wanted):
    """Requires right answers alone and, twice, at once; returns the latter."""
    steps = len(server.batches())
    answers = check_alone_equals_concurrent(
        server.client, prompts, [answer.tokens for answer in wanted], rounds=2
    )
    completed = sum(not prompt.cancel for prompt in prompts)
    assert len(prompts) == 32 and len(answers) == 2 * completed
    together = max(batch.requests for batch in server.batches()[steps:])
    assert together == SLOTS, f"never more than {together} requests in a step"
    return answers


def test_concurrent_answers_are_those_given_alone(serve, make_checkpoint, wanted):
    prompts = separate_prompts()
    with serve(make_checkpoint(4), "--no-enable-prefix-caching") as server:
        answers = check_traffic(server, prompts, wanted(4, prompts))
        assert not any(answer.cached for answer in answers)
        check_that_cancelling_frees_rows(server, prompts, wanted(4, prompts))


def check_that_cancelling_frees_rows(server, prompts, wanted):
    """Hangs up on many requests and requires the memory in use to be as before."""
    before = memory_of_one_request(server)
    steps = len(server.batches())
    hung_up_on = [Prompt(p.tokens[:40], 300, cancel=True) for p in prompts] * 3
    server.client.complete_all(hung_up_on, at_once=32)
    assert memory_of_one_request(server) == before
    processed = sum(batch.tokens for batch in server.batches()[steps:])
    assert processed < len(hung_up_on) * 300 / 2, "they were answered to the end"
    answers = server.client.complete_all(prompts, at_once=32)
    check_answers("after cancelling", answers, [answer.tokens for answer in wanted])
    assert memory_of_one_request(server) == before


def memory_of_one_request(server):
    """Returns what a request of one word holds once all others have ended."""
    steps = -1
    while steps != len(server.batches()):
        steps = len(server.batches())
        time.sleep(1)
    server.client.complete(Prompt((7,), max_tokens=1))
    (step,) = server.batches()[steps:]
    return step.memory


def test_prefills_may_be_cut_anywhere_and_batched_with_decodes(
    serve, make_checkpoint, wanted, tmp_path
):
    """The architecture is the one docs/serving.md shows, as it stands."""
    package = tmp_path / "shown" / "kpool_llama"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(architecture_in_the_docs())
    prompts = separate_prompts()
    with serve(
        make_checkpoint(4),
        "--enable-in-flight-batching",
        f"--max-batch-input-tokens={CHUNK}",
        architecture=package,
    ) as server:
        check_traffic(server, prompts, wanted(4, prompts))
        # A full step of several requests: some decode, and a prefill gets what they
        # leave of CHUNK.
        sizes = {each.requests for each in server.batches() if each.tokens == CHUNK}
        assert sizes >= {1, 2, 3, 4, 5}, f"full steps were of {sizes} requests"
        assert max(batch.tokens for batch in server.batches()) == CHUNK


@pytest.mark.parametrize("kpool", [4, 3])
def test_reused_prefixes_change_no_answer(serve, make_checkpoint, wanted, kpool):
    """With kpool 3 pages end inside a pool, and the ring's rows are recurrent."""
    prompts = shared_prompts()
    with serve(make_checkpoint(kpool), "--enable-prefix-caching") as server:
        answers = check_traffic(server, prompts, wanted(kpool, prompts))
    cached = {answer.cached for answer in answers}
    assert {PAGE, 2 * PAGE} <= cached, f"cached were only {cached}"


# The architecture, its kpool, whether prefixes are reused, the prompts, and which of
# its answers are wrong.
CONTROLS = {
    "rows found by place in the batch": (
        "rows_by_place",
        4,
        "--no-enable-prefix-caching",
        separate_prompts,
        "concurrent, round 0",
    ),
    "scratch rows where ring_cache refuses them": (
        "scratch_rows",
        3,
        "--enable-prefix-caching",
        shared_prompts,
        "alone",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_is_noticed(serve, make_checkpoint, wanted, control):
    module, kpool, caching, make_prompts, wrong = CONTROLS[control]
    prompts = make_prompts()
    with (
        serve(
            make_checkpoint(kpool), caching, architecture=f"{BROKEN}:{module}"
        ) as server,
        pytest.raises(AssertionError, match=rf"^{wrong}: \d+ of 28 answers differ"),
    ):
        check_traffic(server, prompts, wanted(kpool, prompts))


def test_control_an_ape_row_off_is_noticed(serve, make_checkpoint, wanted, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(make_checkpoint(4), checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.kpool.ape"
    weights[name] = np.roll(weights[name], 1, axis=0)
    save_file(weights, checkpoint / "model.safetensors")
    prompts = separate_prompts()
    with (
        serve(checkpoint, "--no-enable-prefix-caching") as server,
        pytest.raises(AssertionError, match=r"^alone: \d+ of 28 answers differ"),
    ):
        check_traffic(server, prompts, wanted(4, prompts))


def test_control_one_row_for_all_is_refused_by_the_op(serve, make_checkpoint, wanted):
    prompts = separate_prompts()
    with serve(
        make_checkpoint(4),
        "--no-enable-prefix-caching",
        architecture=f"{BROKEN}:one_row",
    ) as server:
        with pytest.raises((AssertionError, OSError)):
            check_traffic(server, prompts, wanted(4, prompts))
        assert "ragged_update: slot_idx[1] must differ from every other row's" in (
            server.log.read_text()
        )


def architecture_in_the_docs() -> str:
    """The only Python of docs/serving.md that is a file."""
    page = (DOCS / "serving.md").read_text()
    (source,) = re.findall(r"```python title=\S+\n(.*?)```", page, re.DOTALL)
    return source


def test_the_docs_show_the_whole_example_in_less_than_120_lines():
    shown = architecture_in_the_docs()
    assert shown == (KPOOL_LLAMA / "__init__.py").read_text()
    assert len(shown.splitlines()) < 120
    assert [path.name for path in KPOOL_LLAMA.glob("*.py")] == ["__init__.py"]
