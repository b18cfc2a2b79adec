"""Input items of OpenAI's Responses → messages; the items of one sampled turn become one message again."""

from __future__ import annotations

from polar.dialects.base import Recall
from polar.dialects.json_fields import Fields, kind, malformed
from polar.dialects.responses_output import ItemId, item_id, unsealed
from polar.dialects.responses_tools import Toolbox, call_id
from polar.models.chat import Message, Role, ToolCall

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}


def input_messages(fields: Fields, toolbox: Toolbox, recall: Recall) -> tuple[Message, ...]:
    value = fields.get("input")
    if isinstance(value, str):
        return (Message(Role.USER, value),)
    if value is not None and not isinstance(value, list):
        raise malformed("input", f"must be a string or an array of items, not {kind(value)}")
    history = _History()
    for item in fields.children("input"):
        _read(item, toolbox, history, recall)
    return history.messages()


class _History:
    """Messages in order; what the assistant said without anyone between is one turn.

    Unless the ids, where they are ours and echoed, tell that it was sampled as several.
    """

    def __init__(self) -> None:
        self._completion: str | None = None
        self._messages: list[Message] = []
        self._is_open = False
        self._content = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []

    def said(
        self, item: Fields, content: str = "", *, reasoning: str = "", calls: tuple[ToolCall, ...] = ()
    ) -> None:
        self._begin(item)
        self._content += content
        self._reasoning += reasoning
        self._calls.extend(calls)

    def recalled(self, item: Fields, content: str = "", *, reasoning: str = "") -> None:
        """As `said`, for all of a turn's text or reasoning: in several items, each of them stands for it."""
        self._begin(item)
        self._content = self._content or content
        self._reasoning = self._reasoning or reasoning

    def heard(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def messages(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _begin(self, item: Fields) -> None:
        id = item_id(item.string("id"))
        if id is not None and self._completion not in (None, id.completion):
            self._close()
        self._completion = id.completion if id is not None else self._completion
        self._is_open = True

    def _close(self) -> None:
        if not self._is_open:
            return
        message = Message(Role.ASSISTANT, self._content, self._reasoning or None, tuple(self._calls))
        self._messages.append(message)
        self._is_open, self._completion = False, None
        self._content, self._reasoning, self._calls = "", "", []


def _read(item: Fields, toolbox: Toolbox, history: _History, recall: Recall) -> None:
    match item.string("type"):
        case "message":
            _read_message(item, history)
        case "function_call" | "custom_tool_call" | "local_shell_call":
            history.said(item, calls=(toolbox.call_of(item),))
        case "function_call_output" | "custom_tool_call_output":
            answered = call_id(item.needed_string("call_id"))
            history.heard(Message(Role.TOOL, _text(item, "output"), tool_call_id=answered))
        case "local_shell_call_output":
            answered = item.string("call_id") or item.needed_string("id")
            history.heard(Message(Role.TOOL, _text(item, "output"), tool_call_id=answered))
        case "reasoning":
            if reasoning := _reasoning(item):
                history.said(item, reasoning=reasoning)
        case "item_reference":
            _read_reference(item, history, recall)
        case None if item.get("role") is not None:
            _read_message(item, history)
        case None if item.get("id") is not None:
            _read_reference(item, history, recall)
        case None:
            raise malformed(
                item.at("type"), "is required: an item is a message, a call, an output or reasoning"
            )
        case _:
            # Traces of what ran elsewhere (searches, listings, compaction); the model is not shown them.
            pass


def _read_reference(item: Fields, history: _History, recall: Recall) -> None:
    """An item that was given out before, named instead of repeated."""
    text = item.needed_string("id")
    id = item_id(text)
    said = recall(id.completion) if id is not None else None
    message = said[-1] if said is not None else Message(Role.ASSISTANT)
    match id:
        case ItemId("msg") if said is not None:
            history.recalled(item, message.content)
        case ItemId("rs") if message.reasoning:
            history.recalled(item, reasoning=message.reasoning)
        case ItemId("fc" | "ctc" | "lsh", index=index) if index < len(message.tool_calls):
            history.said(item, calls=(message.tool_calls[index],))
        case _:
            raise malformed(item.at("id"), f"no response of this session has an item {text!r}: send it whole")


def _read_message(item: Fields, history: _History) -> None:
    role_name = item.needed_string("role")
    role = _ROLES.get(role_name)
    if role is None:
        raise malformed(item.at("role"), f"must be one of {', '.join(_ROLES)}, not {role_name!r}")
    content = _text(item, "content")
    if role is Role.ASSISTANT:
        history.said(item, content)
    else:
        history.heard(Message(role, content))


def _reasoning(item: Fields) -> str:
    """The sealed text if it is ours, else what the item shows of its reasoning."""
    sealed = item.string("encrypted_content")
    text = unsealed(sealed) if sealed is not None else None
    if text is not None:
        return text
    content = "".join(part.string("text") or "" for part in item.children("content"))
    return content or "\n\n".join(part.string("text") or "" for part in item.children("summary"))


def _text(item: Fields, name: str) -> str:
    value = item.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(item.at(name), f"must be a string or an array of parts, not {kind(value)}")
    return "".join(_part(part) for part in item.children(name))


def _part(part: Fields) -> str:
    type_ = part.needed_string("type")
    match type_:
        case "input_text" | "output_text" | "text":
            return part.needed_string("text")
        case "refusal":
            return part.needed_string("refusal")
        case _:
            return part.string("text") or part.placeholder(type_.removeprefix("input_"))
