"""Processes that share a store's directory, forked processes, and processes that end without
closing their store.
"""

import os
import textwrap
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from support import SMALL, blank, keys_of, open_small, pages_of

import ritornello as rt
from ritornello.errors import ClosedError
from servers.child import Child

PAGE = 5000
SCOPE = rt.Scope.opaque("processes", PAGE, chained=True)

PRELUDE = """
import sys, time
from test_processes import *
"""


def start(code: str, *arguments: str | Path) -> Child:
    """Starts a process that runs `code` with this module's names."""
    return Child(PRELUDE + textwrap.dedent(code), *arguments, stderr=PIPE)


def end(process: Child) -> str:
    """Returns the output of a process that must succeed without standard error."""
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return out


def put(store: rt.Store, name: str, pages: int = 4) -> int:
    keys = keys_of(name, pages)
    return store.put_batch(SCOPE, keys, pages_of(keys, PAGE))


def holds(store: rt.Store, name: str, pages: int = 4) -> bool:
    keys, out = keys_of(name, pages), blank(pages, PAGE)
    return store.get_batch(SCOPE, keys, out) == pages and bool((out == pages_of(keys, PAGE)).all())


def test_second_process_becomes_client(where: Path) -> None:
    with open_small(where) as store:
        put(store, "mine")
        child = start(
            """
            with rt.Store.open(sys.argv[1]) as store:
                assert (store.role, store.answers_at_once) == ("client", False)
                assert holds(store, "mine")
                assert put(store, "theirs") == 4
                ticket = store.submit_put(
                    SCOPE, keys_of("t", 4), pages_of(keys_of("t", 4), PAGE), copy=True
                )
                assert ticket.wait(30).pages == 4
                with store.lease_prefix(SCOPE, keys_of("t", 4)) as match:
                    assert match.pages == 4
                assert store.delete(SCOPE, keys_of("mine", 4)[:1]) == 1
                assert store.stats()["clients"] == 1
                store.flush()
            print("done")
            """,
            where,
        )
        assert end(child) == "done\n"
        assert store.role == "owner"
        assert holds(store, "theirs")
        assert holds(store, "t")
        assert store.probe(SCOPE, keys_of("mine", 4)) == 0


def test_racing_processes_share_one_new_store(where: Path) -> None:
    code = """
        sys.stdin.readline()
        with rt.Store.open(sys.argv[1], **SMALL) as store:
            assert put(store, sys.argv[2]) == 4
            assert holds(store, sys.argv[2])
        print("done")
        """
    children = [start(code, where, str(n)) for n in range(4)]
    for child in children:
        child.send("go")
    assert [end(child) for child in children] == ["done\n"] * 4
    with rt.Store.open(where) as store:
        assert all(holds(store, str(n)) for n in range(4))


def test_client_takes_over_dead_owner(where: Path) -> None:
    owner = start(
        """
        store = rt.Store.open(sys.argv[1], **SMALL)
        put(store, "before")
        store.flush()
        print(store.role, flush=True)
        sys.stdin.readline()
        """,
        where,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "owner\n"
    with rt.Store.open(where) as store:
        assert store.role == "client"
        assert holds(store, "before")
        owner.kill()
        owner.communicate(timeout=60)
        assert holds(store, "before")
        assert put(store, "after") == 4
        assert holds(store, "after")
        deadline = time.monotonic() + 30
        while store.role != "owner" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.role == "owner"


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del store"])
def test_exit_without_close_keeps_stored_pages(where: Path, ending: str) -> None:
    child = start(
        f"""
        store = rt.Store.open(sys.argv[1], **SMALL)
        put(store, "stored")
        keys = keys_of("in flight", 8)
        tickets = [store.submit_put(SCOPE, keys, pages_of(keys, PAGE)) for _ in range(8)]
        {ending}
        """,
        where,
    )
    end(child)
    with rt.Store.open(where) as store:
        assert holds(store, "stored")


def in_a_fork(check: str, store: rt.Store, where: Path, ticket: rt.Ticket) -> None:
    """Checks, in a forked child, that the parent's store and ticket are closed there, and that the
    child can open the store as a client.
    """
    assert store.closed, check
    for use in (lambda: put(store, "x"), store.stats, ticket.wait):
        with pytest.raises(ClosedError, match="fork"):
            use()
    store.close()
    with rt.Store.open(where) as mine:
        assert mine.role == "client"
        assert holds(mine, "parent's")
        assert put(mine, "child's") == 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_opens_its_own_store(where: Path) -> None:
    with open_small(where) as store:
        put(store, "parent's")
        ticket = store.submit_get(SCOPE, keys_of("parent's", 4), blank(4, PAGE))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                in_a_fork("child", store, where, ticket)
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + 60
        done, status = 0, 0
        while not done and time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        assert done
        assert os.waitstatus_to_exitcode(status) == 0
        assert not store.closed
        assert holds(store, "parent's")
        assert holds(store, "child's")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_does_not_hold_directory(where: Path) -> None:
    """The parent closes its store while the child, which never used it, still runs. The store can
    then be opened as the owner.
    """
    store = open_small(where)
    put(store, "kept")
    child = os.fork()
    if child == 0:
        time.sleep(5)
        os._exit(0)
    try:
        store.close()
        with rt.Store.open(where, **SMALL) as again:
            assert again.role == "owner"
            assert holds(again, "kept")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
