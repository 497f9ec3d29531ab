"""The `ritornello` command: `python -m ritornello`."""

import signal
import sys

from ritornello._core import run_cli


def main() -> int:
    """Runs the command with this process's arguments; returns its exit status."""
    # The command is not Python: Ctrl-C is to end it, not to wait for the interpreter's turn.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_cli(["ritornello", *sys.argv[1:]], sys.executable)


if __name__ == "__main__":
    sys.exit(main())
