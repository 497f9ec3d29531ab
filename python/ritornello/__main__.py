"""The `ritornello` command: `python -m ritornello`."""

import signal
import sys

from ritornello._core import run_cli


def main() -> int:
    """Runs the command with this process's arguments and returns its exit status."""
    # Python's handler of SIGINT would run only after the native code of the command has returned.
    # With the default action, Ctrl-C ends the process, unless the command handles SIGINT itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_cli(["ritornello", *sys.argv[1:]], sys.executable)


if __name__ == "__main__":
    sys.exit(main())
