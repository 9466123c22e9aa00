"""Asks an OpenAI-compatible server for completions, and compares them."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_TIMEOUT = 300.0


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        tokens: Ids of the prompt's words.
        max_tokens: Tokens to answer.
        stream: Whether the answer comes in pieces.
        cancel: Whether to hang up after the first piece.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stream: bool = False
    cancel: bool = False


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        tokens: Ids of its words.
        cached: Prompt tokens that the server had in its prefix cache; 0 for a streamed
            answer, which does not say.
    """

    tokens: list[int]
    cached: int


class Client:
    """Asks a server on this machine. Word `w7` of a text is token 7."""

    def __init__(self, port: int, model: str) -> None:
        """Says whom to ask.

        Args:
            port: The server's port.
            model: The name that it serves the model under.
        """
        self._port = port
        self._model = model

    def complete(self, prompt: Prompt) -> Completion | None:
        """Sends one request and waits for its answer.

        Args:
            prompt: The request.

        Returns:
            The answer; None if the request was to be cancelled.

        Raises:
            OSError: If the server cannot be reached, or does not answer in time.
            AssertionError: If it answers with an error.
        """
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=_TIMEOUT
        )
        try:
            body = {
                "model": self._model,
                "prompt": " ".join(f"w{token}" for token in prompt.tokens),
                "max_tokens": prompt.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": prompt.stream or prompt.cancel,
            }
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise AssertionError(f"the server answers {response.status}: {text}")
            if not body["stream"]:
                return _read_whole(json.load(response))
            return _read_pieces(response, first_only=prompt.cancel)
        finally:
            # In the middle of a stream, this is what cancels the request.
            connection.close()

    def complete_all(
        self, prompts: Sequence[Prompt], at_once: int
    ) -> list[Completion | None]:
        """Sends many requests.

        Args:
            prompts: The requests.
            at_once: How many may be under way together.

        Returns:
            Their answers, in order; None for those that were to be cancelled.

        Raises:
            OSError: See `complete`.
            AssertionError: See `complete`.
        """
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.complete, prompts))


def _read_whole(answer: dict[str, Any]) -> Completion:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Completion(
        _tokens(answer["choices"][0]["text"]), details.get("cached_tokens") or 0
    )


def _read_pieces(
    response: http.client.HTTPResponse, first_only: bool
) -> Completion | None:
    text = ""
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        for choice in json.loads(line[len(b"data: ") :]).get("choices", []):
            text += choice["text"] or ""
        if first_only and text:
            return None
    return Completion(_tokens(text), cached=0)


def _tokens(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"w(\d+)", text)]


def check_answers(
    name: str,
    answers: Sequence[Completion | None],
    wanted: Sequence[Sequence[int]],
) -> None:
    """Requires every answer to be the one wanted.

    Args:
        name: What the answers are called in the error.
        answers: The answers; None is a request that was cancelled.
        wanted: The tokens of each.

    Raises:
        AssertionError: Naming the first that differs and how many do.
    """
    pairs = [
        (index, answer.tokens, list(want))
        for index, (answer, want) in enumerate(zip(answers, wanted, strict=True))
        if answer is not None
    ]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if differing:
        index, got, want = differing[0]
        agree = 0
        while agree < min(len(got), len(want)) and got[agree] == want[agree]:
            agree += 1
        raise AssertionError(
            f"{name}: {len(differing)} of {len(pairs)} answers differ; the first is"
            f" that to prompt {index}, from its token {agree} of {len(want)} on: got"
            f" {got[agree : agree + 5]}, want {want[agree : agree + 5]}"
        )


def check_alone_equals_concurrent(
    client: Client,
    prompts: Sequence[Prompt],
    wanted: Sequence[Sequence[int]],
    *,
    rounds: int = 2,
) -> list[Completion]:
    """Requires a request's answer not to depend on its neighbours.

    Each prompt is sent alone, then all of them at once, `rounds` times. All answers
    must be those wanted, and so equal.

    Args:
        client: Asks the server.
        prompts: The requests. Those to be cancelled are sent in the rounds only.
        wanted: The tokens to be answered to each.
        rounds: How often to send them all at once.

    Returns:
        The answers to concurrent requests, those that were compared.

    Raises:
        AssertionError: Naming the first answer that differs.
        OSError: See `Client.complete`.
    """
    alone = [None if each.cancel else client.complete(each) for each in prompts]
    check_answers("alone", alone, wanted)
    compared: list[Completion] = []
    for number in range(rounds):
        answers = client.complete_all(prompts, at_once=len(prompts))
        check_answers(f"concurrent, round {number}", answers, wanted)
        compared += [answer for answer in answers if answer is not None]
    return compared
