"""Parses requests: prompts to token ids, parameters to a generation."""

from __future__ import annotations

import asyncio
from typing import Any

from polar.engines.embedded.grammar import Grammars, Guide
from polar.engines.embedded.model import SlotModel
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Generation
from polar.engines.embedded.wire import BadRequest, ChatBody, CompletionBody
from polar.errors import InvalidInput


class Intake:
    """Reads requests in one model's terms; what it refuses is a BadRequest that names the field."""

    def __init__(self, model: SlotModel) -> None:
        self._model = model
        self._grammars = Grammars(model.text_tokenizer, model.vocabulary, model.eos_token_ids)

    def check_model(self, name: str | None) -> None:
        """BadRequest unless it is the model that is served, or none is named."""
        if name is not None and name != self._model.name:
            raise BadRequest(f"The model `{name}` does not exist.", "model", status=404)

    async def prompt(self, prompt: Any) -> list[int]:
        """The ids of a prompt that is text or ids."""
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, list) or not all(type(id) is int for id in prompt):
            raise BadRequest("prompt: must be one prompt, a list of token ids or a string", "prompt")
        if any(not 0 <= id < self._model.vocabulary for id in prompt):
            raise BadRequest(f"prompt: token ids must be from 0 to {self._model.vocabulary - 1}", "prompt")
        return prompt

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = await asyncio.to_thread(
            self._model.text_tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Render with the model's chat template, which may ignore tools."""
        flat = [_flat(message) for message in messages]
        try:
            text = await asyncio.to_thread(
                self._model.tokenizer.apply_chat_template,
                flat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            # Templates are programs of the model's author and raise what they like.
            raise BadRequest(f"messages: the chat template refuses them: {error}", "messages") from None
        return await self.encode(text, add_special_tokens=False)

    async def generation(
        self, body: CompletionBody | ChatBody, prompt: list[int], limit: int | None
    ) -> Generation:
        """Return the generation after these tokens; raise BadRequest if it does not fit or a field is
        invalid."""
        context = self._model.context
        if not prompt:
            raise BadRequest("prompt: must have at least one token", "prompt")
        if len(prompt) >= context:
            raise BadRequest(
                f"prompt: This model's maximum context length is {context} tokens. However, your request has"
                f" {len(prompt)} input tokens. Please reduce the length of the input.",
                "prompt",
            )
        if limit is not None and len(prompt) + limit > context:
            raise BadRequest(
                f"max_tokens: {limit} is too large. This model's maximum context length is {context} tokens"
                f" and your request has {len(prompt)} input tokens.",
                "max_tokens",
            )
        eos = frozenset() if body.ignore_eos else self._model.eos_token_ids
        stops = eos.union(body.stop_token_ids or ())
        draw = Draw(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            seed=body.seed,
            logit_bias=self._biases(body),
            guide=await self._guide(body, stops),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
        )
        left = context - len(prompt) if limit is None else limit
        return Generation(prompt, left, draw, body.stop_strings, stops)

    def _biases(self, body: CompletionBody | ChatBody) -> tuple[tuple[int, float], ...]:
        biases = body.logit_bias or {}
        if any(not 0 <= id < self._model.vocabulary for id in biases):
            raise BadRequest(
                f"logit_bias: token ids must be from 0 to {self._model.vocabulary - 1}", "logit_bias"
            )
        return tuple(biases.items())

    async def _guide(self, body: CompletionBody | ChatBody, stops: frozenset[int]) -> Guide | None:
        if body.constraint is None:
            return None
        try:
            # Here and not in the thread that computes: other requests go on meanwhile.
            return await asyncio.to_thread(self._grammars.guide, body.constraint, stops)
        except InvalidInput as error:
            raise BadRequest(f"structured_outputs: {error.message}", "structured_outputs") from None


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string."""
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise BadRequest("messages: content parts must be text", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise BadRequest("messages: each needs a role and a content of text", "messages")
    return {**message, "content": content}
