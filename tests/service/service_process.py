"""A process of `ritornello serve`, its store and its tokens."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import ritornello as rt

# A token that permits all requests, and a token that permits reading.
ADMIN = "admin-0123456789abcdef0123456789abcdef"
READ = "read-0123456789abcdef0123456789abcdef"
PAGE_BYTES = 16 << 10
PAGES = 64


def command() -> str:
    """Returns the path of `ritornello`: `RITORNELLO_COMMAND`, or the installed command."""
    return os.environ.get("RITORNELLO_COMMAND") or str(Path(sys.executable).with_name("ritornello"))


def use(store: rt.Store, name: str) -> None:
    """Puts pages of a scope that is named `name`, and looks up stored and missing pages."""
    scope = rt.Scope.opaque(name, PAGE_BYTES, chained=True)
    keys = [f"{name}-{page:08}".encode() for page in range(PAGES)]
    pages = [np.full(PAGE_BYTES, page, np.uint8) for page in range(PAGES)]
    assert store.put_batch(scope, keys, pages) == PAGES
    assert store.probe(scope, [*keys, *(key[::-1] for key in keys)]) == PAGES


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serves a store in `root` that has pages of two scopes. Yields the address."""
    store = root / "kv"
    with rt.Store.open(store, capacity="64MiB", segment_bytes=4 << 20) as opened:
        use(opened, "a model")
    tokens = root / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"admin {ADMIN}\nread {READ}\n")
    words = [command(), "serve", str(store), "--http", "127.0.0.1:0", "--tokens", str(tokens)]
    with subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            listening = json.loads(process.stdout.readline())
            assert listening["event"] == "listening"
            assert json.loads(process.stdout.readline())["event"] == "ready"
            with rt.Store.open(store) as client:
                use(client, 'a "model"\n')
            yield f"http://{listening['address']}"
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def get(url: str, token: str = READ) -> Any:
    """Returns the JSON answer to a GET request."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
