"""What is fuzzed: every dialect of a gateway, and every route of the control plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import Any

from tests.fuzz.documents import damaged, mutated, text_of
from tests.fuzz.wire import Request, Wire, bent, written

_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_CHAT = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "README"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": _SCHEMA}}],
    "tool_choice": "auto",
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 8,
    "stop": ["END"],
    "seed": 1,
    "n": 1,
    "logit_bias": {"5": 1},
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
}
_COMPLETIONS = {
    "model": "scripted",
    "prompt": "<|im_start|>user\nHi<|im_end|>",
    "max_tokens": 8,
    "temperature": 0.7,
    "n": 1,
    "best_of": 1,
    "logprobs": 0,
    "echo": False,
    "suffix": None,
    "stop": ["END"],
    "stream": False,
    "stream_options": {"include_usage": True},
}
_RESPONSES = {
    "model": "scripted",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "README"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "name": "bash", "parameters": _SCHEMA, "strict": False}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": None,
    "max_output_tokens": 16,
    "temperature": 1.0,
    "stream": False,
    "store": False,
}
_MESSAGES = {
    "model": "scripted",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "README"}]},
    ],
    "tools": [{"name": "bash", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u"},
    "temperature": 1,
    "top_k": 5,
    "stream": False,
}
_OLLAMA = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Hi", "images": ["AAAA"]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}],
        },
        {"role": "tool", "tool_name": "bash", "content": "README"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}],
    "format": "",
    "options": {"temperature": 0.7, "top_k": 3, "num_predict": 8, "stop": ["END"], "num_ctx": 4096},
    "logprobs": True,
    "keep_alive": "5m",
    "stream": False,
}
_GENERATE = {
    "model": "scripted",
    "prompt": "Hi",
    "system": "Be brief.",
    "images": ["AAAA"],
    "raw": False,
    "options": {"num_predict": 8},
    "stream": False,
}
_GOOGLE = {
    "systemInstruction": {"parts": [{"text": "You are an agent."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hi"}]},
        {
            "role": "model",
            "parts": [
                {"functionCall": {"name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "c2ln"}
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "README"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "bash", "description": "d", "parameters": _SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "temperature": 1,
        "topP": 0.9,
        "topK": 3,
        "maxOutputTokens": 8,
        "stopSequences": ["END"],
        "candidateCount": 1,
        "thinkingConfig": {"includeThoughts": True},
        "responseMimeType": "text/plain",
    },
    "safetySettings": [],
}
_VERTEX = "/v1/projects/p/locations/global/publishers"
_CALLS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/chat/completions", _CHAT),
    ("POST", "/openai/deployments/scripted/chat/completions?api-version=2024-10-21", _CHAT),
    ("POST", "/v1/completions", _COMPLETIONS),
    ("POST", "/openai/deployments/scripted/completions", _COMPLETIONS | {"prompt": [[1, 2, 30]]}),
    ("POST", "/v1/responses", _RESPONSES),
    ("POST", "/openai/responses?api-version=preview", _RESPONSES),
    ("POST", "/v1/messages", _MESSAGES),
    ("POST", "/v1/messages/count_tokens", _MESSAGES),
    ("POST", "/v1beta/models/scripted:generateContent", _GOOGLE),
    ("POST", "/v1beta/models/scripted:streamGenerateContent", _GOOGLE),
    ("POST", "/v1beta/models/scripted:streamGenerateContent?alt=sse", _GOOGLE),
    ("POST", "/v1beta/models/scripted:countTokens", {"contents": _GOOGLE["contents"]}),
    ("POST", f"{_VERTEX}/google/models/scripted:generateContent", _GOOGLE),
    ("POST", f"{_VERTEX}/google/models/scripted:streamGenerateContent?alt=sse", _GOOGLE),
    ("POST", f"{_VERTEX}/anthropic/models/scripted:rawPredict", _MESSAGES),
    ("POST", f"{_VERTEX}/anthropic/models/scripted:streamRawPredict", _MESSAGES),
    ("POST", f"{_VERTEX}/anthropic/models/count-tokens:rawPredict", _MESSAGES),
    ("POST", "/model/scripted/invoke", _MESSAGES),
    ("POST", "/model/scripted/invoke-with-response-stream", _MESSAGES),
    ("POST", "/api/chat", _OLLAMA),
    ("POST", "/api/generate", _GENERATE),
    ("POST", "/api/show", {"model": "scripted", "verbose": True}),
    ("GET", "/api/tags", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/scripted", None),
    ("GET", "/v1beta/models", None),
    ("GET", "/nowhere", None),
)
_IDENTIFIERS = ("known", "unknown", "x" * 300, "%00", "..", "%2e%2e%2f", "a%20b", "-1", "\xe9", "9" * 40)
_QUERY_VALUES = (
    "",
    "0",
    "1",
    "-1",
    "1e9",
    "nan",
    "9" * 40,
    "true",
    "%00",
    "%ff",
    "a,b",
    "known",
    "[]",
    "\xe9",
)


class Target(ABC):
    """One server, and how to make requests for it; request n follows from the seed and n alone."""

    def request(self, seed: int, number: int) -> Wire:
        chance = Random(f"{type(self).__name__}/{seed}/{number}")
        sound, document = self.sound(chance)
        if document is not None:
            if chance.random() < 0.8:
                document = self.settled(mutated(document, chance))
            body = text_of(document)
            sound = Request(
                sound.method,
                sound.path,
                damaged(body, chance) if chance.random() < 0.12 else body,
                sound.headers,
            )
        while chance.random() < 0.2:
            sound = bent(sound, chance)
        return written(sound, chance, bends_framing=chance.random() < 0.06)

    @abstractmethod
    def sound(self, chance: Random) -> tuple[Request, Any]:
        """A request without its body, and the document that is the body; None: it has none."""

    def settled(self, document: Any) -> Any:
        """The document with what must stay as it is for the run to end."""
        return document


class GatewayTarget(Target):
    def __init__(self, key: str) -> None:
        self.key = key

    def sound(self, chance: Random) -> tuple[Request, Any]:
        method, path, document = chance.choice(_CALLS)
        if isinstance(document, dict) and "stream" in document and chance.random() < 0.3:
            document = document | {"stream": True}
        match chance.randrange(10):
            case 0:
                return Request(method, f"/k/{self.key}{path}"), document
            case 1:
                return Request(method, path, headers=(("x-api-key", self.key),)), document
            case 2:
                return Request(method, path, headers=(("x-goog-api-key", self.key),)), document
            case 3:
                return Request(method, path, headers=(("api-key", self.key),)), document
            case 4:
                signed = (
                    f"AWS4-HMAC-SHA256 Credential={self.key}/20261116/r/bedrock/aws4_request, Signature=0"
                )
                return Request(method, path, headers=(("Authorization", signed),)), document
            case _:
                return Request(method, path, headers=(("Authorization", f"Bearer {self.key}"),)), document


class ControlPlaneTarget(Target):
    """Its routes and the shapes of their bodies come from the server's own OpenAPI document."""

    def __init__(self, openapi: dict[str, Any], token: str, task: dict[str, Any]) -> None:
        self._openapi = openapi
        self._token = token
        self._task = task
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in openapi["paths"].items()
            for method, operation in operations.items()
        ]

    @property
    def routes(self) -> int:
        return len(self._operations)

    def sound(self, chance: Random) -> tuple[Request, Any]:
        method, path, operation = chance.choice(self._operations)
        query = []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            value = chance.choice(_IDENTIFIERS if parameter["in"] == "path" else _QUERY_VALUES)
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
            elif parameter["in"] == "query" and chance.random() < 0.6:
                query.append(f"{name}={'0' if 'wait' in name else value}")
        headers: tuple[tuple[str, str], ...] = (
            () if chance.random() < 0.03 else (("Authorization", f"Bearer {self._token}"),)
        )
        headers += (("Content-Type", "application/json"),)
        return Request(method, f"{path}?{'&'.join(query)}", headers=headers), self._document(
            operation, chance
        )

    def settled(self, document: Any) -> Any:
        return document | {"wait_seconds": 0} if isinstance(document, dict) else document

    def _document(self, operation: dict[str, Any], chance: Random) -> Any:
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            return "bytes" if content else None
        schema = content["application/json"]["schema"]
        if schema.get("$ref", "").endswith("/TaskSpec"):
            return self._task | {"id": f"t{chance.randrange(10**6)}"}
        return self.settled(self._drawn(schema, chance, 0))

    def _drawn(self, schema: dict[str, Any], chance: Random, depth: int) -> Any:
        """A value that the schema more or less describes."""
        if "$ref" in schema:
            return self._drawn(
                self._openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]], chance, depth
            )
        for several in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if schema.get(several):
                return self._drawn(chance.choice(schema[several]), chance, depth + 1)
        if "enum" in schema or "const" in schema:
            return chance.choice(schema.get("enum") or [schema["const"]])
        match schema.get("type"):
            case "object":
                named = schema.get("properties", {}).items()
                needed = schema.get("required", ())
                return {
                    name: self._drawn(inner, chance, depth + 1)
                    for name, inner in named
                    if name in needed or (depth < 6 and chance.random() < 0.5)
                }
            case "array":
                count = chance.randrange(3) if depth < 6 else 0
                return [self._drawn(schema.get("items", {}), chance, depth + 1) for _ in range(count)]
            case "integer":
                return max(chance.randrange(5), int(schema.get("minimum", 0)))
            case "number":
                return max(chance.random(), float(schema.get("minimum", 0)))
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
            case _:
                return chance.choice(("known", "unknown", "text", "2026-01-01T00:00:00Z", "90d", "1"))
