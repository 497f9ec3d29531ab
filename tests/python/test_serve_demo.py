"""`make serve-demo` without engines: its load, its claims, and its processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import demo.serve
from demo.chat import ALONE_PAGES, CONVERSATIONS, TURNS, ChatLoad
from demo.outcome import demonstrate
from demo.serve_report import EVICTED, HIT, NOT_STORED, Explained, Observed, broken_claims
from ritornello.bench.metrics import Metrics
from servers.process import Process, ServerError
from servers.vllm import ChatAnswer, VLLMServer


@dataclass
class FakeVLLM(VLLMServer):
    """Records the prompts, and answers each with its number."""

    prompts: list[tuple[str, list[str], bool]] = field(default_factory=list)

    def chat(
        self,
        messages: list[dict[str, str]],
        answer_tokens: int,
        request_id: str,
        options: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        history = [message["content"] for message in messages]
        self.prompts.append((request_id, history, options is None))
        return ChatAnswer(f"chatcmpl-{request_id}", f"answer {len(self.prompts)}")


def test_conversations_grow_and_are_replaced() -> None:
    server = FakeVLLM("fake", Path(), Path(), Path(), 0)
    load = ChatLoad(server)
    load.begin()
    for _ in range(CONVERSATIONS * TURNS + 1):
        load.next_turn()
    (once, _, is_stored), (private, _, is_private_stored), *turns = server.prompts
    assert (load.alone, load.not_stored) == (f"chatcmpl-{once}", f"chatcmpl-{private}")
    assert is_stored and not is_private_stored
    assert len(load.asked) == len(set(load.asked)) == len(server.prompts)
    names = [name for name, _, _ in turns]
    assert names[: CONVERSATIONS + 1] == [
        *(f"conversation-{number}-turn-1" for number in range(1, CONVERSATIONS + 1)),
        "conversation-1-turn-2",
    ]
    last = names.index(f"conversation-1-turn-{TURNS}")
    assert names[last + 1] == f"conversation-{CONVERSATIONS + 1}-turn-1"
    first = [history for name, history, _ in turns if name.startswith("conversation-1-")]
    assert len(first) == TURNS
    for earlier, later in pairwise(first):
        assert later[: len(earlier)] == earlier and len(later) == len(earlier) + 2
    # Conversations begin differently, so they share no page.
    begins = {name.partition("-turn-")[0]: history[0][:20] for name, history, _ in server.prompts}
    assert len(set(begins.values())) == len(begins) > CONVERSATIONS + 2


def entries(answer: str, detail: str = "", seconds_ago: int | None = None) -> list[dict[str, Any]]:
    span = {
        "at": 0,
        "pages": ALONE_PAGES,
        "answer": answer,
        "detail": detail,
        "seconds_ago": seconds_ago,
    }
    return [{"request_id": "a-1", "explanation": {"spans": [span]}}]


def explained(of: list[dict[str, Any]]) -> Explained:
    return Explained("a", "", of, of)


GONE = entries("evicted", "space", 3)
METRICS = """ritornello_hit_pages_total{store="/s",tier="disk"} 5
ritornello_evicted_pages_total{store="/s",cause="space"} 7
"""
GOOD = Observed(
    ready=200,
    asked=("a", "b"),
    decided=[{"request_id": "b-2f"}, {"request_id": "a-1c"}],
    service=Metrics.parse(METRICS),
    engine=Metrics(),
    explained={
        HIT: explained(entries("hit")),
        EVICTED: explained(GONE),
        NOT_STORED: explained(entries("unknown")),
    },
)


def with_evicted(by_command: list[dict[str, Any]], by_service: list[dict[str, Any]]) -> Observed:
    return replace(
        GOOD, explained={**GOOD.explained, EVICTED: Explained("a", "", by_command, by_service)}
    )


def test_good_observation_breaks_no_claim() -> None:
    assert broken_claims(GOOD) == []


@pytest.mark.parametrize(
    ("observed", "claim"),
    [
        (replace(GOOD, ready=503), "/readyz answers 503"),
        (replace(GOOD, service=Metrics.parse(METRICS.replace(" 5", " 0"))), "ritornello_hit_pages"),
        (replace(GOOD, service=Metrics.parse(METRICS[:48])), "ritornello_evicted_pages"),
        (replace(GOOD, decided=GOOD.decided[:1]), "no decision about a"),
        (replace(GOOD, decided=[{"request_id": "ab-1"}, *GOOD.decided[:1]]), "no decision about a"),
        (replace(GOOD, explained={EVICTED: explained(GONE)}), f"tells of {HIT}"),
        (with_evicted([], GONE), "ritornello explain does not call"),
        (with_evicted(GONE, entries("unknown")), "POST /v1/explain does not call"),
        (with_evicted(GONE, entries("evicted", "", 3)), "POST /v1/explain does not call"),
        (with_evicted(entries("evicted", "space"), GONE), "ritornello explain does not call"),
    ],
)
def test_broken_claim_is_named(observed: Observed, claim: str) -> None:
    broken = broken_claims(observed)
    assert any(claim in line for line in broken), broken


@dataclass
class Script(Process):
    """A process that runs a shell script, and is up when its output has the line `up`."""

    script: str
    log: Path
    name: str = "script"
    start_seconds = 30.0

    def _command(self) -> list[str]:
        return ["sh", "-c", self.script]

    def _environment(self) -> dict[str, str]:
        return {}

    def _is_up(self) -> bool:
        return "up" in self.log.read_text().split()


def test_failed_start_prints_the_end_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: Console) -> list[str]:
        with Script("seq 1000 1099; echo [/no] cause; exit 3", tmp_path / "log"):
            raise AssertionError("the script did not fail")

    assert demonstrate(run) == 2
    printed = capsys.readouterr().out
    assert "[/no] cause" in printed and "1099" in printed and "1000" not in printed
    assert "did not start: it ended" in printed


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt, also in a background process, where shells ignore it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_stops_the_started_process(tmp_path: Path, sign: signal.Signals) -> None:
    before = signal.getsignal(sign)
    found: list[subprocess.Popen[bytes]] = []

    def run(_: Console) -> list[str]:
        with Script("echo up; exec sleep 600", tmp_path / "log") as started:
            assert started.process is not None
            found.append(started.process)
            os.kill(os.getpid(), sign)
            found[0].wait(60)
        return []

    assert demonstrate(run) == 2
    assert found[0].poll() is not None
    assert signal.getsignal(sign) == before


def test_interrupted_stop_kills_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script("trap '' TERM; echo up; while :; do sleep 0.1; done", tmp_path / "log")
    script.start()
    process = script.process
    assert process is not None
    wait = process.wait
    left = [1]

    def interrupted(seconds: float | None = None) -> int:
        if left:
            left.pop()
            raise KeyboardInterrupt
        return wait(seconds)

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.stop()
    assert process.returncode == -signal.SIGKILL


def test_second_demonstration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.serve, "FOLDER", tmp_path)
    with (
        demo.serve.alone(),
        pytest.raises(ServerError, match="another serve-demo"),
        demo.serve.alone(),
    ):
        pass
    with demo.serve.alone():
        pass


def test_page_bytes_follow_model_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = '{"num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 64}'
    (tmp_path / "config.json").write_text(shape)
    monkeypatch.setattr(demo.serve, "fast_dtype", lambda: "bfloat16")
    assert demo.serve.page_bytes(tmp_path) == 393_216
    monkeypatch.setattr(demo.serve, "fast_dtype", lambda: "float32")
    assert demo.serve.page_bytes(tmp_path) == 786_432
