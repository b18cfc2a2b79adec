"""The dashboard's data at 100,000 sessions: how long the overview and the lists take, in all their ways.

The server runs in a process of its own on SQLite; one reader asks for one thing after another. The overview
is asked for less often than it is counted anew, so that every answer is a count.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, insert

from benchmarks.bench_control_plane import served
from benchmarks.report import Row, at_most, report
from polar.models.session import Progress, SessionResult, SessionStatus, TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.rollout.access import load_or_create_token
from polar.rollout.dashboard.live import OVERVIEW_SECONDS
from polar.store.store import Store
from polar.store.tables import events, results, run_steps, runs, sessions, tasks

SESSIONS = 100_000
SAMPLES = 8
NODES = 16
RUNS = 40
"""One of them has half of all sessions."""
HELD = 512
"""Sessions that nodes are at work on."""
ROUNDS = 40
OVERVIEWS = 20
SPAN_SECONDS = 6 * 3600.0
GOAL_MS = 200.0

LISTS: dict[str, dict[str, Any]] = {
    "sessions, newest page": {},
    "sessions, a page in the middle": {"before": str(SESSIONS // 2)},
    "sessions by status": {"status": "failed"},
    "sessions by reward": {"reward": "positive"},
    "sessions by node": {"node": "node-3"},
    "sessions by a part of the id, found": {"text": "task-777"},
    "sessions by a part of the id, found nowhere": {"text": "nowhere-at-all"},
    "sessions of a small run": {"run": "run-7"},
    "sessions of a large run, a page in the middle": {"run": "run-0", "before": str(SESSIONS // 2)},
    "sessions of a step": {"run": "run-0", "step": "17"},
    "sessions by a range of rewards, found nowhere": {"reward_min": "2", "reward_max": "3"},
    "sessions by model and version, found nowhere": {"model": "large", "version": "7"},
    "sessions by harness and duration": {"harness": "pi", "seconds_min": "590"},
    "sessions by status and node, found nowhere": {"status": "completed", "node": "node-of-nobody"},
}


def main() -> None:
    report("dashboard", asyncio.run(measure()))


async def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        data_dir = Path(directory)
        async with Store.open(data_dir) as store:
            await store.database.write(fill)
        async with served(data_dir, "") as (client, _), reader(client.server, data_dir) as http:
            rows = [at_most("overview, p95", await overview(http), "ms", GOAL_MS)]
            for name, query in LISTS.items():
                rows.append(at_most(f"{name}, p95", await p95(http, "sessions", query), "ms", GOAL_MS))
            rows.append(at_most("tasks, newest page, p95", await p95(http, "tasks", {}), "ms", GOAL_MS))
            rows.append(at_most("runs, newest page, p95", await p95(http, "../runs", {}), "ms", GOAL_MS))
            rows.append(at_most("a large run, p95", await p95(http, "runs/run-0", {}), "ms", GOAL_MS))
    return rows


def reader(url: str, data_dir: Path) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {load_or_create_token(data_dir)}"}
    return httpx.AsyncClient(
        base_url=f"{url}/api/v1/dashboard/", headers=headers, trust_env=False, timeout=60
    )


async def overview(http: httpx.AsyncClient) -> float:
    took = []
    for _ in range(OVERVIEWS):
        took.append(await milliseconds(http, "overview", {}))
        await asyncio.sleep(OVERVIEW_SECONDS)
    return percentile(took)


async def p95(http: httpx.AsyncClient, path: str, query: dict[str, Any]) -> float:
    return percentile([await milliseconds(http, path, query) for _ in range(ROUNDS)])


async def milliseconds(http: httpx.AsyncClient, path: str, query: dict[str, Any]) -> float:
    began = time.perf_counter()
    (await http.get(path, params=query)).raise_for_status()
    return 1000 * (time.perf_counter() - began)


def percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def fill(connection: Connection) -> None:
    """Tasks with groups of sessions that ended over some hours, and the last of them still at work."""
    chance = random.Random(7)
    now = time.time()
    named = [{"name": f"run-{number}", "kind": "training", "created_at": now} for number in range(RUNS)]
    connection.execute(insert(runs), named)
    steps = [{"run_id": 1, "step": step, "numbers": NUMBERS, "created_at": now} for step in range(1000)]
    connection.execute(insert(run_steps), steps)
    for start in range(0, SESSIONS, 4_000):
        rows = [session(place, now, chance) for place in range(start, min(start + 4_000, SESSIONS))]
        connection.execute(insert(tasks), [task(row) for row in rows if row["sample"] == 0])
        connection.execute(insert(sessions), rows)
        ended = [row for row in rows if row["lease_expires_at"] is None]
        connection.execute(insert(results), [result(row) for row in ended])
        connection.execute(insert(events), [event(row) for row in rows])


def session(place: int, now: float, chance: random.Random) -> dict[str, Any]:
    is_held = place >= SESSIONS - HELD
    status = chance.choice(["init", "ready", "running", "postrun"]) if is_held else "completed"
    if not is_held and chance.random() < 0.05:
        status = "failed"
    at = now - SPAN_SECONDS * (1 - place / SESSIONS)
    progress = Progress(completions=chance.randrange(1, 60), sampled_tokens=chance.randrange(100, 40_000))
    return {
        "seq": place + 1,
        "id": f"task-{place // SAMPLES}.{place % SAMPLES}",
        "task_id": f"task-{place // SAMPLES}",
        "sample": place % SAMPLES,
        "run_id": run_id(place),
        "harness": "pi",
        "priority": 50,
        "runtime": "process",
        "status": status,
        "attempt": 1,
        "fencing_token": 1,
        "node": f"node-{place % NODES}",
        "lease_expires_at": now + 3600 if is_held else None,
        "progress": progress.model_dump_json(),
        "reward": float(chance.random() < 0.4) if status == "completed" else None,
        "model": None if is_held else "small",
        "version_min": None if is_held else place // 1000,
        "version_max": None if is_held else place // 1000 + 1,
        "seconds": None if is_held else 600 * chance.random(),
        "cancel_requested": False,
        "created_at": at,
        "updated_at": at,
    }


def run_id(place: int) -> int:
    """Every second task belongs to the first run."""
    task = place // SAMPLES
    return 1 if task % 2 else 1 + task // 2 % RUNS


NUMBERS = json.dumps({f"number_{place}": place / 7 for place in range(30)})
SPEC = TaskSpec.model_validate(
    {"id": "task", "instruction": "Repair the program. " * 50, "harness": "pi", "evaluator": "tests"}
).model_dump_json()


def task(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["task_id"],
        "spec": SPEC,
        "run_id": row["run_id"],
        "step": row["seq"] // 100,
        "spec_digest": "0" * 64,
        "harness": "pi",
        "priority": 50,
        "runtime": "process",
        "created_at": row["created_at"],
    }


def result(row: dict[str, Any]) -> dict[str, Any]:
    progress = Progress.model_validate_json(row["progress"])
    made = SessionResult(
        session_id=row["id"],
        task_id=row["task_id"],
        sample=row["sample"],
        attempt=1,
        status=SessionStatus(row["status"]),
        verdict=None if row["reward"] is None else Verdict(reward=row["reward"], report="x" * 400),
        stats=TrajectoryStats(completions=progress.completions, sampled_tokens=progress.sampled_tokens),
    )
    return {
        "session_id": row["id"],
        "task_id": row["task_id"],
        "run_id": row["run_id"],
        "fencing_token": 1,
        "reward": row["reward"],
        "usable": row["reward"] is not None,
        "sampled_tokens": progress.sampled_tokens,
        "trainable_tokens": progress.sampled_tokens,
        "result": made.model_dump_json(),
        "created_at": row["updated_at"],
    }


def event(row: dict[str, Any]) -> dict[str, Any]:
    names = ("task_id", "attempt", "status", "node")
    return {"session_id": row["id"], "at": row["updated_at"], **{name: row[name] for name in names}}


if __name__ == "__main__":
    main()
