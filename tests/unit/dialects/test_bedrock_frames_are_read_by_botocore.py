"""Messages of an AWS event stream are those that botocore reads, checksums and all."""

from __future__ import annotations

import base64
import json

from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.base import CallIdentity, Refusal, RequestRefused
from polar.dialects.bedrock_messages import BedrockMessages, BedrockStream, frame_message
from polar.models.chat import FinishReason, ToolCall, Usage

NAMES = st.text("abc:-", min_size=1, max_size=20)


@given(
    st.lists(st.tuples(st.dictionaries(NAMES, NAMES, max_size=4), st.binary(max_size=500)), max_size=4),
    st.integers(1, 50),
)
def test_any_messages_come_back_however_they_are_cut(
    sent: list[tuple[dict[str, str], bytes]], size: int
) -> None:
    wire = b"".join(frame_message(headers, payload) for headers, payload in sent)
    buffer, seen = EventStreamBuffer(), []
    for at in range(0, len(wire), size):
        buffer.add_data(wire[at : at + size])
        seen += [(message.headers, message.payload) for message in buffer]
    assert seen == [(headers | {":content-type": "application/json"}, payload) for headers, payload in sent]


@given(st.sampled_from(Refusal))
def test_every_refusal_is_a_message_and_an_error_of_aws(refusal: Refusal) -> None:
    refused = RequestRefused(refusal, "no")
    buffer = EventStreamBuffer()
    buffer.add_data(BedrockStream(CallIdentity("c", "m", 0)).error(refused))
    (message,) = buffer
    assert message.headers[":message-type"] == "exception"
    assert message.headers[":exception-type"].endswith("Exception")
    told = BedrockMessages().error(refused)
    assert told.status >= 400
    assert told.headers["x-amzn-ErrorType"].endswith("Exception")


def test_a_stream_is_one_message_an_event() -> None:
    stream = BedrockStream(CallIdentity("c", "m", 0))
    wire = stream.start() + stream.keep_alive() + stream.reasoning("hm") + stream.text("Hi")
    wire += stream.tool_call(ToolCall("t", "f", "{}")) + stream.finish(FinishReason.STOP, Usage(1, 2))
    buffer = EventStreamBuffer()
    buffer.add_data(wire)
    messages = list(buffer)
    assert {message.headers[":event-type"] for message in messages} == {"chunk"}
    events = [json.loads(base64.b64decode(json.loads(message.payload)["bytes"])) for message in messages]
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        *("message_start", "ping"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]


def test_the_key_is_a_bearer_token_or_the_access_key_id() -> None:
    signed = (
        "AWS4-HMAC-SHA256 Credential=polar-a_b-c/20261116/us-east-1/bedrock/aws4_request, "
        "SignedHeaders=host;x-amz-date, Signature=0f"
    )
    dialect = BedrockMessages()
    assert dialect.key({"Authorization": signed}, {}) == "polar-a_b-c"
    assert dialect.key({"Authorization": "Bearer polar-x"}, {}) == "polar-x"
    assert dialect.key({"Authorization": "AWS4-HMAC-SHA256 Signature=0f"}, {}) is None
    assert dialect.key({}, {}) is None
