"""What a request samples depends on its prompt and seed, not on slots, chunks, caches or neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.embedded import attention
from polar.engines.embedded.model import SlotModel
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Chunks, Generation, Sampled, Scheduler
from polar.models.chat import FinishReason

Reference = Callable[[list[int], list[int]], list[float]]
TOLERANCE = 1e-4


def prompt(seed: int, length: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, length)]


def run(scheduler: Scheduler, *asked: Generation) -> list[list[Sampled]]:
    for number, generation in enumerate(asked):
        scheduler.submit(number, generation)
    answers: list[list[Sampled]] = [[] for _ in asked]
    while scheduler.has_work:
        for sampled in scheduler.step():
            answers[sampled.request].append(sampled)
    return answers


def ids(answer: list[Sampled]) -> list[int]:
    return [sampled.token_id for sampled in answer]


def logprobs(answer: list[Sampled]) -> list[float]:
    return [sampled.logprob for sampled in answer]


def test_logprobs_are_those_of_a_teacher_forced_forward(
    tiny: SlotModel, reference_logprobs: Reference
) -> None:
    (answer,) = run(Scheduler(tiny), Generation(prompt(1, 60), 40, Draw(seed=1)))
    assert len(answer) == 40
    assert logprobs(answer) == pytest.approx(reference_logprobs(prompt(1, 60), ids(answer)), abs=TOLERANCE)


def test_a_request_samples_the_same_alone_and_among_others(tiny: SlotModel) -> None:
    lengths = (3, 150, 40, 90, 7, 60, 200)
    asked = [
        Generation(prompt(at, length), 20 + at, Draw(temperature=at % 2, seed=at))
        for at, length in enumerate(lengths)
    ]
    together = run(Scheduler(tiny, Chunks(shared=16, alone=48)), *asked)
    for generation, answer in zip(asked, together, strict=True):
        (alone,) = run(Scheduler(tiny), generation)
        assert ids(answer) == ids(alone)
        assert logprobs(answer) == pytest.approx(logprobs(alone), abs=TOLERANCE)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 120), st.integers(0, 60), st.integers(1, 12)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 64),
)
def test_any_mix_of_shared_prefixes_gives_the_reference_logprobs(
    tiny_directory: object,
    reference_logprobs: Reference,
    mix: list[tuple[int, int, int, int]],
    chunk: int,
) -> None:
    tiny = _loaded(str(tiny_directory))
    asked = [
        Generation(prompt(family, shared) + prompt(100 + at, own), tokens, Draw(seed=at))
        for at, (family, shared, own, tokens) in enumerate(mix)
    ]
    for generation, answer in zip(asked, run(Scheduler(tiny, Chunks(chunk, 2 * chunk)), *asked), strict=True):
        expected = reference_logprobs(generation.prompt_ids, ids(answer))
        assert logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)
        assert len(answer) == generation.max_tokens
        assert answer[-1].finish_reason is FinishReason.LENGTH


_models: dict[str, SlotModel] = {}


def _loaded(directory: str) -> SlotModel:
    """One model for all examples: every scheduler starts with slots it takes for empty."""
    from polar.config.settings import EngineSettings
    from polar.engines.embedded.model import load

    if directory not in _models:
        _models[directory] = load(EngineSettings(model=directory, device="cpu", slots=4))
    return _models[directory]


def test_second_turn_prefills_only_new_tokens(tiny: SlotModel, reference_logprobs: Reference) -> None:
    scheduler = Scheduler(tiny)
    (first,) = run(scheduler, Generation(prompt(1, 80), 20, Draw(seed=1)))
    longer = prompt(1, 80) + ids(first) + prompt(2, 10)
    (second,) = run(scheduler, Generation(longer, 20, Draw(seed=2)))
    # The last sampled token was never fed back, so it is computed with the new ones.
    assert second[0].cached_tokens == 80 + 20 - 1
    (fresh,) = run(Scheduler(tiny), Generation(longer, 20, Draw(seed=2)))
    assert fresh[0].cached_tokens == 0
    assert ids(second) == ids(fresh)
    assert logprobs(second) == pytest.approx(reference_logprobs(longer, ids(second)), abs=TOLERANCE)


def test_prompts_that_arrive_together_prefill_their_shared_prefix_once(
    tiny: SlotModel, reference_logprobs: Reference
) -> None:
    shared = prompt(1, 150)
    asked = [Generation([*shared, at, 7, 9], 12, Draw(seed=at)) for at in range(4)]
    answers = run(Scheduler(tiny, Chunks(shared=32, alone=64)), *asked)
    assert [answer[0].cached_tokens for answer in answers] == [0, 150, 150, 150]
    for generation, answer in zip(asked, answers, strict=True):
        expected = reference_logprobs(generation.prompt_ids, ids(answer))
        assert logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)


def test_a_long_chunk_is_attended_in_parts(
    tiny: SlotModel, reference_logprobs: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASKED_AT_ONCE", 10)
    (answer,) = run(
        Scheduler(tiny, Chunks(shared=64, alone=64)), Generation(prompt(1, 150), 12, Draw(seed=1))
    )
    assert logprobs(answer) == pytest.approx(reference_logprobs(prompt(1, 150), ids(answer)), abs=TOLERANCE)


def test_a_shared_prefix_does_not_overwrite_another_conversation(tiny: SlotModel) -> None:
    scheduler = Scheduler(tiny)
    system = prompt(1, 40)
    run(scheduler, Generation(system + prompt(2, 100), 1))
    run(scheduler, Generation(system + prompt(3, 100), 1))
    (again,) = run(scheduler, Generation([*system, *prompt(2, 100), 5, 6], 1))
    assert again[0].cached_tokens == 140


def test_an_aborted_request_frees_its_slot_and_the_rest_go_on(tiny: SlotModel) -> None:
    scheduler = Scheduler(tiny)
    for number in range(6):
        scheduler.submit(number, Generation(prompt(number, 20), 30, Draw(seed=number)))
    for _ in range(5):
        scheduler.step()
    assert scheduler.table.free == 0
    scheduler.abort(0)
    scheduler.abort(5)
    assert scheduler.table.free == 1
    ended = {s.request for s in _drain(scheduler) if s.finish_reason}
    assert ended == {1, 2, 3, 4}
    assert scheduler.table.free == 4


def test_a_long_prompt_does_not_stall_a_decoding_request(tiny: SlotModel) -> None:
    scheduler = Scheduler(tiny, Chunks(shared=8, alone=64))
    scheduler.submit(0, Generation(prompt(0, 5), 40, Draw(seed=0)))
    scheduler.step()
    scheduler.submit(1, Generation(prompt(1, 160), 1))
    order = [sampled.request for sampled in _drain(scheduler)]
    assert order.index(1) >= 20 - 1, "each of the twenty chunks comes with a token of the first request"


def test_a_failing_step_ends_its_requests_and_serves_the_next(
    tiny: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(tiny)
    scheduler.submit(0, Generation(prompt(0, 5), 4))
    with monkeypatch.context() as broken:
        broken.setattr(tiny, "forward", _out_of_memory)
        (failed,) = scheduler.step()
    assert failed.finish_reason is FinishReason.ERROR
    (answer,) = run(scheduler, Generation(prompt(0, 5), 4))
    assert len(answer) == 4
    assert answer[0].cached_tokens == 0


def _out_of_memory(_segments: object) -> None:
    raise RuntimeError("out of memory")


def _drain(scheduler: Scheduler) -> list[Sampled]:
    sampled = []
    while scheduler.has_work:
        sampled += scheduler.step()
    return sampled
