"""Constraints of the sampled text as masks over the vocabulary, computed by llguidance.

Its grammars have no structural tags, which is what vLLM and SGLang are sent, so the tags are
written as rules of one grammar, in its variant of Lark.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.rendering.constraints import Constraint

_COMPILED = 256
"""Size of the cache: a harness sends the same few grammars with every request."""
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One fixed spacing, since a small model given the choice may add spaces without end."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_ANYTHING = r"/(?s:.*)/"


class Guide:
    """Constrains the next tokens of one request. Belongs to the thread that samples."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._stops = sorted(stop_token_ids)

    def mask(self, logits: torch.Tensor) -> None:
        """Make the tokens that may not come next impossible, in one row of logits."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.zeros(logits.shape[0], dtype=torch.bool)
        known = min(len(bits), logits.shape[0])
        allowed[:known] = torch.from_numpy(bits[:known].astype(np.bool_))
        # Whatever ends a turn for this request may end it here, not only what does for the tokenizer.
        allowed[self._stops] = self._matcher.is_accepting()
        if self._matcher.is_error():
            # Beyond what can be computed: with nothing possible the request fails, and no other does.
            allowed[:] = False
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def accept(self, token_id: int) -> bool:
        """Take the sampled token; False if the matcher gave up on its grammar."""
        return bool(self._matcher.consume_token(token_id))


class Grammars:
    """Compiles constraints for one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: Iterable[int]) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._eos = sorted(eos_token_ids) or None
        self._added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, constraint: Constraint, stop_token_ids: Iterable[int]) -> Guide:
        """A fresh guide; InvalidInput says what is wrong with the constraint. Compiling takes a while."""
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compiled[constraint] = self._compile(constraint)
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
            return Guide(compiled.deep_copy(), (id for id in stop_token_ids if 0 <= id < self._vocabulary))

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._source.to_str(), n_vocab=self._vocabulary, eos_token=self._eos
            )
        tokenizer = self._tokenizer
        marks = {text: id for text, id in self._added.items() if tokenizer.is_special_token(id)}
        if constraint.json_schema is not None:
            body: Any = {
                "type": "json_schema",
                "json_schema": _parse_json(constraint.json_schema, "JSON schema"),
            }
        else:
            tag = _parse_json(constraint.structural_tag or "", "structural tag")
            body = tag.get("format") if isinstance(tag, dict) else None
        grammar = LLMatcher.grammar_from_lark(_Lark(marks).grammar(body))
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = next(iter(matcher.get_error().strip().splitlines()), "no reason given")
            raise InvalidInput(f"it cannot be compiled: {reason[:300]}")
        return matcher


class _Lark:
    """Writes the formats of a structural tag as rules."""

    def __init__(self, marks: dict[str, int]) -> None:
        self._marks = marks
        """Token ids that stand for text in the grammar, by that text."""
        self._rules: list[str] = []
        self._numbers = count()
        self._of_type: dict[str, Callable[[dict[str, Any]], str]] = {
            "const_string": lambda format: self._literal(format["value"]),
            "json_schema": lambda format: self._json(format["json_schema"]),
            "any_text": lambda format: self._text_without(format.get("excludes") or []),
            "sequence": lambda format: " ".join(map(self._format, format["elements"])),
            "or": lambda format: f"({' | '.join(map(self._format, format['elements']))})",
            "optional": lambda format: f"({self._format(format['content'])})?",
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def grammar(self, body: Any) -> str:
        try:
            start = self._format(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"the structural tag is incomplete: {error}") from None
        return "\n".join([f"start: {start}", *self._rules])

    def _format(self, format: dict[str, Any]) -> str:
        write = self._of_type.get(format["type"])
        if write is None:
            raise InvalidInput(f"structural tags of type {format['type']!r} are not supported")
        return write(format)

    def _tag(self, tag: dict[str, Any]) -> str:
        begin, content, end = tag["begin"], tag["content"], tag["end"]
        parts = [self._literal(begin)] if begin else []
        if content["type"] == "any_text":
            parts.append(self._text_up_to(end))
        else:
            parts += [self._format(content), self._literal(end)]
        return " ".join(parts)

    def _separated(self, format: dict[str, Any]) -> str:
        one = self._rule(" | ".join(self._format(tag) for tag in format["tags"]))
        more = "" if format.get("stop_after_first") else f" ({self._literal(format['separator'])} {one})*"
        return f"{one}{more}" if format.get("at_least_one") else f"({one}{more})?"

    def _triggered(self, format: dict[str, Any]) -> str:
        (trigger,) = format["triggers"]
        inside = [self._tag({**tag, "begin": tag["begin"].removeprefix(trigger)}) for tag in format["tags"]]
        one = self._rule(f"{self._text_up_to(trigger)} ({' | '.join(inside)})")
        text = self._text_without([trigger])
        if format.get("stop_after_first"):
            return one if format.get("at_least_one") else f"({one} | {text})"
        return f"{one}{'+' if format.get('at_least_one') else '*'} {text}"

    def _json(self, schema: Any) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self._rule("%json " + json.dumps({**_known_formats(schema), "x-guidance": _JSON_OPTIONS}))

    def _text_without(self, excluded: list[str]) -> str:
        """Any text in which none of the strings stands; a token that spells one is no text anyhow."""
        without = [f"~/(?s:.*){re.escape(text).replace('/', chr(92) + '/')}(?s:.*)/" for text in excluded]
        return self._terminal(" & ".join([_ANYTHING, *without]))

    def _text_up_to(self, end: str) -> str:
        """Any text up to the first `end`, with it."""
        mark = next((text for text in self._marks if end.startswith(text)), None)
        if mark is not None:
            return f"{self._terminal(_ANYTHING)} {self._literal(end)}"
        return self._rule(_ANYTHING, option=f"[suffix={_quote(end)}]")

    def _literal(self, text: str) -> str:
        if not self._marks:
            return _quote(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._marks))})", text)
        return " ".join(
            f"<[{self._marks[piece]}]>" if piece in self._marks else _quote(piece)
            for piece in pieces
            if piece
        )

    def _rule(self, body: str, *, prefix: str = "r", option: str = "") -> str:
        name = f"{prefix}{next(self._numbers)}"
        self._rules.append(f"{name}{option}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        return self._rule(body, prefix="T")


def _known_formats(schema: Any) -> Any:
    """The schema without formats that only its author knows, which JSON schema says to ignore."""
    match schema:
        case dict():
            unknown = isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS
            return {
                name: _known_formats(value)
                for name, value in schema.items()
                if not (unknown and name == "format")
            }
        case list():
            return [_known_formats(each) for each in schema]
        case _:
            return schema


def _parse_json(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"the {what} is not JSON") from None
    return value


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
