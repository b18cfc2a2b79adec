"""A chat model whose tokens are characters: its template, what it says, and both in OpenAI's words.

A turn that is echoed as it was said renders to the very ids that were sampled, so that a test can tell
an exact continuation from one that drifted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

END = 2
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}


@dataclass(frozen=True)
class Said:
    """One answer of the model."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    finish: str | None = None
    """None: what follows from the calls."""
    ids: list[int] = field(default_factory=list)
    """Instead of those that the template makes of it."""
    stop: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.ids or [*_ids(_text(self.message)), END]

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")

    @property
    def message(self) -> dict[str, Any]:
        calls = [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": name, "arguments": _json(given)},
            }
            for number, (name, given) in enumerate(self.calls)
        ]
        return {"role": "assistant", "content": self.content or None, "reasoning": self.reasoning or None} | (
            {"tool_calls": calls} if calls else {}
        )


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """The chat template, up to and including the generation prompt."""
    ids = _ids("".join(tool["function"]["name"] for tool in body.get("tools") or ()))
    for message in body["messages"]:
        ids += [ROLES[message["role"]], *_ids(_text(message)), END]
    return [*ids, ROLES["assistant"]]


def logprob_of(id: int) -> float:
    """Exact in float32."""
    return -(id % 64 + 1) / 64


def document(said: Said, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, with tokens where they are asked for as vLLM is asked."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": said.message,
        "finish_reason": said.finish_reason,
        "stop_reason": said.stop,
        "logprobs": logprobs(said.tokens) if body.get("logprobs") else None,
    }
    root: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
    if body.get("return_token_ids"):
        choice["token_ids"] = said.tokens
        root["prompt_token_ids"] = prompt_ids(body)
    return root | {"choices": [choice], "usage": usage(said, body)}


def events(said: Said, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same as a stream, a character an event; the prompt's ids come first, the usage last."""
    shows = bool(body.get("return_token_ids"))
    first = _event(body, {"role": "assistant", "content": ""})
    yield first | ({"prompt_token_ids": prompt_ids(body)} if shows else {})
    deltas = [
        *({"reasoning": letter} for letter in said.reasoning),
        *({"content": letter} for letter in said.content),
        *_call_deltas(said.message.get("tool_calls", ())),
    ]
    tokens = said.tokens
    for place, delta in enumerate(deltas or [{}]):
        is_last = place == max(len(deltas), 1) - 1
        piece = tokens[place:] if is_last else tokens[place : place + 1]
        yield _event(
            body,
            delta,
            finish_reason=said.finish_reason if is_last else None,
            stop_reason=said.stop if is_last else None,
            logprobs=logprobs(piece) if body.get("logprobs") else None,
            **({"token_ids": piece} if shows else {}),
        )
    yield {"object": "chat.completion.chunk", "choices": [], "usage": usage(said, body)}


def logprobs(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": chr(id), "logprob": logprob_of(id), "top_logprobs": []} for id in ids]}


def usage(said: Said, body: dict[str, Any]) -> dict[str, Any]:
    prompt, sampled = len(prompt_ids(body)), len(said.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(body: dict[str, Any], delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    root = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    return root | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | choice]}


def _call_deltas(calls: Any) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(calls):
        name = call["function"] | {"arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": name}]}
        for letter in call["function"]["arguments"]:
            yield {"tool_calls": [{"index": index, "function": {"arguments": letter}}]}


def _text(message: dict[str, Any]) -> str:
    calls = [
        f"{call['function']['name']}{call['function']['arguments']}" for call in message.get("tool_calls", ())
    ]
    return "".join([message.get("content") or "", *calls])


def _ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
