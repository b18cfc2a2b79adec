"""An engine: whether it gives ids and logprobs, streams, takes other weights, and how its tokens drift."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from polar.app.doctor import Area, Finding
from polar.app.stack import PROBE, Say, connected
from polar.config import plugins
from polar.config.settings import Settings
from polar.engines.base import Engine, EngineError, GenerateRequest, Mode, ModelInfo
from polar.engines.embedded.weights import ensure_tokenizer
from polar.errors import PolarError
from polar.models.chat import Message, Role, Sampling
from polar.models.session import PROCESSED, RAW
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import read_tokenizer
from polar.telemetry.readings import shown

AREA = Area("engine")

QUESTION = "Write one line of Python that prints the numbers 1, 22 and 333, then say why it works."
SAMPLE_TOKENS = 48

_WEIGHT_SIGNS = {
    "vllm": ("/is_paused", "", "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1"),
    "sglang": ("/openapi.json", "/update_weights_from_disk", "start a current SGLang"),
}
"""Engine kind → a page of servers that take other weights, what stands on it, and how to have it."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    prompt_ids: list[int]
    ids: list[int]
    chunks: int


async def findings(settings: Settings, say: Say) -> AsyncIterator[Finding]:
    """Look at the engine that the settings name; the embedded one is started for it."""
    try:
        async with connected(settings, say) as engine:
            async for finding in _findings(settings, engine):
                yield finding
    except EngineError as error:
        yield AREA.problem("reachable", error.message, error.hint or "start it, or correct engine.url")


async def _findings(settings: Settings, engine: Engine) -> AsyncIterator[Finding]:
    model = await engine.model_info()
    version = f"policy version {model.policy_version}"
    yield AREA.ok("reachable", f"serves {model.name} with a context of {model.max_context}, {version}")
    modes = plugins.load("engines", settings.engine.kind).modes
    if Mode.TOKENS not in modes:
        yield AREA.warning(
            "tokens", "text only: sessions are recorded and never trainable", "use vLLM or SGLang to train"
        )
        return
    yield await AREA.examined("tokens", lambda: _checked(engine, Mode.TOKENS))
    yield await AREA.examined("chat", lambda: _checked(engine, Mode.CHAT))
    yield await AREA.examined("logprobs", lambda: _logprobs(engine))
    yield await _weights(settings)
    is_named = "model" in settings.engine.model_fields_set or not settings.engine.urls
    name = settings.engine.model if is_named else model.name
    try:
        directory = await asyncio.to_thread(ensure_tokenizer, name)
        renderer = await asyncio.to_thread(renderer_for, name, directory, family=settings.engine.renderer)
    except PolarError as error:
        fix = f"{error.hint or ''} (without it the engine renders: engine.mode chat)".strip()
        yield AREA.warning("renderer", error.message, fix)
        return
    async for finding in _rendered(engine, model, renderer, directory):
        yield finding


async def _logprobs(engine: Engine) -> Finding:
    """As the checks before have found out, where the engine does not say."""
    mode = (await engine.model_info()).logprobs_mode
    if mode == PROCESSED:
        return AREA.ok("logprobs", "of the distribution that tokens are sampled from")
    known = "taken before temperature" if mode == RAW else "of a distribution that it does not show"
    fix = "start vLLM with --logprobs-mode processed_logprobs, or train at temperature 1"
    return AREA.warning("logprobs", f"{known}: at a temperature other than 1 nothing is trained", fix)


async def _checked(engine: Engine, mode: Mode) -> Finding:
    await engine.check(mode)
    return AREA.ok(mode.value, "token ids and logprobs come with every answer")


async def _weights(settings: Settings) -> Finding:
    """By what a server shows: nothing is paused or loaded to find out."""
    path, sign, fix = _WEIGHT_SIGNS.get(settings.engine.kind, ("", "", "use vLLM or SGLang to train"))
    key = settings.engine.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=10.0, headers=headers) as http:
        lacking = [
            shown(url)
            for url in settings.engine.urls
            if not await _shows(http, f"{url.removesuffix('/v1')}{path}", sign)
        ]
    if lacking:
        return AREA.warning("weight updates", f"not taken by {', '.join(lacking)}", fix)
    return AREA.ok("weight updates", "taken while sessions run")


async def _shows(http: httpx.AsyncClient, url: str, sign: str) -> bool:
    try:
        answer = await http.get(url)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and sign in answer.text


async def _rendered(
    engine: Engine, model: ModelInfo, renderer: Renderer, directory: Path
) -> AsyncIterator[Finding]:
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    yield await AREA.examined("tokenizer", lambda: _same_tokenizer(engine, model, tokenizer, directory))
    try:
        sample = await _sampled(engine, renderer)
    except EngineError as error:
        yield AREA.problem("streaming", error.message, error.hint)
        return
    yield _streaming(sample)
    yield drift(sample, tokenizer)


async def _same_tokenizer(engine: Engine, model: ModelInfo, tokenizer: Tokenizer, directory: Path) -> Finding:
    theirs = await engine.tokenize(PROBE)
    if theirs is None:
        return AREA.warning("tokenizer", f"that it is the one of {model.name} is taken on trust")
    if theirs != tokenizer.encode(PROBE, add_special_tokens=False).ids:
        fix = "name the model that the engine serves: --model, or engine.model in the settings"
        return AREA.problem("tokenizer", f"another than that in {directory}", fix)
    return AREA.ok("tokenizer", "engine and renderer agree")


async def _sampled(engine: Engine, renderer: Renderer) -> EngineAnswer:
    prompt = renderer.render((Message(Role.USER, QUESTION),), ())
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=SAMPLE_TOKENS)
    request = GenerateRequest("doctor", prompt, sampling, renderer.stop_token_ids)
    ids: list[int] = []
    chunks = 0
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            ids += chunk.ids
            chunks += 1
    return EngineAnswer(prompt, ids, chunks)


def _streaming(sample: EngineAnswer) -> Finding:
    detail = f"{len(sample.ids)} tokens came in {sample.chunks} pieces"
    if sample.chunks < 2 <= len(sample.ids) - 1:
        return AREA.warning("streaming", detail, "reach the engine directly: a proxy before it may buffer")
    return AREA.ok("streaming", detail)


def drift(sample: EngineAnswer, tokenizer: Tokenizer) -> Finding:
    """Whether the sampled text, tokenised again as a chat template does, is the tokens that were sampled."""
    text = tokenizer.decode(sample.ids, skip_special_tokens=False)
    again = tokenizer.encode(text, add_special_tokens=False).ids
    if again == sample.ids:
        return AREA.ok("token drift", f"none: {len(sample.ids)} sampled tokens read back as they were")
    pairs = enumerate(zip(sample.ids, again, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(sample.ids), len(again)))
    return AREA.ok(
        "token drift",
        f"{len(sample.ids)} sampled tokens read back as {len(again)}, other ones from token {place} on:"
        " tokens mode trains what was sampled; in chat mode such a turn begins a new trace",
    )
