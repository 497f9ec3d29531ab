"""The core's log in Python's `logging`.

The core appends lines to a bounded queue, and a thread of Python takes them, so that no thread of
the core waits for the interpreter or for a handler. Lines go to loggers below `ritornello.core`,
such as `ritornello.core.store.put`, or below the logger that an engine's adapter named with
`log_below`. If `logging` has no handler for them, they go to standard error with their time.

`RITORNELLO_LOG` chooses the levels that the core logs, warnings and errors by default. If the
variable is set, the loggers of the core let these levels pass; handlers can still refuse them.
"""

import atexit
import logging
import sys
import threading

from ritornello import _core

# Longest time that the exit of the process waits for a handler.
_EXIT_SECONDS = 5.0

_parent = "ritornello"
_level: int | None = None


def log_below(parent: str) -> None:
    """Makes the core log to loggers below `parent`, for engines that handle only their lines."""
    global _parent
    _parent = parent
    _apply_level()


def start(level: int | None) -> None:
    """Starts the thread that takes lines. `level` is the lowest level in `RITORNELLO_LOG`, `None`
    if the variable is unset. The core calls this once in a process, when it starts to log.
    """
    global _level
    _level = level
    _apply_level()
    thread = threading.Thread(target=_forward_lines, name="ritornello-log", daemon=True)
    thread.start()
    # Runs before the stores are closed: lines of their closing go to standard error.
    atexit.register(_end, thread)


def _apply_level() -> None:
    if _level is not None:
        logging.getLogger(f"{_parent}.core").setLevel(_level)


def _end(thread: threading.Thread) -> None:
    _core.end_log()
    thread.join(_EXIT_SECONDS)


def _forward_lines() -> None:
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    while (lines := _core.take_log_lines()) is not None:
        for level, target, message, fields, time, thread, file, line in lines:
            path = target.removeprefix("ritornello_").replace("::", ".")
            logger = logging.getLogger(f"{_parent}.core.{path}")
            if not logger.isEnabledFor(level):
                continue
            record = logger.makeRecord(
                logger.name, level, file, line, message, (), None, extra={"fields": dict(fields)}
            )
            record.created, record.msecs, record.threadName = time, time % 1 * 1000, thread
            if not logger.hasHandlers():
                stderr.handle(record)
                continue
            try:
                logger.handle(record)
            except Exception:
                # A handler or a filter of the program failed.
                stderr.handle(record)
