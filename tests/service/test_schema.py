"""Schemathesis derives valid and invalid requests from the service's OpenAPI document, and compares
the service's answers with the document.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from service_process import ADMIN, get, serving

# Maximum number of generated requests for each route, in each phase of Schemathesis.
EXAMPLES = 30
# Requests per second, below the limit of the service.
RATE = "80/s"


def test_answers_follow_openapi_document(tmp_path: Path) -> None:
    schemathesis = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
    if not schemathesis:
        pytest.skip("schemathesis is not installed: `make test-service` installs it")
    with serving(tmp_path) as address:
        words = [schemathesis, "run", f"{address}/openapi.json", "--no-color"]
        words += ["--header", f"Authorization: Bearer {ADMIN}", "--rate-limit", RATE]
        words += ["--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "30"]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
        paths = get(f"{address}/openapi.json")["paths"]
        # Schemathesis does not test the route of the document itself.
        del paths["/openapi.json"]
        routes = sum(name in path for path in paths.values() for name in ("get", "post", "put"))
        assert f"Tested: {routes}" in ran.stdout, ran.stdout
        # Requests with unknown scopes and settings changed nothing.
        scopes = get(f"{address}/v1/scopes")["stores"][0]
        assert scopes["scopes_total"] == 2, scopes
        assert all(scope["quota_bytes"] is None for scope in scopes["scopes"])
