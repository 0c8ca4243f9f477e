"""`/v1/systemone`: typed questions about a state, each answered by the probabilities of labels."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Route, ServerContext
from hardpoint.typed import Strict, join_path

from .label_scores import LabelledPrompt, Tokens, score_labels
from .questions import Answer, AnyQuestion, Content, as_text

_PLACE = "(the state and the question)"
"""Placeholder of a rendered chat template; the texts then replace it."""

_MOST_LABELS = 4096
"""Labels with remembered tokens."""


class SystemOneRequest(Strict):
    """Questions about a state.

    Attributes:
        state: subject of the questions: a text, or JSON.
        questions: by their ids; each is answered as if it were the only one.
        instructions: read before the state.
        model: name of the model.
        priority: smaller is more important; within the bounds of the key.
        timeout: seconds after which the call ends without answers.
        tags: labels for policies and sinks; the key's own tags win.
        cache_salt: requests with different salts share no cached prompts.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("audio", "images", "videos"), "the state is text or JSON"),
        "chat_template_kwargs": "the route sets the variables of the template",
    }

    state: Content
    questions: Annotated[dict[str, AnyQuestion], Meta(min_length=1, max_length=64)]
    instructions: str | None = None
    model: str | None = None
    priority: int | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    tags: dict[str, str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


class SystemOneUsage(msgspec.Struct):
    """The tokens of a call.

    Attributes:
        input_tokens: tokens of the prompts of all questions together, the state in each.
        cached_tokens: the tokens among them with cached keys and values, of other questions too.
        output_tokens: 0: nothing is written.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int = 0


class SystemOneResponse(msgspec.Struct):
    """The answers, by the ids of the questions."""

    id: str
    model: str
    answers: dict[str, Answer]
    usage: SystemOneUsage


class _Template:
    """The frame around the texts of a prompt.

    Attributes:
        before: text before the state.
        after: text after a question.
        begins: whether the tokenizer adds its own special tokens.
        gap: text between the end of a prompt and a label.
    """

    def __init__(self, rendered: str | None) -> None:
        """Take a rendered chat template apart; None is a model without one.

        Raises:
            RequestError: the template changes the text of a message.
        """
        self.before, self.after, self.begins, self.gap = "", "\nAnswer:", True, " "
        if rendered is not None:
            self.before, separator, self.after = rendered.partition(_PLACE)
            self.begins, self.gap = False, ""
            if not separator or _PLACE in self.after:
                raise RequestError(
                    "model: expected a chat template that has the text of a message once, as it is"
                )


class SystemOne:
    """Answers the questions of a call, in one prefill each.

    A prompt is the chat template around one message of the user: the instructions, the state and
    the question, with an empty line between them; without a template, "Answer:" follows. The part
    that ends with the state and the rest are tokenized apart, so that all questions share the
    tokens of the first part, whatever they ask.
    """

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._label_tokens: dict[tuple[str, str], Tokens] = {}

    def route(self) -> Route:
        """Return the route."""
        return Route(
            path="/v1/systemone",
            endpoint=self.answer,
            methods=("POST",),
            summary="Answer typed questions about a state.",
            request_type=SystemOneRequest,
            response_type=SystemOneResponse,
        )

    async def answer(self, request: Request) -> SystemOneResponse:
        """Answer a call.

        Raises:
            RequestError: the call or a question is wrong; then none of them runs.
            Exception: as `ServerContext` and the engine raise.
        """
        body = await self._server.read(request, SystemOneRequest)
        return await self._server.while_connected(
            request, self._answered(request, body), generates=True
        )

    async def _answered(self, request: Request, body: SystemOneRequest) -> SystemOneResponse:
        server = self._server
        model, options = server.model(body.model), server.options(request, body)
        server.check_prompt(body.state, body.instructions or "", name="state")
        prompts = await self._prompts(body)
        answer_id = f"systemone-{uuid.uuid4().hex}"
        scores, counts = await score_labels(server.engine, prompts, answer_id, options)
        answered = zip(body.questions.items(), scores, strict=True)
        return SystemOneResponse(
            answer_id,
            model,
            {name: question.answer(s.probabilities, s.mass) for (name, question), s in answered},
            SystemOneUsage(counts.prompt, counts.cached),
        )

    async def _prompts(self, body: SystemOneRequest) -> list[LabelledPrompt]:
        """Return the prompt of each question.

        Raises:
            RequestError: one is too long, or its labels have no tokens of their own.
        """
        engine = self._server.engine
        template = await self._template()
        before = [] if body.instructions is None else [body.instructions]
        shared = template.before + "\n\n".join([*before, as_text(body.state)])
        first = await engine.model.tokenize(shared, add_special_tokens=template.begins)
        longest = engine.config.max_model_len
        prompts: list[LabelledPrompt] = []
        for name, question in body.questions.items():
            path = join_path("questions", name)
            text = f"\n\n{question.text()}{template.after}"
            self._server.check_prompt(text, name=path)
            rest = await engine.model.tokenize(text, add_special_tokens=False)
            labels = await self._labels(question, template, path)
            size = len(first) + len(rest) + max(map(len, labels)) - 1
            if isinstance(longest, int) and size >= longest:
                raise PromptTooLongError(
                    f"{path}: with the state, the prompt is too long: {size} tokens; this model's "
                    f"maximum context length is {longest} tokens, less one to generate"
                )
            prompts.append(LabelledPrompt([*first, *rest], labels))
            await asyncio.sleep(0)  # others have their turn
        return prompts

    async def _template(self) -> _Template:
        """Return the model's template, as it is rendered now: it may have the date."""
        engine = self._server.engine
        if (template := engine.tokenizer.chat_template) is None:
            return _Template(None)
        variables = {"enable_thinking": False} if "enable_thinking" in template else None
        message = {"role": "user", "content": _PLACE}
        rendered = await engine.model.apply_chat_template([message], chat_template_kwargs=variables)
        return _Template(rendered["prompt"])

    async def _labels(self, question: AnyQuestion, template: _Template, path: str) -> list[Tokens]:
        """Return the tokens of a question's labels, after the end of its prompt.

        Raises:
            RequestError: the end of the prompt and a label make other tokens, or two labels the
                same ones.
        """
        context = question.last_line + template.after
        labels = question.labels()
        labels_tokens = [
            await self._tokens_after(context, template.gap + label) for label in labels
        ]
        for index, tokens in enumerate(labels_tokens):
            others = (other for place, other in enumerate(labels_tokens) if place != index)
            if not tokens or any(other[: len(tokens)] == tokens for other in others):
                raise RequestError(
                    f"{path}: this model's tokenizer does not distinguish the label "
                    f"{labels[index]!r} from the others at the place of the answer"
                )
        return labels_tokens

    async def _tokens_after(self, context: str, label: str) -> Tokens:
        key = context, label
        if key not in self._label_tokens:
            if len(self._label_tokens) >= _MOST_LABELS:
                self._label_tokens.clear()
            ids = await self._server.engine.model.tokenize(context, add_special_tokens=False)
            both = await self._server.engine.model.tokenize(
                context + label, add_special_tokens=False
            )
            is_apart = list(both[: len(ids)]) == list(ids)
            self._label_tokens[key] = tuple(both[len(ids) :]) if is_apart else ()
        return self._label_tokens[key]
