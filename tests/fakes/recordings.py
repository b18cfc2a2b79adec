"""A session whose conversation is known: two turns with a tool call, and a side call that is not trained."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from polar.models.chat import FinishReason, Message, Role, ToolCall, ToolDefinition
from polar.models.completion import Completion
from polar.models.session import AgentEnd, SessionResult, SessionStatus, StageSeconds, Verdict
from polar.recordings.recording import Recording, encode
from polar.trajectory.per_request import PerRequest
from tests.captures import grow

SYSTEM = Message(Role.SYSTEM, "\n".join(f"rule {n}: be careful" for n in range(40)))
USER = Message(Role.USER, "Run this command: echo hello > hello.txt")
CALL = Message(
    Role.ASSISTANT, "I will run it.", tool_calls=(ToolCall("call_0", "bash", '{"command": "echo hello"}'),)
)
TOOL = Message(Role.TOOL, "exit code 0", tool_call_id="call_0")
DONE = Message(Role.ASSISTANT, "Done, café 😀")
ESCAPE = "\x1b[2J"


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer that needs no download."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["I will run it. Done, hello"] * 3, trainer)
    return made


def recording(session_id: str = "s1", *, sample: int = 0, reward: float = 1.0) -> Recording:
    vocabulary = tokenizer()
    first = _completion(
        0,
        vocabulary,
        [1, 2, 3],
        "I will run it.",
        (SYSTEM, USER),
        CALL,
        finish_reason=FinishReason.TOOL_CALLS,
    )
    context = [*first.prompt_ids, *first.sampled_ids]
    second = _completion(
        1, vocabulary, [*context, 7, 8], DONE.content, (SYSTEM, USER, CALL, TOOL), DONE, parent=first.id
    )
    title = Message(Role.ASSISTANT, f"A title{ESCAPE}")
    side = _completion(
        2,
        vocabulary,
        [9],
        title.content,
        (Message(Role.USER, "Title?"),),
        title,
        finish_reason=FinishReason.CANCELLED,
    )
    tree = grow((first, second, side))
    trajectory = PerRequest(PerRequest.Options()).build(tree).with_reward(reward)
    result = SessionResult(
        session_id=session_id,
        task_id="hello-file",
        sample=sample,
        attempt=1,
        status=SessionStatus.COMPLETED,
        agent_end=AgentEnd.EXITED,
        exit_code=0,
        verdict=Verdict(reward=reward, components={"exists": 0.3, "right": 0.7}, report="looks [bold]right"),
        stats=trajectory.stats,
        seconds=StageSeconds(init=0.5, running=3.25),
        policy_version_min=3,
        policy_version_max=4,
        harness_version="1.5.0",
        model="unknown-model",
        has_recording=True,
    )
    return Recording(tree, trajectory, result)


def encoded(made: Recording) -> bytes:
    """The recording as the file that a node writes."""
    return encode(made.tree, made.trajectory, made.result)


def _completion(
    index: int,
    vocabulary: Tokenizer,
    prompt: list[int],
    text: str,
    messages: tuple[Message, ...],
    response: Message,
    *,
    parent: str | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
) -> Completion:
    sampled = np.array([*vocabulary.encode(text).ids, 0], np.int32)
    return Completion(
        id=f"c{index}",
        index=index,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=sampled,
        logprobs=np.linspace(-0.01, -4, len(sampled), dtype=np.float32),
        policy_versions=np.full(len(sampled), 3 + min(index, 1), np.int32),
        messages=messages,
        response=response,
        finish_reason=finish_reason
        or (FinishReason.TOOL_CALLS if response.tool_calls else FinishReason.STOP),
        parent=parent,
        tools=(ToolDefinition("bash"), ToolDefinition("write")),
        started_at=1_700_000_000.0 + index,
        first_token_at=1_700_000_000.2 + index,
        ended_at=1_700_000_000.8 + index,
    )
