"""A server of the OpenAI API that computes nothing: it delays by given times, remembers prompts,
and reports counters under vLLM's names.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

BLOCK = 16
Told = TypeVar("Told")


@dataclass
class FakeOpenAI:
    """The server. `prefill_s` is the delay of an answer's first token, `gap_s` the delay of each
    further token, in seconds. The tokens of an answer depend only on the prompt and, for text, on
    the hash seed of the Python process; the request sets their number. With `ids` answers contain
    token ids if the request asks for them. With `usage` answers end with the numbers of tokens of
    the prompt and of the answer. With `metrics` the server serves `/metrics`. With `breaks_after`
    the server closes the connection after this number of tokens. The server answers a request for
    a completion with the status `fails`, or with the bytes `sends`, if one of them is set.
    """

    prefill_s: float = 0.0
    gap_s: float = 0.0
    model: str = "fake"
    ids: bool = True
    usage: bool = True
    metrics: bool = True
    breaks_after: int | None = None
    fails: int | None = None
    sends: bytes = b""
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known: set[tuple[Any, ...]] = field(default_factory=set)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self.url
        finally:
            server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = (await reader.readline()).decode().split()
        length = 0
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = json.loads(await reader.readexactly(length) or b"{}")
        try:
            if path == "/v1/models":
                _say(writer, 200, json.dumps({"data": [{"id": self.model}]}))
            elif path == "/slow":
                await asyncio.sleep(30)
            elif path == "/metrics" and self.metrics:
                _say(writer, 200, self._metrics())
            elif path == "/v1/completions" and method == "POST":
                await self._complete(body, writer)
            else:
                _say(writer, 404, "not here")
            await writer.drain()
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        if self.fails is not None:
            _say(writer, self.fails, '{"error": "the fake server fails"}')
            return
        if self.sends:
            writer.write(self.sends)
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._stream(body, writer)
        finally:
            self.running -= 1

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body["prompt"]
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        cached = self._remember(tokens)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.prefill_s)
        answer = [3 + (sum(map(hash, tokens)) + place) % 200 for place in range(body["max_tokens"])]
        for place, token in enumerate(answer):
            if place:
                await asyncio.sleep(self.gap_s)
            if place == self.breaks_after:
                return
            choice: dict[str, Any] = {"text": f"w{token} "}
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            _chunk(writer, {"choices": [choice]})
            await writer.drain()
        if self.usage:
            told = {"prompt_tokens": len(tokens), "completion_tokens": len(answer)}
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            _chunk(writer, {"choices": [], "usage": {**told, **details}})
        # Splits lines over chunks, as a proxy may.
        writer.write(b"6\r\ndata: \r\n7\r\n[DONE]\n\r\n0\r\n\r\n")

    def _remember(self, tokens: list[Any]) -> int:
        """Returns how many leading tokens of the prompt, in whole blocks, an earlier prompt had. A
        block that ends with its prompt does not count.
        """
        blocks = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
        hits = 0
        for block in blocks:
            if block not in self.known:
                break
            hits += 1
        self.known.update(blocks)
        self.prompt_tokens += len(tokens)
        self.cached_tokens += hits * BLOCK
        return hits * BLOCK

    def _metrics(self) -> str:
        same = f'engine="0",model_name="{self.model}"'
        pages = self.cached_tokens // BLOCK
        return (
            "# HELP vllm:prompt_tokens_total Prompt tokens.\n"
            f"vllm:prompt_tokens_total{{{same}}} {float(self.prompt_tokens)}\n"
            f'vllm:prompt_tokens_cached_by_source_total{{{same},source="device"}} 0.0\n'
            f'vllm:prompt_tokens_cached_by_source_total{{{same},source="disk"}} '
            f"{float(self.cached_tokens)}\n"
            f"vllm:ritornello_hit_pages_total{{{same}}} {float(pages)}\n"
            f"vllm:ritornello_hit_pages_created{{{same}}} 1.7e9\n"
            f'vllm:ritornello_missed_pages_total{{{same},reason="not_found"}} 2.0\n'
        )


def _say(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    data = body.encode()
    head = f"HTTP/1.1 {status} Told\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def _chunk(writer: asyncio.StreamWriter, told: dict[str, Any]) -> None:
    data = f"data: {json.dumps(told)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def with_servers(
    servers: list[FakeOpenAI], test: Callable[[list[str]], Coroutine[Any, Any, Told]]
) -> Told:
    """Runs the servers and `test`, which gets their addresses, in one event loop."""

    async def serve() -> Told:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            return await test([await stack.enter_async_context(s.serving()) for s in servers])

    return asyncio.run(serve())
