"""Every mistake in a request is answered with the field's name and what it accepts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from polar.models.delivery import SIZES
from tests.fakes.control_plane import idle_task


def task(**changes: Any) -> dict[str, Any]:
    return {**idle_task().model_dump(mode="json", exclude_defaults=True), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"harness": "codx"}, "harness.name: unknown harness 'codx' (known: idle, other)"),
        ({"runtime": "vm"}, "runtime.name: unknown runtime 'vm' (known: idle, other)"),
        ({"evaluator": "oracle"}, "evaluator.name: unknown evaluator 'oracle' (known: idle, other)"),
        ({"builder": "mason"}, "builder.name: unknown builder 'mason' (known: idle, other)"),
        (
            {"branching": {"at": "chance"}},
            "branching.at.name: unknown branching.at 'chance' (known: idle, other)",
        ),
        (
            {"branching": {"at": {"name": "idle", "options": {"seconds": 0}}}},
            "branching.at.options.seconds: Input should be greater than 0",
        ),
        (
            {"branching": {"at": "idle", "depth": 9}},
            "branching.depth: Input should be less than or equal to 8",
        ),
        ({"branching": {"samples": 2}}, "branching.at: is required"),
        (
            {"harness": {"name": "idle", "options": {"seconds": -1}}},
            "harness.options.seconds: Input should be greater than 0",
        ),
        (
            {"evaluator": {"name": "idle", "options": {"second": 1}}},
            "evaluator.options.second: unknown key",
        ),
        (
            {"harness": "Not A Name"},
            "harness.name: 'Not A Name' is not a valid name: lower-case letters, digits and underscores;"
            " did you mean 'not_a_name'?",
        ),
        ({"harness": 7}, "harness: Input should be"),
        ({"budgets": {"run_seconds": 0}}, "budgets.run_seconds: Input should be greater than 0"),
        ({"budgets": {"runseconds": 9}}, "budgets.runseconds: unknown key"),
        ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
        ({"samples": 9999}, "samples: Input should be less than or equal to 1024"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p: Input should be less than or equal to 1"),
        ({"id": "../etc"}, "id: String should match pattern"),
        ({"instruction": ""}, "instruction: String should have at least 1 character"),
        ({"files": {"../x": {"text": ""}}}, "must be a relative path inside the workspace"),
        ({"files": {"x": {}}}, "files.x: a file needs exactly one of 'text' and 'base64'"),
        ({"colour": "red"}, "colour: unknown key"),
    ],
)
async def test_task(http: httpx.AsyncClient, changes: dict[str, Any], message: str) -> None:
    response = await http.post("/tasks", json=task(**changes))
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_input"
    assert message in response.json()["error"]
    assert (await http.get("/tasks")).json()["tasks"] == []


@pytest.mark.parametrize("path", ["/sessions", "/dashboard/sessions", "/dashboard/tasks"])
@pytest.mark.parametrize("step", ["-1", "2147483648", "99999999999999999999", "last"])
async def test_step_that_no_run_has(http: httpx.AsyncClient, path: str, step: str) -> None:
    response = await http.get(path, params={"step": step})
    assert response.status_code == 400
    assert response.json()["error"].startswith("step: Input should be ")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"numbers": {"n" * 257: 1}}, "String should have at most 256 characters"),
        ({"numbers": {"loss": "nan"}}, "steps.0.numbers.loss: Input should be a finite number"),
        ({"numbers": {"loss": {}}}, "steps.0.numbers.loss: Input should be a valid number"),
        ({"numbers": {str(n): n for n in range(1001)}}, "at most 1000 items"),
        ({"tasks": [f"t{n}" for n in range(10_001)]}, "at most 10000 items"),
        ({"step": -1}, "steps.0.step: Input should be greater than or equal to 0"),
    ],
)
async def test_step_of_a_run(http: httpx.AsyncClient, step: dict[str, Any], message: str) -> None:
    await http.post("/runs/grpo", json={})
    response = await http.post("/runs/grpo/steps", json={"steps": [{"step": 1, **step}]})
    assert response.status_code == 400
    assert message in response.json()["error"]
    assert (await http.get("/runs/grpo")).json()["step"] is None


async def test_missing_field(http: httpx.AsyncClient) -> None:
    document = task()
    del document["harness"]
    response = await http.post("/tasks", json=document)
    assert response.json()["error"] == "harness: is required"


async def test_several_mistakes_are_all_named(http: httpx.AsyncClient) -> None:
    error = (await http.post("/tasks", json=task(harness="a", evaluator="b"))).json()["error"]
    assert "harness.name" in error
    assert "evaluator.name" in error


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000]
)
async def test_body_that_is_no_task(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post("/tasks", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_input"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/tasks?limit=0", "limit: Input should be greater than or equal to 1"),
        ("/tasks?status=lost", "status: Input should be 'queued', 'running', 'finished' or 'cancelled'"),
        ("/tasks?after=x", "after: must be the 'next' of the page before"),
        ("/results?cursor=-1", "cursor: Input should be greater than or equal to 0"),
        ("/results?cursor=99999999999999999999", "cursor: Input should be less than"),
        ("/results?wait_seconds=inf", "wait_seconds: Input should be less than or equal to 60"),
        ("/results?wait_seconds=nan", "wait_seconds:"),
        ("/sessions?status=finished", "status: Input should be 'queued'"),
    ],
)
async def test_query(http: httpx.AsyncClient, path: str, field: str) -> None:
    response = await http.get(path)
    assert response.status_code == 400
    assert field in response.json()["error"]


async def test_lease_request(http: httpx.AsyncClient) -> None:
    response = await http.post("/nodes/north/lease", json={"max_sessions": 0, "runtimes": ["idle"]})
    assert "max_sessions: Input should be greater than or equal to 1" in response.json()["error"]
    response = await http.post("/nodes/-/lease", json={"max_sessions": 1, "runtimes": ["idle"]})
    assert "node: String should match pattern" in response.json()["error"]


async def test_result_with_a_number_that_json_cannot_hold_is_refused(http: httpx.AsyncClient) -> None:
    text = (
        '{"key": {"fencing_token": 1, "secret": ""}, '
        '"result": {"session_id": "s", "task_id": "t", "sample": 0, "attempt": 1, '
        '"status": "completed", "verdict": {"reward": 1, "components": {"style": NaN}}}}'
    )
    body = SIZES.pack(len(text), 0, 0) + text.encode()
    response = await http.post("/nodes/north/deliveries", content=body)
    assert response.json()["error"] == "result.verdict.components.style: Input should be a finite number"
