"""Which ways can a command end, and with which exit code?

A message is one sentence a user can act on: what was asked, why it cannot be, and what would be legal.
``cli`` prints the message and leaves with ``exit_code``; nothing else in triax calls ``sys.exit``.
"""


class TriaxError(Exception):
    """Something a user should read as a sentence, never as a traceback. Exit code 1: the run failed."""

    exit_code = 1


class BadInput(TriaxError):
    """What the user asked for cannot be done as asked; nothing was changed. Exit code 2."""

    exit_code = 2


class StoppedByGuard(TriaxError):
    """The guard stopped a run that would have burned on: non-finite numbers, impossible loss. Exit code 3."""

    exit_code = 3


class Preempted(TriaxError):
    """The run was asked to stop, saved its state and can be started again unchanged. Exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(TriaxError):
    """Somebody pressed Ctrl-C where there was nothing to save. Exit code 130, as shells say of SIGINT."""

    exit_code = 130


class Superseded(TriaxError):
    """Others have gone on with the run, and these ranks may write nothing any more. Exit code 1: they train no more."""
