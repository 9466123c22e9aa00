"""The checkers of a server's answers, against a server that a test scripts."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kpool_graph.testing import (
    Client,
    Completion,
    Prompt,
    check_alone_equals_concurrent,
    check_answers,
)


def answer_to(tokens: list[int], count: int) -> list[int]:
    """What the scripted server says."""
    return [sum(tokens) + index for index in range(count)]


class Scripted(BaseHTTPRequestHandler):
    """Answers completions, whole or in pieces."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = [int(word[1:]) for word in body["prompt"].split()]
        words = [f"w{token}" for token in self.server.answer(asked, body)]
        self.server.asked.append(body)
        self.send_response(200 if words else 429)
        self.end_headers()
        if not words:
            self.wfile.write(b"too many requests")
        elif body["stream"]:
            # A piece is no word: text must be joined before it is read.
            for word in words:
                for part in (f" {word[:2]}", word[2:]):
                    choices = [{"text": part if part.strip() else None}]
                    line = f"data: {json.dumps({'choices': choices})}\n\n"
                    self.wfile.write(line.encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            details = {"cached_tokens": len(asked) // 2 or None}
            usage = {"prompt_tokens_details": details if asked[0] else None}
            text = {"choices": [{"text": " ".join(words)}], "usage": usage}
            self.wfile.write(json.dumps(text).encode())

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def server():
    """The scripted server; a test may replace what it answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.asked = []
    server.answer = lambda asked, body: answer_to(asked, body["max_tokens"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(server):
    return Client(server.server_port, "a model")


def test_a_request_asks_for_the_one_greedy_answer(client, server):
    assert client.complete(Prompt((3, 4), 5)) == Completion([7, 8, 9, 10, 11], 1)
    (body,) = server.asked
    assert body == {
        "model": "a model",
        "prompt": "w3 w4",
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    }


def test_a_server_without_a_cache_has_cached_nothing(client):
    assert client.complete(Prompt((0, 4), 1)) == Completion([4], 0)


def test_a_streamed_answer_is_put_together(client):
    answer = client.complete(Prompt((30, 40), 3, stream=True))
    assert answer == Completion([70, 71, 72], 0)


def test_a_cancelled_request_has_no_answer(client):
    assert client.complete(Prompt((3, 4), 50, cancel=True)) is None


def test_an_error_of_the_server_is_told(client, server):
    server.answer = lambda asked, body: []
    with pytest.raises(AssertionError, match="answers 429: too many requests"):
        client.complete(Prompt((3,), 1))


PROMPTS = [
    Prompt((index, 1), 4, stream=index % 2 == 0, cancel=index == 3)
    for index in range(1, 7)
]
WANTED = [answer_to(list(prompt.tokens), 4) for prompt in PROMPTS]


def test_right_answers_pass(client, server):
    answers = check_alone_equals_concurrent(client, PROMPTS, WANTED, rounds=3)
    assert len(answers) == 3 * 5
    # Once alone, except for the one that is hung up on.
    assert len(server.asked) == 5 + 3 * 6


def test_an_answer_that_depends_on_the_neighbours_is_noticed(client, server):
    together = threading.Barrier(len(PROMPTS), timeout=30)

    def answer(asked, body):
        right = answer_to(asked, body["max_tokens"])
        if len(server.asked) >= 5:
            together.wait()
            right[2] += asked[0] == 5
        return right

    server.answer = answer
    with pytest.raises(AssertionError) as error:
        check_alone_equals_concurrent(client, PROMPTS, WANTED)
    assert str(error.value) == (
        "concurrent, round 0: 1 of 5 answers differ; the first is that to prompt 4,"
        " from its token 2 of 4 on: got [9, 9], want [8, 9]"
    )


@pytest.mark.parametrize("got", [[5, 6], [5, 6, 7, 8], []])
def test_an_answer_of_another_length_is_noticed(got):
    with pytest.raises(AssertionError, match=r"^some: 1 of 1 answers differ"):
        check_answers("some", [Completion(got, 0)], [[5, 6, 7]])
