"""What is a rank told when its process starts? Torch-free: the process that starts ranks needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told when its process starts."""

    plan: str
    """The plan as JSON."""
    run_text: str
    """The run file as the user wrote it; empty where there is none."""
    folder: str
    """The run's folder."""
    tokens: str | None
    """Address of the prepared corpus; None: this server's first rank prepares them."""
    quiet: bool = False
    places: str | None = None
    """File of ``triax.train.places``; None: nobody waits for this rank's last word."""
    generation: int | None = None
    """Number of the set of ranks, where agents of several servers decide which one may write; None: there is one."""
    asks_rank_0: bool = False
    """The layout is rank 0's to say: the plan of any other rank holds for its run alone."""


def work(order: Order) -> None:
    """Train as one of several local ranks; leave the process with the exit code where it is not 0."""
    from triax.train.worker import leave, train_as_rank

    code = train_as_rank(order)
    if code:
        leave(code)
