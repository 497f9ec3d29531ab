"""A client of the OpenAI API that records when each chunk of an answer arrives: streamed
completions over asyncio.

The client uses one connection for each request, plain HTTP, and the standard library only. The
client therefore runs on every Python that can import this package.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

# A prompt is token ids, which need no tokenizer and have an exact length, or text.
Prompt = tuple[int, ...] | str

CONNECT_SECONDS = 10.0
LINE_BYTES = 16 << 20


class ServingError(Exception):
    """The server cannot be measured. The message says what to do next, unless it only repeats an
    error that the server sent within an answer.
    """


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. Times are seconds since the request began, connecting included.

    `arrivals`: the time of each chunk with tokens. `cached_tokens`: the server's count, None if the
    server sends no count (vLLM sends it with `--enable-prompt-tokens-details`).
    """

    answer: Prompt
    arrivals: tuple[float, ...]
    total_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None


@dataclass(slots=True)
class Server:
    """An OpenAI API. `base_url`: `http://HOST:PORT`, with or without `/v1`."""

    base_url: str
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        whole = self.base_url if "://" in self.base_url else f"http://{self.base_url}"
        parts = urlsplit(whole)
        if parts.scheme != "http" or not parts.hostname:
            raise ServingError(f"--base-url {self.base_url}: write it like http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or 80
        self.path = parts.path.rstrip("/").removesuffix("/v1")

    async def get(self, path: str, deadline_s: float = CONNECT_SECONDS) -> str:
        """Returns the body at `path`. ServingError if the connection fails, the status is not 200,
        or the body has not ended within `deadline_s` seconds.
        """
        try:
            async with asyncio.timeout(deadline_s):
                body = [line async for line in self._stream_lines("GET", path, None)]
        except TimeoutError as error:
            raise ServingError(
                f"{self.base_url}{path}: no answer within {deadline_s:g} s: "
                "look into the server's log"
            ) from error
        return b"".join(body).decode(errors="replace")

    async def models(self) -> list[str]:
        """Returns the names of the served models. ServingError if the server does not tell them."""
        try:
            reply_text = json.loads(await self.get("/v1/models"))
            return [str(model["id"]) for model in reply_text["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServingError(
                f"{self.base_url} does not speak the OpenAI API (/v1/models): "
                "give --base-url the address that `vllm serve` printed"
            ) from error

    async def complete(self, body: Mapping[str, Any], deadline_s: float) -> Reply:
        """Sends a completion (`prompt`, `max_tokens`, `model`...), streamed, and reads the answer.
        ServingError if it fails or takes longer than `deadline_s` seconds.
        """
        request_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        ids: list[int] = []
        texts: list[str] = []
        arrivals: list[float] = []
        usage: Mapping[str, Any] = {}
        began = perf_counter()
        try:
            async with (
                asyncio.timeout(deadline_s),
                aclosing(self._stream_lines("POST", "/v1/completions", request_body)) as lines,
            ):
                async for line in lines:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = self._parse(line[6:])
                    if "error" in chunk:
                        raise ServingError(f"{self.base_url}: {chunk['error']}")
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or ():
                        text, new = choice.get("text") or "", choice.get("token_ids") or []
                        if text or new:
                            arrivals.append(perf_counter() - began)
                            texts.append(text)
                            ids += new
        except TimeoutError as error:
            raise ServingError(
                f"{self.base_url}: no answer within {deadline_s:g} s: use a larger --timeout, "
                "or fewer concurrent requests"
            ) from error
        wants_ids = not isinstance(body["prompt"], str)
        if wants_ids and arrivals and not ids:
            raise ServingError(
                f"{self.base_url} does not return token ids: add --prompts text "
                "(vLLM returns them since 0.10.2)"
            )
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            answer=tuple(ids) if wants_ids else "".join(texts),
            arrivals=tuple(arrivals),
            total_s=perf_counter() - began,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            answer_tokens=int(usage.get("completion_tokens") or len(ids) or len(texts)),
            cached_tokens=details.get("cached_tokens"),
        )

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            chunk: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise ServingError(
                f"{self.base_url} sent a chunk that is not JSON ({data[:100]!r}): look into the "
                "server's log"
            ) from error
        return chunk

    async def _stream_lines(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncGenerator[bytes]:
        """Yields the lines of the response's body, as they arrive."""
        payload = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            "Accept: */*\r\nConnection: close\r\n\r\n"
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, limit=LINE_BYTES
                )
        except (OSError, TimeoutError) as error:
            raise ServingError(
                f"nothing answers at {self.base_url}: start a server (vllm serve MODEL --port "
                f"{self.port}), or give --base-url the address of a server"
            ) from error
        try:
            writer.write(head.encode() + payload)
            await writer.drain()
            status, chunked, length = await _head_of(reader)
            lines = _chunked(reader) if chunked else _plain(reader, length)
            if status != 200:
                text = b"".join([line async for line in lines]).decode(errors="replace")
                raise ServingError(_status_error(self.base_url, path, status, text))
            async for line in lines:
                yield line
        except (OSError, EOFError, ValueError) as error:
            raise ServingError(
                f"{self.base_url} broke off the answer ({error}): look into the server's log"
            ) from error
        finally:
            writer.close()


async def _head_of(reader: asyncio.StreamReader) -> tuple[int, bool, float]:
    """Returns the status, whether the body comes in chunks, and the length of a body that does not:
    infinite if the response does not state the length.
    """
    status = (await reader.readline()).split()
    if len(status) < 2 or not status[1].isdigit():
        raise EOFError("no HTTP response")
    chunked, length = False, inf
    while (line := (await reader.readline()).strip().lower()) != b"":
        name, _, value = line.partition(b":")
        chunked |= name == b"transfer-encoding" and value.endswith(b"chunked")
        if name == b"content-length":
            length = int(value)
    return int(status[1]), chunked, length


async def _plain(reader: asyncio.StreamReader, length: float) -> AsyncIterator[bytes]:
    """Yields lines until the body has `length` bytes or, if `length` is infinite, until the server
    closes the connection.
    """
    while length > 0 and (line := await reader.readline()):
        length -= len(line)
        yield line
    if 0 < length < inf:
        raise EOFError(f"{length:.0f} bytes are missing")


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields lines from HTTP chunks, whose boundaries may be anywhere."""
    rest = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _status_error(base_url: str, path: str, status: int, body: str) -> str:
    """Returns an error message for a response whose status is not 200, with a remedy."""
    reply_text = body[:300].strip()
    if status == 404 and path == "/v1/completions":
        return f"{base_url} does not serve this model: give --model a name of {base_url}/v1/models"
    if status == 404:
        return f"{base_url}{path} was not found: give --base-url the address of an OpenAI API"
    if status == 400:
        return (
            f"{base_url} refused the prompt ({reply_text}): use a shorter prompt, or serve with a "
            "larger --max-model-len"
        )
    return f"{base_url}{path}: {status} {reply_text}: look into the server's log"
