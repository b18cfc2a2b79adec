"""OpenAI's legacy Completions API: continues a text, or its token ids, without a chat template."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from polar.dialects.base import (
    AZURE_DEPLOYMENT,
    AZURE_KEY,
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
    openai_routes,
    usage_of_all,
)
from polar.dialects.json_fields import Fields, document, kind, malformed
from polar.dialects.openai_chat import ChatStream, OpenAIChat, choice_count, read_sampling, usage_body
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    Message,
    Role,
    Sampling,
    TokenLogprob,
    ToolCall,
    Usage,
)

_DEFAULT_MAX_TOKENS = 16
_LARGEST_ID = 2**31 - 1
_NOT_SERVED = {
    "echo": "is not supported: put the prompt before the answer yourself",
    "suffix": "is not supported: text can only be continued",
    "logprobs": "only the logprobs of sampled tokens are returned: use 0",
}


class OpenAICompletions(Dialect):
    name: ClassVar[str] = "openai_completions"
    routes: ClassVar[tuple[Route, ...]] = openai_routes(
        "POST", "/completions", RouteAction.COMPLETE, AZURE_DEPLOYMENT
    )
    key_headers: ClassVar[tuple[str, ...]] = AZURE_KEY

    def parse(self, request: HttpRequest) -> ChatRequest:
        fields = document(request.body, Fields)
        model = request.model or fields.needed_string("model")
        for name, advice in _NOT_SERVED.items():
            if fields.get(name):
                raise malformed(name, advice)
        choices, prompt = choice_count(fields), _prompt(fields)
        if (fields.integer("best_of", 1) or choices) != choices:
            raise malformed("best_of", "must equal n, since every answer is returned")
        options = fields.child("stream_options")
        return ChatRequest(
            model=model,
            messages=(Message(Role.USER, prompt),) if isinstance(prompt, str) else (),
            raw=prompt,
            sampling=_sampling(fields),
            choices=choices,
            logprobs=fields.integer("logprobs", 0) is not None,
            stream=fields.boolean("stream"),
            stream_usage=options is not None and options.boolean("include_usage"),
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        usage = usage_of_all([answer.usage for answer in answers])
        choices = [
            _choice(
                index,
                answer.message.content,
                _Logprobs().of(answer.logprobs) if request.logprobs else None,
                _finish(answer.finish_reason),
            )
            for index, answer in enumerate(answers)
        ]
        return orjson.dumps(_envelope(identity) | {"choices": choices, "usage": usage_body(usage)})

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        finished: list[Usage] = []
        return [CompletionStream(identity, request, index, finished) for index in range(request.choices)]

    def error(self, error: RequestRefused) -> HttpAnswer:
        if error.field == "messages":
            error = RequestRefused(error.refusal, error.message, field="prompt")
        return OpenAIChat().error(error)


class CompletionStream(ChatStream):
    """Writes the chunks of one choice; everything sampled is text and nothing is parsed."""

    def __init__(
        self, identity: CallIdentity, request: ChatRequest, index: int, finished: list[Usage]
    ) -> None:
        super().__init__(identity, request, index, finished)
        self._envelope = _envelope(identity)
        self._columns = _Logprobs()

    def start(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._chunk([_choice(self._index, text)])

    def reasoning(self, text: str) -> bytes:
        return self.text(text)

    def tool_call(self, call: ToolCall) -> bytes:
        return b""

    def logprobs(self, sampled: tuple[TokenLogprob, ...]) -> bytes:
        return self._chunk([_choice(self._index, "", self._columns.of(sampled))])

    def _final_chunk(self, finish_reason: FinishReason) -> bytes:
        return self._chunk([_choice(self._index, "", finish_reason=_finish(finish_reason))])


class _Logprobs:
    """Logprobs in the legacy form: columns, with the offset of each token in the answer's text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, sampled: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        offsets: list[int] = []
        for one in sampled:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.token))
        return {
            "tokens": [one.token.decode(errors="replace") for one in sampled],
            "token_logprobs": [one.logprob for one in sampled],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    """Return the prompt of a request, which may be the only element of an array."""
    value = fields.get("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise malformed("prompt", "must be a single prompt: send one request per prompt")
        (value,) = value
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise malformed("prompt", f"must be a string or an array of token ids, not {kind(value)}")
    if not all(type(id) is int and 0 <= id <= _LARGEST_ID for id in value):
        raise malformed("prompt", "must be a string or an array of token ids")
    return tuple(value)


def _sampling(fields: Fields) -> Sampling:
    asked = read_sampling(fields)
    return replace(asked, max_tokens=asked.max_tokens or _DEFAULT_MAX_TOKENS)


def _envelope(identity: CallIdentity) -> dict[str, Any]:
    return {
        "id": f"cmpl-{identity.id}",
        "object": "text_completion",
        "created": identity.created,
        "model": identity.model,
    }


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish(reason: FinishReason) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"
