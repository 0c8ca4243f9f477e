"""Step parts for live changes: the tokens and figures that they give show their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint import plugins
from hardpoint.plugins import EngineHalf, FrontendHalf, StepPart, WorkerHalf
from support.samples import Sample

FIRST = 10


class Mark(Sample, StepPart, contract=1):
    """Forces one token in the requests with its tag, by all of its halves together."""

    changes_live = True

    class Options(plugins.Options):
        mark: int = 0

    def frontend_half(self, context: Any) -> FrontendHalf:
        """Return a half that tags requests."""
        del context
        return Tagging(self.options.mark)

    def engine_half(self, context: Any) -> EngineHalf:
        """Return a half that sends its option to the workers."""
        del context
        self.half = Sending(self.name, self.options.mark)
        return self.half

    def worker_half(self, context: Any) -> WorkerHalf:
        """Return a half that forces the sent token."""
        del context
        return Forcing(self.options.mark)

    def dump_state(self) -> Mapping[str, Any]:
        """Return the option, and how many requests were seen."""
        return {"mark": self.options.mark, "seen": getattr(self, "half", None) and self.half.seen}

    def close(self) -> None:
        """Note that it is closed, in this process."""
        CLOSED.append(self.options.mark)


CLOSED: list[int] = []


class Tagging(FrontendHalf):
    """Tags the requests that ask for it with the option of this process."""

    def __init__(self, mark: int) -> None:
        self._mark = mark

    def prepare(self, request: Any, reasoning: Any) -> None:
        """Tag it."""
        del reasoning
        if "marked" in request.tags:
            request.tags = {**request.tags, "mark": str(self._mark)}

    def reads_answer(self, request: Any) -> bool:
        """Return that answers of marked requests are read."""
        return "mark" in request.tags

    def validate(self, request: Any, answer: str) -> str | None:
        """Find fault with a request of another option."""
        del answer
        mark = request.tags["mark"]
        return None if mark == str(self._mark) else f"{mark} is not {self._mark}"


class Sending(EngineHalf):
    """Checks tags and reports."""

    def __init__(self, name: str, mark: int) -> None:
        self._name, self._mark, self.seen = name, mark, 0

    def uses(self, request: Any) -> bool:
        """Return whether it is tagged."""
        return "mark" in request.tags

    def check(self, request: Any) -> None:
        """Check that the halves of one generation work together."""
        self.seen += 1
        if request.tags["mark"] != str(self._mark):
            raise ValueError(f"tag {request.tags['mark']}, own mark {self._mark}")

    def begin(self, plan: Any) -> bytes:
        """Send the option."""
        del plan
        return str(self._mark).encode()

    def result(self, plan: Any, result: Any) -> Mapping[str, Any]:
        """Check that each worker had the same option."""
        if plan.num_scheduled_tokens:
            marks = set(result.part_reports[self._name].values())
            if marks != {str(self._mark).encode()}:
                raise ValueError(f"reports {marks}, own mark {self._mark}")
        return {}

    def figures(self, request_id: str) -> Mapping[str, float]:
        """Return the option."""
        del request_id
        return {"mark": self._mark}


class Forcing(WorkerHalf):
    """Forces the token of the option."""

    def __init__(self, mark: int) -> None:
        self._mark = mark

    def begin(self, plan: Any, data: bytes) -> None:
        """Check that the halves of one generation work together."""
        del plan
        if int(data) != self._mark:
            raise ValueError(f"sent {data!r}, own mark {self._mark}")

    def logits(self, logits: Any, request_ids: Sequence[str]) -> Any:
        """Force it."""
        del request_ids
        logits = logits.clone()
        logits[:] = float("-inf")
        logits[:, FIRST + self._mark] = 0.0
        return logits

    def report(self) -> bytes:
        """Return the option."""
        return str(self._mark).encode()


class Fixed(Mark):
    """Does not state that it can be changed."""

    changes_live = False


class Keyed(Mark):
    """States that it can be changed, and gives keys to blocks."""

    def engine_half(self, context: Any) -> EngineHalf:
        """Return a half with keys."""
        del context
        return Keys(self.name, self.options.mark)


class Keys(Sending):
    """Gives keys to blocks."""

    def block_key(self, request: Any, span: range) -> bytes | None:
        """Return a key for all."""
        del request, span
        return b"key"


class Breaking(Mark):
    """Cannot be built in workers."""

    def worker_half(self, context: Any) -> WorkerHalf:
        """Fail."""
        del context
        raise RuntimeError("no worker half today")
