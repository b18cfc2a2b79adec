"""The embedded engine against plain `model.generate` of transformers: same weights, same process, f32.

The machine may be noisy, so each quantity is measured in rounds that alternate with its peer's,
and the best round of each counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, at_least, at_most, report
from polar.config.settings import EngineSettings
from polar.engines.embedded.model import load
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.engines.embedded.weights import ensure_model

ROUNDS = 3
PROMPT = 256
NEW = 32
SYSTEM = 1300
"""Tokens of a harness's system prompt, as Pi sends it."""


@dataclass
class Best:
    """Shortest seconds seen of each quantity."""

    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, name: str, seconds: float) -> None:
        self.seconds[name] = min(seconds, self.seconds.get(name, float("inf")))


def prompt(seed: int, length: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(100, 40_000, length)]


def timed_run(scheduler: Scheduler, *asked: Generation) -> tuple[float, float, list[Sampled]]:
    """Seconds until every request has its first token, seconds after that, and the first tokens."""
    for number, generation in enumerate(asked):
        scheduler.submit(number, generation)
    firsts: dict[int, Sampled] = {}
    began = time.perf_counter()
    prefilled = began
    while scheduler.has_work:
        for sampled in scheduler.step():
            if firsts.setdefault(sampled.request, sampled) is sampled:
                prefilled = time.perf_counter()
    return prefilled - began, time.perf_counter() - prefilled, [firsts[n] for n in range(len(asked))]


def timed_generate(model: Any, ids: list[int], new: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=True,
            top_k=0,
        )
    return time.perf_counter() - began


def ask(ids: list[int], new: int) -> Generation:
    return Generation(ids, new, Draw(seed=0))


def decode(best: Best, scheduler: Scheduler, plain: Any, round: int) -> None:
    """One request, eight requests, and plain generate, decoding after prompts of the same length."""
    one = prompt(1000 + round, PROMPT)
    best.take("peer prefill", timed_generate(plain, one, 1))
    whole = timed_generate(plain, one, NEW + 1)
    best.take("peer", whole - best.seconds["peer prefill"])
    prefill, rest, _ = timed_run(scheduler, ask(one, NEW + 1))
    best.take("one prefill", prefill)
    best.take("one", rest)
    # Prefilled beforehand, so that all eight decode together from the second step on.
    eight = [[*one, 50 + at] for at in range(8)]
    timed_run(scheduler, *(ask(ids, 1) for ids in eight))
    _, rest, _ = timed_run(scheduler, *(ask(ids, NEW + 1) for ids in eight))
    best.take("eight", rest)


def turns(best: Best, scheduler: Scheduler, round: int) -> int:
    """A fresh prompt, then its second turn; the tokens found cached."""
    first = prompt(2000 + round, SYSTEM)
    fresh, _, _ = timed_run(scheduler, ask(first, 1))
    best.take("fresh", fresh)
    second, _, (token,) = timed_run(scheduler, ask(first + prompt(3000 + round, 40), 1))
    best.take("second", second)
    return token.cached_tokens


def shared(best: Best, scheduler: Scheduler, round: int) -> int:
    """Eight sessions that begin at once with the same system prompt; prompt tokens computed in all."""
    system = prompt(4000 + round, SYSTEM)
    sessions = [ask(system + prompt(5000 + at, 20), 1) for at in range(8)]
    prefill, _, firsts = timed_run(scheduler, *sessions)
    best.take("shared", prefill)
    return sum(len(s.prompt_ids) for s in sessions) - sum(token.cached_tokens for token in firsts)


def main() -> None:
    settings = EngineSettings(device="cpu", dtype="float32", slots=8)
    plain = AutoModelForCausalLM.from_pretrained(ensure_model(settings.model), dtype=torch.float32).eval()
    scheduler = Scheduler(load(settings))
    best = Best()
    timed_generate(plain, prompt(0, 8), 4)
    timed_run(scheduler, ask(prompt(0, 8), 4))
    for round in range(ROUNDS):
        decode(best, scheduler, plain, round)
    cached = [turns(best, scheduler, round) for round in range(2)]
    computed = shared(best, scheduler, 0)
    seconds = best.seconds
    peer = NEW / seconds["peer"]
    fresh_share = 100 * seconds["second"] / seconds["fresh"]
    report(
        "engine",
        [
            at_least("decode, 1 request, vs generate", NEW / seconds["one"], "tok/s", 0.9, peer),
            at_least("decode, 8 requests, vs 1 generate", 8 * NEW / seconds["eight"], "tok/s", 3.0, peer),
            Row("prefill", PROMPT / seconds["one prefill"], "tok/s", PROMPT / seconds["peer prefill"]),
            at_most("2nd turn, time of a fresh prefill", fresh_share, "%", 25.0),
            at_least("2nd turn, tokens from the cache", min(cached), "tokens", 1.0, SYSTEM),
            at_most("8 sessions, 1 system prompt, computed", computed, "tokens", SYSTEM + 8 * 20 + 100),
            Row("8 sessions, 1 system prompt", seconds["shared"], "s", 8 * seconds["fresh"]),
        ],
    )


if __name__ == "__main__":
    main()
