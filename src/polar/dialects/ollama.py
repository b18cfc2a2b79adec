"""Ollama's own API: chats and single prompts, streamed as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import orjson

from polar.dialects.anthropic_messages import object_of
from polar.dialects.anthropic_request import arguments_of
from polar.dialects.base import (
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
)
from polar.dialects.google_request import Unanswered
from polar.dialects.json_fields import Fields, document, kind, malformed
from polar.dialects.openai_chat import OpenAIChat, read_stop, read_tools
from polar.dialects.schemas import needed_schema
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    JsonOutput,
    Message,
    Role,
    Sampling,
    TokenLogprob,
    ToolCall,
    Usage,
)

_VERSION = HttpAnswer(200, b'{"version":"0.12.11"}', {"Content-Type": "application/json"})
"""The release whose API this is; clients derive from it what they may ask for."""
_GENERATE = "/api/generate"
_ROLES = {role.value: role for role in Role}
_NOT_SERVED = {
    "context": "is not supported: send the messages to /api/chat",
    "suffix": "is not supported: text can only be continued",
    "template": "is not supported: write the whole prompt yourself and set raw",
    "top_logprobs": "is not supported: only the logprobs of sampled tokens are returned",
}
_NANOSECONDS = 10**9


class Ollama(Dialect):
    name: ClassVar[str] = "ollama"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/api/chat", RouteAction.COMPLETE),
        Route("POST", _GENERATE, RouteAction.COMPLETE),
        Route("GET", "/api/tags", RouteAction.LIST_MODELS),
        Route("POST", "/api/show", RouteAction.SHOW_MODEL),
        Route("GET", "/api/version", RouteAction.FIXED, _VERSION),
    )

    def claims(self, headers: Mapping[str, str]) -> bool:
        return headers.get("User-Agent", "").startswith("ollama")

    def parse(self, request: HttpRequest) -> ChatRequest:
        fields = document(request.body, Fields)
        model = fields.needed_string("model")
        for name, advice in _NOT_SERVED.items():
            if fields.get(name):
                raise malformed(name, advice)
        is_single = request.route.path == _GENERATE
        messages = _prompt(fields) if is_single else tuple(_messages(fields))
        is_raw, output = is_single and fields.boolean("raw"), _output(fields)
        for name in ("system", "format") if is_raw else ():
            if fields.get(name):
                raise malformed(name, "cannot be combined with raw: the prompt is continued as it is")
        return ChatRequest(
            model=model,
            messages=messages,
            tools=() if is_single else read_tools(fields),
            output=output,
            sampling=_sampling(fields.child("options") or Fields({})),
            raw=messages[-1].content if is_raw else None,
            logprobs=fields.boolean("logprobs"),
            omitted=fields.omitted,
            stream=fields.boolean("stream", default=True),
            wire={"single": is_single},
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        message = answer.message
        said = _delta_body(request, message.content, message.reasoning or "", message.tool_calls)
        logprobs = {"logprobs": _logprobs(answer.logprobs)} if request.logprobs else {}
        end = _end(answer.finish_reason, answer.usage)
        return orjson.dumps(_envelope(identity) | said | logprobs | end)

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        return (OllamaStream(identity, request),)

    def models(self, model: str, max_context: int, created: int) -> bytes:
        listed = {"name": model, "model": model, "size": 0, "digest": ""} | _about(created)
        return orjson.dumps({"models": [listed]})

    def shown(self, request: HttpRequest) -> str:
        fields = document(request.body, Fields)
        return fields.string("model") or fields.needed_string("name")

    def model(self, model: str, max_context: int, created: int) -> bytes:
        info = {"general.architecture": "polar", "polar.context_length": max_context}
        can = ["completion", "tools", "thinking"]
        return orjson.dumps(_about(created) | {"model_info": info, "capabilities": can})

    def error(self, error: RequestRefused) -> HttpAnswer:
        return HttpAnswer(OpenAIChat().error(error).status, orjson.dumps({"error": error.message}))


class OllamaStream(StreamEncoder):
    """One line per delta; the last line has the usage."""

    content_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, identity: CallIdentity, request: ChatRequest) -> None:
        self._envelope = _envelope(identity)
        self._request = request

    def text(self, text: str) -> bytes:
        return self._line(_delta_body(self._request, text))

    def reasoning(self, text: str) -> bytes:
        return self._line(_delta_body(self._request, "", text))

    def tool_call(self, call: ToolCall) -> bytes:
        return self._line(_delta_body(self._request, "", calls=(call,)))

    def logprobs(self, sampled: tuple[TokenLogprob, ...]) -> bytes:
        return self._line(_delta_body(self._request, "") | {"logprobs": _logprobs(sampled)})

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        return self._line(_delta_body(self._request, "") | _end(finish_reason, usage))

    def error(self, error: RequestRefused) -> bytes:
        return orjson.dumps({"error": error.message}) + b"\n"

    def keep_alive(self) -> bytes:
        # Clients parse every line as part of the answer and fail on an empty one.
        return self.text("")

    def _line(self, said: dict[str, Any]) -> bytes:
        return orjson.dumps(self._envelope | {"done": False} | said) + b"\n"


def _prompt(fields: Fields) -> tuple[Message, ...]:
    prompt = fields.string("prompt")
    if not prompt:
        raise malformed("prompt", "is required and must be a string")
    system = fields.string("system")
    told = (Message(Role.SYSTEM, system),) if system else ()
    return (*told, Message(Role.USER, _with_images(fields, prompt)))


def _messages(fields: Fields) -> Iterator[Message]:
    if not fields.children("messages"):
        raise malformed("messages", "is required and must hold at least one message")
    unanswered, count = Unanswered(), 0
    for message in fields.children("messages"):
        role = message.one_of("role", _ROLES)
        content = _with_images(message, message.string("content") or "")
        if role is Role.TOOL:
            yield _result(message, content, unanswered)
        elif role is Role.ASSISTANT:
            wire = message.children("tool_calls")
            calls = tuple(_call(call, f"call_{count + index}") for index, call in enumerate(wire, 1))
            unanswered, count = Unanswered(calls), count + len(calls)
            yield Message(role, content, message.string("thinking") or None, calls)
        else:
            yield Message(role, content)


def _call(call: Fields, number: str) -> ToolCall:
    function = call.needed_child("function")
    return ToolCall(call.string("id") or number, function.name(), arguments_of(function, "arguments"))


def _result(message: Fields, content: str, unanswered: Unanswered) -> Message:
    """Attribute a result to the call it names, else to the first call (of its tool) that has no result."""
    id, name = message.string("tool_call_id") or "", message.string("tool_name")
    call = unanswered.take(id, name or "") if id or name else unanswered.take_first()
    return Message(Role.TOOL, content, tool_call_id=call.id if call else id, name=call.name if call else name)


def _with_images(fields: Fields, text: str) -> str:
    images = fields.get("images") or []
    if not isinstance(images, list):
        raise malformed(fields.at("images"), f"must be an array, not {kind(images)}")
    return "\n".join(filter(None, [text, *(fields.placeholder("image") for _ in images)]))


def _output(fields: Fields) -> JsonOutput | None:
    wanted = fields.get("format")
    if wanted in (None, ""):
        return None
    return JsonOutput() if wanted == "json" else JsonOutput(needed_schema(fields, "format"))


def _sampling(options: Fields) -> Sampling:
    limit = options.integer("num_predict", -2)
    return Sampling(
        temperature=options.number("temperature", 0, 2),
        top_p=options.number("top_p", 0, 1),
        top_k=options.integer("top_k", -1),
        seed=options.integer("seed", -(2**63)),
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=read_stop(options),
        presence_penalty=options.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=options.number("frequency_penalty", -2, 2) or 0.0,
    )


def _envelope(identity: CallIdentity) -> dict[str, Any]:
    return {"model": identity.model, "created_at": _time(identity.created)}


def _delta_body(
    request: ChatRequest, text: str, thoughts: str = "", calls: Sequence[ToolCall] = ()
) -> dict[str, Any]:
    thinking = {"thinking": thoughts} if thoughts else {}
    if request.wire["single"]:
        return {"response": text} | thinking
    called = {"tool_calls": list(map(_call_body, calls))} if calls else {}
    return {"message": {"role": "assistant", "content": text} | thinking | called}


def _call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": orjson.Fragment(object_of(call))}}


def _end(reason: FinishReason, usage: Usage) -> dict[str, Any]:
    waited, sampling = (int(each * _NANOSECONDS) for each in (usage.waited_seconds, usage.sampling_seconds))
    return {
        "done": True,
        "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
        "total_duration": waited + sampling,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": waited,
        "eval_count": usage.sampled_tokens,
        "eval_duration": sampling,
    }


def _logprobs(sampled: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return [
        {"token": one.token.decode(errors="replace"), "logprob": one.logprob, "bytes": list(one.token)}
        for one in sampled
    ]


def _about(created: int) -> dict[str, Any]:
    names = ("parent_model", "format", "family", "parameter_size", "quantization_level")
    return {"modified_at": _time(created), "details": dict.fromkeys(names, "") | {"families": None}}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
