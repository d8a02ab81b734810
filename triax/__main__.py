"""``python -m triax`` and the command ``triax``: the first lines that run, which Ctrl-C may hit too."""

import os
import sys


def main() -> None:
    """Run the command line of this process and leave with its exit code; interrupted before it is read, with 130."""
    import signal

    def leave(_number: int, _frame: object) -> None:
        # Nothing was begun. An exception might end in the middle of some import, which makes another error of it.
        os.write(2, b"triax: interrupted.\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background of a shell
        signal.signal(signal.SIGINT, leave)
    from triax.cli import run
    from triax.train.stop import SIGNALS

    code = run(sys.argv[1:])
    # The command is over, and its exit code says how: asked once more to end, it has nothing left to do. No handler of
    # our own here: Python gives those up while it still tidies up, and the default kills.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
