"""The drivers of the serving benchmark, `ritornello.bench`, against servers that compute nothing
and answer with known delays.
"""

import asyncio
import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import pytest
from fake_openai import FakeOpenAI, with_servers

from ritornello.bench.client import Server, ServingError
from ritornello.bench.driver import Driver, Record, Workload
from ritornello.bench.long_context import LongContext
from ritornello.bench.multi_round_qa import MultiRoundQA
from ritornello.bench.multi_turn import MultiTurn, ReadyQueue, Waiting
from ritornello.bench.prompts import Source, joined

IDS, TEXT = Source(1), Source(1, text=True)


def qa(source: Source = IDS, **changes: Any) -> MultiRoundQA:
    flags: dict[str, Any] = {
        "num_users": 4,
        "num_rounds": 3,
        "qps": 400.0,
        "shared_system_prompt": 32,
        "user_history_prompt": 64,
        "answer_len": 4,
        "question_len": 16,
    }
    return MultiRoundQA(source, **(flags | changes))


def documents(**changes: Any) -> LongContext:
    flags: dict[str, Any] = {
        "num_documents": 5,
        "document_length": 100,
        "output_len": 3,
        "repeat_count": 2,
        "repeat_mode": "random",
        "max_inflight_requests": 2,
    }
    return LongContext(IDS, **(flags | changes))


def turns(source: Source = IDS, **changes: Any) -> MultiTurn:
    flags: dict[str, Any] = {
        "num_clients": 6,
        "num_rounds": 3,
        "request_length": 40,
        "output_length": 4,
        "request_rate": 1000.0,
        "max_parallel": 2,
    }
    return MultiTurn(source, **(flags | changes))


def run(workload: Workload, *servers: FakeOpenAI, deadline_s: float = 30.0) -> list[Record]:
    async def test(urls: list[str]) -> list[Record]:
        return await Driver([Server(url) for url in urls], "fake", deadline_s).run(workload)

    return with_servers(list(servers), test)


def by_place(records: Sequence[Record]) -> dict[tuple[int, int], Record]:
    return {(record.session, record.round): record for record in records}


# ---- requests


@pytest.mark.parametrize("source", [IDS, TEXT])
def test_piece_of_prompt_depends_on_seed_and_name(source: Source) -> None:
    again = Source(source.seed, source.text)
    assert source.piece("a", 50) == again.piece("a", 50)
    assert source.piece("a", 50) != source.piece("b", 50)
    assert source.piece("a", 50) != Source(source.seed + 1, source.text).piece("a", 50)


def test_text_and_ids_cannot_be_joined() -> None:
    assert joined((1, 2), (3,)) == (1, 2, 3)
    assert joined("a ", "b ") == "a b "
    with pytest.raises(TypeError, match="a prompt is either text or token ids"):
        joined("a", (1,))


@pytest.mark.parametrize(
    "workload",
    [qa(), qa(TEXT), documents(), documents(hit_miss_ratio=(2, 1)), turns(), turns(TEXT)],
)
def test_same_seed_sends_same_requests(workload: Any) -> None:
    def asked() -> list[Any]:
        server = FakeOpenAI()
        assert not any(record.error for record in run(workload, server))
        return sorted((body["prompt"] for body in server.asked), key=str)

    first = asked()
    assert first == asked()
    assert len(first) == workload.requests


def test_prompt_contains_whole_conversation() -> None:
    server = FakeOpenAI()
    found = by_place(run(qa(), server))
    assert len(found) == 12
    prompts = {len(body["prompt"]): body["prompt"] for body in server.asked}
    system = IDS.piece("system", 32)
    for user in range(4):
        for number in range(3):
            record = found[user, number]
            assert record.prompt_tokens == 32 + 64 + 16 + number * (4 + 16)
            assert record.history_tokens == (record.prompt_tokens - 16 if number else 0)
    assert all(tuple(prompt[:32]) == system for prompt in prompts.values())
    last = [body["prompt"] for body in server.asked if len(body["prompt"]) == 152]
    assert all(tuple(found[u, 0].answer) in _windows(last, 4) for u in range(4))


def _windows(prompts: list[list[int]], length: int) -> set[tuple[int, ...]]:
    return {tuple(p[at : at + length]) for p in prompts for at in range(len(p) - length + 1)}


def test_user_rounds_alternate_between_servers() -> None:
    first, second = FakeOpenAI(), FakeOpenAI()
    for record in run(qa(), first, second):
        assert record.server == (record.session + record.round) % 2
    assert len(first.asked) == len(second.asked) == 6


def test_users_have_different_prompts() -> None:
    server = FakeOpenAI()
    run(qa(num_rounds=1), server)
    run(qa(num_rounds=1, init_user_id=4), server)
    assert len({tuple(body["prompt"]) for body in server.asked}) == 8


def test_timed_run_replaces_users_until_end() -> None:
    server = FakeOpenAI(prefill_s=0.001)
    records = run(qa(time_s=0.2, qps=200.0), server)
    assert len({record.session for record in records}) > 4
    # The driver reads the clock a short time before it sends.
    assert all(record.sent_s < 0.2 + 0.1 for record in records)


def test_user_that_wakes_after_end_sends_no_request() -> None:
    class Sleepy(Driver):
        async def until(self, moment: float) -> None:
            await super().until(moment)
            self.began = perf_counter() - 0.2

    async def test(urls: list[str]) -> list[Record]:
        async with asyncio.timeout(5):
            return await Sleepy([Server(url) for url in urls], "fake", 30.0).run(qa(time_s=0.2))

    assert with_servers([FakeOpenAI()], test) == []


def test_ramp_up_starts_users_mid_conversation() -> None:
    ramped = qa(num_users=6, num_rounds=3, time_s=5.0)
    assert [ramped.rounds_of(place) for place in range(6)] == [3, 3, 2, 2, 1, 1]
    assert qa(time_s=5.0, ramp_up=False).rounds_of(3) == 3
    assert qa().rounds_of(3) == 3
    assert qa(time_s=5.0).requests is None


@pytest.mark.parametrize(
    ("mode", "order"),
    [("tile", [0, 1, 2, 0, 1, 2]), ("interleave", [0, 0, 1, 1, 2, 2])],
)
def test_documents_repeat_in_order_of_mode(mode: str, order: list[int]) -> None:
    assert documents(num_documents=3, repeat_mode=mode).order() == order


def test_random_order_repeats_every_document_equally() -> None:
    order = documents(num_documents=20).order()
    assert order == documents(num_documents=20).order()
    assert order != documents(num_documents=20, shuffle_seed=1).order()
    assert sorted(order) == sorted([*range(20)] * 2)


def test_documents_are_sent_before_questions() -> None:
    server = FakeOpenAI()
    records = run(documents(hit_miss_ratio=(3, 1)), server)
    assert [record.round for record in records] == [0] * 5 + [1] * 10
    fresh = [record for record in records if record.round and not record.history_tokens]
    assert len(fresh) == 2
    assert all(record.session >= 5 for record in fresh)
    assert server.most_running == 2
    for record in records:
        assert (record.cached_tokens or 0) == (96 if record.history_tokens else 0)


@pytest.mark.parametrize("policy", ["random", "fifo"])
def test_parallel_requests_are_limited(policy: str) -> None:
    server = FakeOpenAI(prefill_s=0.002)
    workload = turns(ready_queue_policy=policy, sub_question_input_length=10)
    found = by_place(run(workload, server))
    assert len(found) == 18
    assert server.most_running <= 2
    assert [found[0, number].prompt_tokens for number in range(3)] == [40, 54, 68]
    assert [found[0, number].history_tokens for number in range(3)] == [0, 44, 58]


def test_fifo_policy_takes_longest_waiting_client() -> None:
    clients = [Waiting(number, 0, (), 0) for number in range(20)]

    def order(policy: str, seed: int) -> list[int]:
        queue = ReadyQueue(policy, random.Random(seed))
        for client in clients:
            queue.append(client)
        return [queue.pop().client for _ in clients]

    assert order("fifo", 1) == order("fifo", 2) == [*range(20)]
    assert order("random", 1) == order("random", 1) != order("random", 2)
    assert sorted(order("random", 1)) == [*range(20)]


@pytest.mark.parametrize("distribution", ["poisson", "uniform"])
def test_requests_arrive_at_mean_rate(distribution: str) -> None:
    workload = turns(distribution=distribution, request_rate=4.0)
    chance = random.Random(5)
    pauses = [workload.pause_s(chance) for _ in range(20_000)]
    assert sum(pauses) / len(pauses) == pytest.approx(0.25, rel=0.05)


# ---- measured times


def test_measured_times_include_server_delays() -> None:
    server = FakeOpenAI(prefill_s=0.05, gap_s=0.01)
    for record in run(qa(num_users=2, num_rounds=1, answer_len=5), server):
        assert record.ttft_s >= 0.05
        assert len(record.gaps_s) == 4
        assert sum(record.gaps_s) >= 0.039
        assert record.total_s >= record.ttft_s + sum(record.gaps_s)
        assert record.answer_tokens == 5


def test_tokens_are_counted_without_server_usage() -> None:
    server = FakeOpenAI(usage=False)
    for record in run(qa(num_rounds=1), server):
        assert (record.prompt_tokens, record.answer_tokens) == (112, 4)
        assert record.cached_tokens is None


def test_extra_fields_are_in_every_request() -> None:
    server = FakeOpenAI()

    async def test(urls: list[str]) -> None:
        extra = {"kv_transfer_params": {"ritornello.no_load": True}}
        await Driver([Server(urls[0])], "fake", extra=extra).run(qa(num_rounds=1))

    with_servers([server], test)
    assert all(body["kv_transfer_params"] == {"ritornello.no_load": True} for body in server.asked)


# ---- failures

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
CHUNK = b'data: {"choices": [{"text": "a ", "token_ids": [1]}]}\n\n'


def failed(workload: Workload, server: FakeOpenAI, **options: float) -> str:
    records = run(workload, server, **options)
    # A session ends with its first failure, so all requests belong to round 0.
    assert {record.round for record in records} == {0}
    (error,) = {str(record.error).replace(server.url, "URL") for record in records}
    return error


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (FakeOpenAI(fails=404), "give --model a name of URL/v1/models"),
        (FakeOpenAI(fails=400), "larger --max-model-len"),
        (FakeOpenAI(fails=500), "look into the server's log"),
        (FakeOpenAI(ids=False), "add --prompts text"),
        (FakeOpenAI(breaks_after=0), "broke off the answer"),
        (FakeOpenAI(breaks_after=2), "broke off the answer"),
        (FakeOpenAI(sends=ANSWER % (len(CHUNK) + 1) + CHUNK), "(1 bytes are missing)"),
        (FakeOpenAI(sends=ANSWER % 14 + b'data: {"choice'), "not JSON (b'{\"choice')"),
    ],
)
@pytest.mark.parametrize("workload", [qa(num_users=2), turns(num_clients=2)])
def test_failure_says_what_to_do(workload: Workload, server: FakeOpenAI, told: str) -> None:
    assert told in failed(workload, server)


def test_answer_without_chunked_encoding_is_read() -> None:
    server = FakeOpenAI(sends=ANSWER % len(CHUNK) + CHUNK)
    records = run(qa(num_rounds=1), server)
    assert [(record.error, record.answer) for record in records] == [(None, (1,))] * 4


def test_text_prompts_need_no_token_ids() -> None:
    assert not any(record.error for record in run(qa(TEXT), FakeOpenAI(ids=False)))


def test_hanging_completion_times_out() -> None:
    told = failed(qa(num_users=2), FakeOpenAI(prefill_s=30.0), deadline_s=0.2)
    assert "no answer within 0.2 s" in told


def test_hanging_http_get_times_out() -> None:
    async def test(urls: list[str]) -> None:
        with pytest.raises(ServingError, match=r"/slow: no answer within 0\.1 s"):
            await Server(urls[0]).get("/slow", 0.1)

    with_servers([FakeOpenAI()], test)


def test_failed_document_has_no_history() -> None:
    records = run(documents(num_documents=2), FakeOpenAI(fails=500))
    assert len(records) == 6
    assert all(record.error and not record.history_tokens for record in records)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://", "ftp://host"])
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ServingError, match=r"write it like http://127\.0\.0\.1:8000"):
        Server(url)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://127.0.0.1:8000/v1/", "localhost:8000/v1"]
)
def test_address_may_lack_scheme_or_end_with_v1(url: str) -> None:
    server = Server(url)
    assert (server.port, server.path) == (8000, "")
