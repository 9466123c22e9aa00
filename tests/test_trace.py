"""`kpool trace` shows what the ring holds, and which rejections cost a pool."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from kpool_graph import min_ring_len
from kpool_graph._trace_steps import Pool, Token, Trace, trace
from kpool_graph._trace_svg import draw
from kpool_graph._trace_text import report
from kpool_graph.cli import main


def follow(ring_len: int, reject: int = 2, **sizes: int) -> Trace:
    sizes = {"kpool": 4, "next_n": 3, "steps": 6, **sizes}
    return trace(ring_len=ring_len, reject=reject, **sizes)


def wrong(followed: Trace) -> list[int]:
    return [pool.id for pool in followed.pools if pool.strays]


def test_each_token_takes_the_entry_that_its_position_names():
    for write in (write for step in follow(6).steps for write in step.writes):
        assert write.entry == write.token.position % 6


def test_steps_go_on_at_the_first_rejected_position():
    firsts = [step.writes[0].token.position for step in follow(6, reject=1).steps]
    assert firsts == [0, 2, 4, 6, 8, 10]


def test_a_plain_ring_loses_a_member_to_a_rejected_token():
    third, fourth = follow(4).steps[2:4]
    [write] = third.lost
    assert (write.token, write.entry) == (Token(4, True), 0)
    assert write.replaced == Token(0, False)
    [pool] = fourth.closed
    assert pool.strays == [(0, Token(4, True))]


@pytest.mark.parametrize("kpool", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("next_n", [1, 2, 3, 5])
def test_the_shortest_safe_ring_closes_every_pool_right(kpool: int, next_n: int):
    for reject in range(next_n):
        safe = min_ring_len(kpool, next_n, commits_at_least=next_n - reject)
        sizes = {"kpool": kpool, "next_n": next_n, "steps": 40}
        assert wrong(follow(safe, reject=reject, **sizes)) == []
        if safe > kpool:
            # Found only if a step ends where the bound is tight.
            tight = any(
                step.live and len(step.live) == kpool - 1
                for step in follow(safe, reject=reject, **sizes).steps
            )
            assert bool(wrong(follow(safe - 1, reject=reject, **sizes))) == tight


def test_a_pool_closed_by_a_rejected_token_closes_again():
    closed = [
        (pool.id, pool.provisional) for step in follow(6).steps for pool in step.closed
    ]
    assert closed[:3] == [(0, True), (0, True), (0, False)]


def test_an_entry_that_was_never_written_is_a_stray():
    members = (None, Token(1, False))
    assert Pool(0, members, provisional=False).strays == [(0, None)]


def test_the_report_names_the_lost_token_and_counts_the_wrong_pools():
    text = report([follow(4), follow(6)])
    plain, wide = text.split("ring_len 6, a wide ring\n")
    assert "(4) took entry 0 from 0, still needed" in plain
    assert "pool 0 closes WRONG: (4) 1 2 3" in plain
    assert "Pools closed for good: 1. Wrong: 1." in plain
    assert "WRONG" not in wide
    assert "pool 0 closes: 0 1 2 3" in wide
    assert "Pools closed for good: 1. Wrong: 0." in wide


def test_the_drawing_shows_the_same_cells():
    root = ElementTree.fromstring(draw([follow(4), follow(6)]))
    svg = "{http://www.w3.org/2000/svg}"
    kinds = [each.get("class") for each in root.iter(f"{svg}rect")]
    # One in the legend.
    assert kinds.count("lost") == 2
    words = [each.text for each in root.iter(f"{svg}text")]
    assert "pool 0 closes WRONG: (4) 1 2 3" in words
    assert words.count("(4)") == sum(
        str(token) == "(4)"
        for followed in (follow(4), follow(6))
        for step in followed.steps
        for token in step.entries
    )


def test_the_command_prints_both_rings_and_writes_the_drawing(tmp_path, capsys):
    picture = tmp_path / "ring.svg"
    arguments = ["trace", "--kpool", "4", "--next-n", "3", "--reject", "2"]
    assert main([*arguments, "--steps", "6", "--svg", str(picture)]) == 0
    assert report([follow(4), follow(6)]) in capsys.readouterr().out
    assert picture.read_text(encoding="utf-8") == draw([follow(4), follow(6)])


def test_one_token_a_step_needs_no_second_ring(capsys):
    assert main(["trace", "--next-n", "1", "--reject", "0"]) == 0
    assert capsys.readouterr().out.count("ring_len") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kpool", "0"], "kpool must be at least 1, got 0"),
        (["--next-n", "0"], "next_n must be at least 1, got 0"),
        (["--reject", "3"], "reject (3) must be below next_n (3)"),
        (["--reject", "-1"], "reject must be at least 0, got -1"),
        (["--ring-len", "3"], "ring_len (3) must be at least kpool (4)"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, message, capsys):
    assert main(["trace", *arguments]) == 2
    assert message in capsys.readouterr().err
