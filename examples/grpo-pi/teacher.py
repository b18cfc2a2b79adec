r"""An engine that plays known solutions, token by token, to whoever asks for one of the tasks.

    python examples/grpo-pi/teacher.py --port 8701
    polar generate -t examples/grpo-pi/train.yaml --engine-url http://127.0.0.1:8701 --engine-mode tokens \
        --model smollm2-135m-instruct --seed 1 --out data/warm-start \
        --config examples/grpo-pi/small-system.yaml

The sessions are real: Pi asks, the gateway renders prompts and records tokens, tools run in a sandbox, and
the check decides what is accepted. Only the answers are scripted instead of sampled, so their logprobs are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml
from aiohttp import web
from tokenizers import Tokenizer

from polar.config import plugins
from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_tokenizer
from polar.engines.embedded.wire import CompletionAnswer, CompletionBody, TokenizeBody, Tokens
from polar.models.chat import FinishReason
from polar.models.component import Component
from polar.rendering.call_forms import FENCED, HERMES
from polar.rendering.tool_calls import CLOSE, OPEN, write_call
from polar.tasksets.expressions import compile_template
from polar.tasksets.rows import Row

START, END = "<|im_start|>", "<|im_end|>"
"""The marks around every turn of a ChatML prompt."""
DONE = "Done."
CONTEXT = 8192


class Teacher:
    """The turns of every task's solutions."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], tool_form: str = HERMES) -> None:
        known = list(rows)
        asked = Counter(_text(row["instruction"]) for row in known)
        self._solutions = {
            _text(row["instruction"]): [_turns(solution, tool_form) for solution in row["solutions"]]
            for row in known
            if asked[_text(row["instruction"])] == 1
        }
        if alike := len(known) - len(self._solutions):
            print(f"{alike} tasks are skipped: they share an instruction with others", file=sys.stderr)
        if not self._solutions:
            raise SystemExit("every task shares its instruction with another")

    def answer(self, prompt: str, seed: int | None) -> str:
        """Return the next turn after a ChatML prompt, continuing a solution that has begun."""
        turns = [turn.partition("\n") for turn in prompt.split(START)[1:]]
        asked = max(
            (
                n
                for n, (role, _, said) in enumerate(turns)
                if role == "user" and _text(said) in self._solutions
            ),
            default=None,
        )
        if asked is None:
            return DONE
        given = [_text(said) for role, _, said in turns[asked:] if role == "assistant"][:-1]
        fitting = [
            turns
            for turns in self._solutions[_text(turns[asked][2])]
            if turns[: len(given)] == given and len(turns) > len(given)
        ]
        chance = random.Random(f"{seed} {prompt}")
        return chance.choice(fitting)[len(given)] if fitting else DONE


def _text(said: str) -> str:
    return said.partition(END)[0].strip("\n")


def _turns(solution: Sequence[Mapping[str, Any]], tool_form: str) -> list[str]:
    calls = [write_call(call["tool"], json.dumps(call["arguments"])) for call in solution]
    if tool_form == FENCED:
        calls = [f"```json{call.removeprefix(OPEN).removesuffix(CLOSE)}```" for call in calls]
    return [*calls, DONE]


class TeacherServer:
    """Implements the part of vLLM's API that the gateway uses in tokens mode."""

    def __init__(self, teacher: Teacher, tokenizer: Tokenizer, model: str) -> None:
        self._teacher = teacher
        self._tokenizer = tokenizer
        self._model = model
        self._end = tokenizer.token_to_id(END)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": CONTEXT, "policy_version": 0}
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = TokenizeBody.model_validate_json(await request.read())
        ids = self._tokenizer.encode(body.prompt or "", add_special_tokens=False).ids
        return web.json_response({"count": len(ids), "max_model_len": CONTEXT, "tokens": ids})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = CompletionBody.model_validate_json(await request.read())
        text = self._teacher.answer(self._tokenizer.decode(body.prompt, skip_special_tokens=False), body.seed)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]
        finish = FinishReason.STOP if len(ids) <= (body.max_tokens or CONTEXT) else FinishReason.LENGTH
        ids = ids[: body.max_tokens]
        said = Tokens(
            ids=ids,
            texts=[self._tokenizer.decode([id], skip_special_tokens=False) for id in ids],
            logprobs=[0.0] * len(ids),
            text=text,
            policy_version=0,
            finish_reason=finish,
        )
        answer = CompletionAnswer(
            "teacher", self._model, list(body.prompt), returns_ids=True, returns_logprobs=True
        )
        events = [*answer.chunks(said, is_first=True), answer.last_chunk(0, answer.usage(len(ids), 0))]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def rows(taskset: Path) -> Iterable[Mapping[str, Any]]:
    """Return the rows of the taskset's source, including solutions, with the taskset's instructions."""
    spec = yaml.safe_load(taskset.read_text())
    source = plugins.create(
        "tasksets", "taskset", Component(name=spec["format"], options=spec.get("options", {}))
    )
    worded = compile_template({k: v for k, v in spec.get("template", {}).items() if k == "instruction"})
    found = (row.columns for row in source.rows(None, spec.get("split")) if isinstance(row, Row))
    return [{**columns, **worded(columns)} for columns in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasksets", type=Path, nargs="*", default=[Path(__file__).with_name("train.yaml")])
    parser.add_argument("--port", type=int, default=8701, help="0 picks a free one")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tool-form", default=HERMES, choices=(HERMES, FENCED), help="how calls are written")
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(ensure_tokenizer(asked.model) / "tokenizer.json"))
    teacher = Teacher((row for taskset in asked.tasksets for row in rows(taskset)), asked.tool_form)
    server = TeacherServer(teacher, tokenizer, asked.model)
    asyncio.run(serve(server.app(), asked.port))


async def serve(app: web.Application, port: int) -> None:
    """Serve until the process ends, after printing the address as its only line."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, port = runner.addresses[0][:2]
    print(f"ready http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
