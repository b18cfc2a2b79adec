"""How OpenAI's requests guide the decoding: modes of tool choice, output formats, biases of tokens."""

from __future__ import annotations

from polar.dialects.json_fields import Fields, kind, malformed
from polar.dialects.schemas import needed_schema
from polar.models.chat import JsonOutput, ToolUse

MODES = {"auto": ToolUse.AUTO, "none": ToolUse.NONE, "required": ToolUse.REQUIRED}

_MAX_BIAS = 100
_MAX_TOKEN_ID = 2**31 - 1


def response_format(fields: Fields) -> JsonOutput | None:
    """The output that Chat Completions' `response_format` asks for."""
    wanted = fields.child("response_format")
    if wanted is None:
        return None
    # The schema stands in an object of its own here, beside the type in Responses.
    return output_format(wanted, wanted.child("json_schema"))


def output_format(wanted: Fields, schema: Fields | None) -> JsonOutput | None:
    """The output that a format object asks for, with its schema and the schema's name in another."""
    type_ = wanted.needed_string("type")
    match type_:
        case "text":
            return None
        case "json_object":
            return JsonOutput({"type": "object"})
        case "json_schema":
            if schema is None:
                raise malformed(wanted.at("json_schema"), "is required and must be an object")
            return JsonOutput(needed_schema(schema, "schema"), schema.string("name") or "answer")
        case _:
            raise malformed(wanted.at("type"), f"must be text, json_object or json_schema, not {type_!r}")


def logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits."""
    biases = fields.child("logit_bias")
    if biases is None:
        return ()
    found: list[tuple[int, float]] = []
    for token, bias in fields.get("logit_bias").items():
        # isdecimal takes digits of every script.
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= _MAX_TOKEN_ID):
            raise malformed(biases.at(token), "is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise malformed(biases.at(token), f"must be a number, not {kind(bias)}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise malformed(biases.at(token), f"must be between -{_MAX_BIAS} and {_MAX_BIAS}, not {bias}")
        found.append((int(token), float(bias)))
    return tuple(found)
