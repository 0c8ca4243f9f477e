"""IO processors with one mistake each, and right ones."""

from __future__ import annotations

import numpy as np

from hardpoint import SamplingParams
from hardpoint.plugins import Annotated, IOProcessor, Meta, RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.typed import Strict, convert
from support.samples import Sample, leave_file, leave_thread, spend

SAMPLES = ({"rows": [[1.0, 0.5], [3.0]]}, {"rows": [[0.5] * 9], "name": "half"})
REFUSED = ({"rows": []}, {"rows": [[]]}, {"rows": [[1.0]], "nmae": "x"})

Row = Annotated[list[Annotated[float, Meta(ge=0, le=100)]], Meta(min_length=1, max_length=99)]


class Request(Strict):
    rows: Annotated[list[Row], Meta(min_length=1)]
    name: str = ""


class Rows(Sample, IOProcessor, contract=1):
    """Right: a token per number, a vector per row."""

    Request = Request

    def pre_process(self, request):
        return [([int(number) for number in row], PoolingParams()) for row in request.rows]

    def post_process(self, request, outputs):
        return {"name": request.name, "vectors": np.stack([output.outputs for output in outputs])}


class ByHand(Rows):
    """Right: checks by hand, and lets the model write; an empty list needs no prompt."""

    Request = None

    def parse_request(self, data):
        rows = data.get("rows") if isinstance(data, dict) and data.keys() <= {"rows", "name"} else 0
        if not isinstance(rows, list) or not rows:
            raise RequestError("data.rows: expected a list of rows")
        for place, row in enumerate(rows):
            if not isinstance(row, list) or not row or not set(map(type, row)) <= {float}:
                raise RequestError(f"data.rows[{place}]: expected a list of numbers")
        return [" ".join(f"{number:.3g}" for number in row) for row in rows]

    def pre_process(self, request):
        return [(text, SamplingParams(max_tokens=8, n=2)) for text in request]

    def post_process(self, request, outputs):
        return [completion.text for output in outputs for completion in output.outputs]


class Pairs(Rows):
    """Right: takes the means of two vectors each, in rounds, until one is left."""

    def post_process(self, request, outputs):
        tokens = [len(output.prompt_token_ids) for output in outputs]
        while len(outputs) > 1:
            tokens = [sum(tokens[place : place + 2]) % 100 for place in range(0, len(tokens), 2)]
            outputs = yield [([token], PoolingParams()) for token in tokens]
        return {"name": request.name, "vector": outputs[0].outputs}


class NoContract(Rows, contract=None):
    pass


class NoRequest(Sample, IOProcessor, contract=1):
    """Neither declares its input nor parses it."""

    def pre_process(self, request):
        return []

    def post_process(self, request, outputs):
        return outputs


class NoAnswer(Rows):
    def post_process(self, request, outputs):
        return {"vectors": outputs[1].outputs}


class Trusts(Rows):
    """Does not validate its input."""

    Request = None

    def parse_request(self, data):
        return Request(rows=data["rows"], name=data.get("name", ""))


class Lenient(Rows):
    """Accepts invalid input."""

    class Request(Request, kw_only=True):
        nmae: str = ""


class Vague(Rows):
    def parse_request(self, data):
        try:
            return super().parse_request(data)
        except RequestError:
            raise RequestError("this is wrong") from None


class Texts(Rows):
    """Returns prompts without parameters."""

    def pre_process(self, request):
        return ["a text" for _ in request.rows]


class TooLong(Rows):
    def pre_process(self, request):
        return [([1] * 40 * len(row), PoolingParams()) for row in request.rows]


class OutOfVocabulary(Rows):
    def pre_process(self, request):
        return [([200 + int(100 * n) for n in row], PoolingParams()) for row in request.rows]


class KeepsTheName(Rows):
    """Keeps the state of a call in the processor."""

    def pre_process(self, request):
        self.request = request
        return super().pre_process(request)

    def post_process(self, request, outputs):
        return super().post_process(self.request, outputs)


class NeverReturns(Rows):
    """Has one round after the other."""

    def post_process(self, request, outputs):
        while True:
            yield [([1], PoolingParams())]


class GoesOn(Rows):
    """Yields prompts after it was closed."""

    def post_process(self, request, outputs):
        try:
            outputs = yield [([1], PoolingParams())]
        finally:
            outputs = yield [([2], PoolingParams())]
        return {"vector": outputs[0].outputs}


class TooLongLater(Rows):
    """Has a second prompt that is too long."""

    def post_process(self, request, outputs):
        outputs = yield [([1] * 200, PoolingParams())]
        return {"vector": outputs[0].outputs}


class YieldsTexts(Rows):
    """Yields prompts without parameters."""

    def post_process(self, request, outputs):
        outputs = yield ["a text"]
        return {"vector": outputs[0].outputs}


class KeepsTheRound(Pairs):
    """Keeps the state of a round in the processor."""

    def post_process(self, request, outputs):
        self.request = request
        outputs = yield [([len(outputs)], PoolingParams())]
        return {"name": self.request.name, "vector": outputs[0].outputs}


class ChangesLater(Rows):
    """Changes the outputs of a later round."""

    def post_process(self, request, outputs):
        outputs = yield [([1], PoolingParams())]
        outputs[0].outputs *= 2
        return {"vector": outputs[0].outputs}


class Counts(Rows):
    """Has another answer each time."""

    count = 0

    def post_process(self, request, outputs):
        self.count += 1
        return {"count": self.count}


class Sorts(Rows):
    """Changes the input."""

    Request = None

    def parse_request(self, data):
        request = convert(data, Request, path="data", error=RequestError)
        data["rows"].sort()
        data["rows"].reverse()
        return request


class Scales(Rows):
    """Changes the outputs of the model."""

    def post_process(self, request, outputs):
        for output in outputs:
            output.outputs *= 2
        return super().post_process(request, outputs)


class Objects(Rows):
    def output_to_response(self, output):
        return {"answer": object()}


class NotANumber(Rows):
    def post_process(self, request, outputs):
        return {"mean": float("nan")}


class SortsLists(Rows):
    """Sorts the lists of the caller."""

    Request = None

    def parse_request(self, data):
        return data

    def pre_process(self, request):
        convert(request, Request, path="data", error=RequestError)
        for row in request["rows"]:
            row.sort()
        return [([int(number) for number in row], PoolingParams()) for row in request["rows"]]

    def post_process(self, request, outputs):
        return super().post_process(convert(request, Request, path="data"), outputs)


class Appends(Rows):
    """Appends to the outputs of the model, in the place where the caller has them, too."""

    def post_process(self, request, outputs):
        answer = super().post_process(request, outputs)
        outputs.clear()
        return answer


class Sleeps(Rows):
    """Waits for something."""

    def pre_process(self, request):
        spend(0.3)
        return super().pre_process(request)


class SleepsForSeconds(Rows):
    """Waits for longer than the suite permits by default."""

    def pre_process(self, request):
        spend(3.0)
        return super().pre_process(request)


class Slow(Rows):
    def post_process(self, request, outputs):
        spend(0.001)
        return super().post_process(request, outputs)


class KeepsRequests(Rows):
    """Keeps each request."""

    def __init__(self, context):
        super().__init__(context)
        self.requests = {}

    def post_process(self, request, outputs):
        self.requests[id(request)] = request
        return super().post_process(request, outputs)


class LeavesThread(Rows):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("io")


class LeavesFile(Rows):
    def post_process(self, request, outputs):
        leave_file()
        return super().post_process(request, outputs)


class IgnoresTheModel(Rows):
    def post_process(self, request, outputs):
        return {"rows": len(outputs)}
