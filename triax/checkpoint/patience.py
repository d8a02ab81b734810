"""How is a disk asked something without waiting for it for ever? A network disk may hang for hours and then go on."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


@dataclass
class _Question(Generic[_Answer]):
    do: Callable[[], _Answer]
    answers: list[_Answer] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def ask(self) -> None:
        try:
            self.answers.append(self.do())
        except Exception as error:  # raised again where the answer is waited for
            self.errors.append(error)


class Asker:
    """Asks one thing at a time, on a thread of its own; what is not answered in time may still be done later."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def ask(self, do: Callable[[], _Answer], patience_s: float) -> _Answer:
        """Return what ``do`` returns, or raise what it raises.

        Raises TimeoutError after ``patience_s``, and at once while an earlier question is not answered yet.
        """
        if self._thread is not None and self._thread.is_alive():
            raise TimeoutError("the disk does not answer")
        question = _Question(do)
        self._thread = threading.Thread(target=question.ask, name="ask-disk", daemon=True)
        self._thread.start()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise TimeoutError("the disk does not answer")
        self._thread = None
        if question.errors:
            raise question.errors[0]
        return question.answers[0]
