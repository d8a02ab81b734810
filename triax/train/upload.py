"""How does a run hand its finished checkpoints to an object store, and get one back where its folder has none?"""

import threading
import time
from collections.abc import Callable

from triax.checkpoint.agree import Ranks
from triax.checkpoint.store import Store, Uploader
from triax.checkpoint.verify import newest_step
from triax.errors import BadInput, TriaxError
from triax.spec.plan import Plan
from triax.train.run_folder import RunFolder


def open_uploader(plan: Plan, folder: RunFolder, ranks: Ranks) -> Uploader | None:
    """Return what copies the checkpoints of a run to its store, on rank 0; None on others and where it has no store."""
    url = plan.run.checkpoint.upload
    if url is None or ranks.rank != 0:
        return None
    return Uploader(Store(url), folder.checkpoints, plan.fingerprint, plan.run.checkpoint.keep)


def fetch_if_none(plan: Plan, folder: RunFolder, ranks: Ranks) -> list[str]:
    """Bring the newest checkpoint of the run's store to its folder where that has none; return what went wrong.

    All ranks call it together, and rank 0 does it. A store that cannot be read ends the start: to begin anew beside
    states that are only out of reach would waste them. Raises TriaxError, on every rank; BadInput for a wrong URL.
    """
    url = plan.run.checkpoint.upload
    if url is None or newest_step(folder.checkpoints, ranks.group):
        return []
    told: list[str] = []
    faults: list[tuple[bool, str]] = []

    def fetch() -> None:
        try:
            told.extend(_fetch(Store(url), folder))
        except BadInput as error:
            faults.append((True, str(error)))
        except Exception as error:  # of any driver
            said = f"{type(error).__name__}: {str(error)[:200]}"
            faults.append((False, f"checkpoint.upload = {url!r} cannot be read: {said}; start again when it can."))

    _beside(fetch, ranks)
    answer = ranks.broadcast([told, faults])
    for is_bad_input, sentence in answer[1]:
        raise BadInput(sentence) if is_bad_input else TriaxError(sentence)
    return list(answer[0])


def _beside(do: Callable[[], None], ranks: Ranks) -> None:
    """Do something on rank 0 that may take longer than ranks wait for each other in one message."""
    thread = threading.Thread(target=do, daemon=True) if ranks.rank == 0 else None
    if thread is not None:
        thread.start()
    while any(ranks.maxima(thread is not None and thread.is_alive())):
        time.sleep(0.05)


def _fetch(store: Store, folder: RunFolder) -> list[str]:
    told: list[str] = []
    for name in store.complete():
        try:
            store.pull(name, folder.checkpoints)
            return told
        except BadInput as error:
            told.append(f"{name} in the store was passed over: {error}.")
    return told
