"""The core's log in Python's `logging`.

The core appends lines to a bounded queue, and a thread of Python takes them, so that no thread of
the core waits for the interpreter or for a handler. Lines go to loggers below `ritornello.core`,
such as `ritornello.core.store.put`, or below the logger that an engine's adapter named with
`log_below`. If `logging` has no handler for them, they go to standard error with their time.

`RITORNELLO_LOG` chooses the levels that the core logs, warnings and errors by default. If the
variable is set, the loggers of the core let these levels pass, unless the program has set a level
on their common parent; handlers can still refuse them.
"""

import atexit
import logging
import sys
import threading

from ritornello import _core

# Longest time that the exit of the process waits for a handler.
_EXIT_SECONDS = 5.0
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")

_parent = "ritornello"
_level: int | None = None


def log_below(parent: str) -> None:
    """Makes the core log to loggers below `parent`, for engines that handle only their lines."""
    global _parent
    _parent = parent


def start(level: int | None) -> None:
    """Starts the thread that takes lines. `level` is the lowest level in `RITORNELLO_LOG`, `None`
    if the variable is unset. The core calls this once in a process, when it starts to log.
    """
    global _level
    _level = level
    thread = threading.Thread(target=_forward_lines, name="ritornello-log", daemon=True)
    thread.start()
    # Runs before the stores are closed: lines of their closing go to standard error.
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    _core.end_log()
    thread.join(_EXIT_SECONDS)
    _core.end_log(print=True)


def _forward_lines() -> None:
    while (line := _core.take_log_line()) is not None:
        level, target, message, *_ = line
        try:
            _handle(*line)
        except BaseException:  # of a handler, a filter or a factory of the program
            print(f"{logging.getLevelName(level)} {target}: {message}", file=sys.stderr, flush=True)


def _handle(
    level: int,
    target: str,
    message: str,
    fields: list[tuple[str, str]],
    time: float,
    thread: str,
    file: str,
    line: int,
) -> None:
    top = logging.getLogger(f"{_parent}.core")
    if _level is not None and top.level == logging.NOTSET:
        top.setLevel(_level)
    logger = top.getChild(target.removeprefix("ritornello_").replace("::", "."))
    # `logging.config` disables all loggers that it does not name, so `disabled` does not mean that
    # the user silences the core. Levels do.
    logger.disabled = False
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, file, line, message, (), None)
    record.fields = dict(fields)
    record.created, record.msecs, record.threadName = time, time % 1 * 1000, thread
    if logger.hasHandlers():
        logger.handle(record)
    else:
        print(_FORMATTER.format(record), file=sys.stderr, flush=True)
