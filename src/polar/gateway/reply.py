"""What has been sampled of a call so far: its tokens, its message, and where a stop string cuts it."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from polar.engines.base import ChatChunk, EngineError, TokenChunk
from polar.models.chat import Message, Role, ToolCall, Usage
from polar.models.completion import CACHED, COUNTED, COUNTED_PROMPT, NO_IDS, UNROUTED, Ids, Routing
from polar.rendering.base import MessageDelta
from polar.rendering.tool_calls import overlap

_NO_USAGE = Usage(0, 0)


class SampledTokens:
    """What the engine has sampled so far."""

    def __init__(self) -> None:
        self.prompt_ids: Ids = NO_IDS
        """As far as the engine has told them."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.first_at = 0.0
        self.routing: Routing | None = None
        self.untrainable: str | None = None
        self._cached = 0
        self._counted: Usage | None = None

    def add(self, chunk: ChatChunk) -> int:
        """Take a chunk; how many tokens of it were sampled that are not counted yet."""
        if not self.first_at and (chunk.tokens or chunk.delta):
            self.first_at = time.time()
        if chunk.prompt_ids is not None:
            self.prompt_ids = chunk.prompt_ids
        self.untrainable = chunk.untrainable or self.untrainable
        self._counted = chunk.usage or self._counted
        if chunk.tokens is not None:
            return self._add(chunk.tokens)
        return chunk.usage.sampled_tokens if chunk.usage and not self.ids else 0

    def _add(self, tokens: TokenChunk) -> int:
        if len(tokens.ids) != len(tokens.logprobs):
            raise EngineError(
                f"the engine sent {len(tokens.ids)} token ids with {len(tokens.logprobs)} logprobs"
            )
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.versions += [tokens.policy_version] * len(tokens.ids)
        self._cached = max(self._cached, tokens.cached_tokens)
        self.routing = tokens.routing if self.routing is None else self.routing
        return len(tokens.ids)

    @property
    def context(self) -> int:
        """How long prompt and answer are by now, where the engine has told the prompt."""
        return len(self.prompt_ids) + len(self.ids)

    def usage(
        self, prompt_tokens: int, reasoning_tokens: int, *, started_at: float, ended_at: float
    ) -> Usage:
        """The counts of what was seen; the engine's own for what it does not show."""
        counted = self._counted or _NO_USAGE
        first_at = self.first_at or ended_at
        return Usage(
            prompt_tokens or counted.prompt_tokens,
            len(self.ids) or counted.sampled_tokens,
            max(self._cached, counted.cached_tokens),
            counted.reasoning_tokens or reasoning_tokens,
            first_at - started_at,
            ended_at - first_at,
        )

    @property
    def counts(self) -> dict[str, str]:
        """What only the engine can count, for the record."""
        counted = self._counted or _NO_USAGE
        counts = {CACHED: max(self._cached, counted.cached_tokens)}
        if not self.ids:
            counts |= {COUNTED: counted.sampled_tokens, COUNTED_PROMPT: counted.prompt_tokens}
        return {name: str(count) for name, count in counts.items() if count}

    def unrouted(self, prompt_tokens: int, routed_from: int | None) -> dict[str, str]:
        """For the record: of how many tokens the engine was to tell the experts, and did not."""
        if routed_from is None or not self.ids:
            return {}
        asked = prompt_tokens - routed_from + len(self.ids) - 1
        told = 0 if self.routing is None else int(self.routing.any(axis=(1, 2)).sum())
        return {UNROUTED: str(asked - told)} if told < asked else {}


class SampledMessage:
    """The message as the client gets it; tool calls get ids that are unique in the session."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, delta: MessageDelta) -> MessageDelta:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        if not delta.tool_calls:
            return delta
        named = tuple(
            call if call.id else replace(call, id=f"call_{os.urandom(12).hex()}") for call in delta.tool_calls
        )
        self._calls.extend(named)
        return replace(delta, tool_calls=named)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def message(self) -> Message:
        return Message(
            role=Role.ASSISTANT,
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )


class StopStrings:
    """Holds back what may be the beginning of a stop string until it is certain."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def feed(self, text: str) -> str:
        """What of the text so far may be shown."""
        if not self._stops or self.hit:
            return "" if self.hit else text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            first, self.matched = min(found)
            shown, self._held = self._held[:first], ""
            return shown
        keep = max(overlap(self._held, stop) for stop in self._stops)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
