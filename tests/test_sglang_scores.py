"""Tests of ``tracer.hosts.sglang_scores`` against a small local server that answers as the documentation says.

No live SGLang was tried."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tracer.errors import Code, ScoreError, UsageError
from tracer.format.score_records import ScoreDefinition, ScoreKind, ScoreName
from tracer.hosts.sglang_scores import collect_sglang
from tracer.scores.score_comparison import compare_scores

PROMPTS = [[11, 12, 13], [21, 22]]


def score(ids: list[int], at: int) -> float:
    """A score that depends on the prefix alone."""
    return -(sum(ids[: at + 1]) % 97 + 1) / 16


class Server(ThreadingHTTPServer):
    """``spoil``: changes an answer before it is sent. ``seen``: paths and bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, Any]] = []
        self.spoil: Any = None
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content: Any = json.loads(body) if body else None
        server.seen.append((self.path, content))
        answer: Any = "Cache flushed."
        if self.path == "/generate":
            ids = content["input_ids"]
            new = [30 + n for n in range(content["sampling_params"].get("max_new_tokens", 4))]
            whole = ids + new
            given = [[None if at == content["logprob_start_len"] else score(whole, at), ids[at], None] for at in range(len(ids))]
            made = [[score(whole, len(ids) + n), token, None] for n, token in enumerate(new)]
            meta = {"id": "x", "weight_version": "7", "input_token_logprobs": given, "output_token_logprobs": made}
            answer = {"text": "", "output_ids": new, "meta_info": meta}
            if server.spoil is not None:
                answer = server.spoil(answer)
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server."""
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_generation_and_two_replays(server: Server) -> None:
    """A comes from what was generated, B from the scores of the input; the cache is flushed before each replay, ids are sent as ids."""
    records = collect_sglang(server.url + "/", PROMPTS, sampling={"max_new_tokens": 4, "temperature": 1.0}, requests=["x", "y"])
    assert [path for path, _ in server.seen] == ["/generate"] * 2 + ["/flush_cache", "/generate", "/generate"] * 2
    assert server.seen[3][1]["input_ids"] == [11, 12, 13, 30, 31, 32, 33]
    assert [record.request for record in records] == ["x", "y"]
    assert set(records[0].scores) == {ScoreName.A, ScoreName.B0, ScoreName.B1}
    assert records[0].scores[ScoreName.A].info.policies[0].version == "7"
    result = compare_scores(records)
    assert (result.exit, result.pairs[0].bitwise_differing, result.counts.tokens) == (0, 0, 8)


def test_scores_after_a_temperature_are_declared(server: Server) -> None:
    """Generated at another temperature, A is declared so and refused against the raw replay; original scores are raw."""
    warm = collect_sglang(server.url, PROMPTS, sampling={"temperature": 0.7})
    assert warm[0].scores[ScoreName.A].info.definition == ScoreDefinition(kind=ScoreKind.TEMPERATURE, temperature=0.7)
    with pytest.raises(ScoreError) as refused:
        compare_scores(warm)
    assert refused.value.code is Code.SCORES_DEFINITIONS
    penal = collect_sglang(server.url, PROMPTS, sampling={"repetition_penalty": 1.2, "top_p": 0.9}, repeats=0)
    assert penal[0].scores[ScoreName.A].info.definition.settings == {"repetition_penalty": 1.2}
    original = collect_sglang(server.url, PROMPTS, sampling={"temperature": 0.7}, original_logprobs=True)
    assert compare_scores(original).exit == 0


def test_saved_records_are_only_replayed(server: Server) -> None:
    """Records that hold their tokens already are scored again, with the caller's way of emptying the cache or none."""
    records = collect_sglang(server.url, PROMPTS, repeats=0)
    server.seen.clear()
    resets: list[int] = []
    again = collect_sglang(server.url, records, reset_cache=lambda: resets.append(1))
    assert (len(resets), {path for path, _ in server.seen}) == (2, {"/generate"})
    assert set(again[0].scores) == {ScoreName.A, ScoreName.B0, ScoreName.B1}
    collect_sglang(server.url, records, reset_cache=False, repeats=1)
    assert {path for path, _ in server.seen} == {"/generate"}


def other_ids(answer: Any) -> Any:
    for entry in answer["meta_info"]["input_token_logprobs"][1:]:
        entry[1] += 1
    return answer


@pytest.mark.parametrize(
    "spoil",
    [
        other_ids,
        lambda answer: {"meta_info": {}},
        lambda answer: {"meta_info": 3},
        lambda answer: [answer],
        lambda answer: {"meta_info": {"input_token_logprobs": [3]}},
    ],
    ids=["other ids", "no scores", "no object", "a list", "no triples"],
)
def test_other_answers_are_refused(spoil: Any, server: Server) -> None:
    """An answer with other ids, or of another shape, is refused, naming request and score."""
    records = collect_sglang(server.url, PROMPTS, repeats=0)
    server.spoil = spoil
    with pytest.raises(ScoreError) as refused:
        collect_sglang(server.url, records)
    assert (refused.value.code, "B0" in refused.value.where) == (Code.SCORES_COLLECT, True)


def test_a_server_that_fails(server: Server) -> None:
    """An error status, an unreachable server and an address that is none are refused with their codes."""
    server.status = 400
    with pytest.raises(ScoreError) as refused:
        collect_sglang(server.url, PROMPTS)
    assert (refused.value.code, "400" in refused.value.found) == (Code.SCORES_COLLECT, True)
    with pytest.raises(ScoreError) as unreachable:
        collect_sglang("http://127.0.0.1:9", PROMPTS, timeout_s=5)
    assert unreachable.value.code is Code.SCORES_COLLECT
    with pytest.raises(UsageError) as wrong:
        collect_sglang("file:///x", PROMPTS)
    assert wrong.value.code is Code.BAD_ARGUMENT
