"""What agents did in an experiment's evaluations: their tools, whether they read the file, the outcome.

python examples/harnesses/habits.py runs/harnesses          # writes HARNESS/ARM/eval/habits.json
python examples/harnesses/habits.py docs/results/harnesses  # prints the table of existing ones
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from polar.recordings.recording import Recording, decode

READS = ("cat ", "read", "head ", "sed ", "less ", "open(")
FILE = "solution.py"
COUNTS = ("sessions", "no_call", "read_first", "passed", "passed_after_reading")


def main() -> None:
    root = Path(sys.argv[1])
    for recordings in sorted(root.glob("*/*/eval/models/0/.polar/recordings")):
        found = [habits(decode(path.read_bytes())) for path in sorted(recordings.rglob("*@*"))]
        (recordings.parents[3] / "habits.json").write_text(json.dumps(summary(found), indent=1) + "\n")
    print("| harness | arm | sessions | without a tool call | read first | passed | of these had read |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(root.rglob("habits.json")):
        (harness, arm), one = path.relative_to(root).parts[:2], json.loads(path.read_text())
        print(f"| {harness} | {arm} | {' | '.join(str(one[name]) for name in COUNTS)} |")


def habits(recording: Recording) -> dict[str, Any]:
    """Return a session's calls in order, and whether one read the file before any wrote it."""
    calls = [
        (call.name, call.arguments)
        for completion in recording.completions
        for call in completion.response.tool_calls
    ]
    first = next((at for at, (name, said) in enumerate(calls) if is_reading(name, said)), None)
    written = next((at for at, (name, _) in enumerate(calls) if name in ("write", "edit")), len(calls))
    times = [time for one in recording.completions for time in (one.started_at, one.ended_at)]
    return {
        "tools": [name for name, _ in calls],
        "read": first is not None and first < written,
        "passed": recording.result.reward == 1.0,
        "end": str(recording.result.agent_end),
        "from": min(times, default=0.0),
        "to": max(times, default=0.0),
    }


def is_reading(name: str, arguments: str) -> bool:
    return FILE in arguments and (name == "read" or any(word in arguments for word in READS))


def summary(sessions: list[dict[str, Any]]) -> dict[str, Any]:
    passed = [one for one in sessions if one["passed"]]
    return {
        "sessions": len(sessions),
        "no_call": sum(not one["tools"] for one in sessions),
        "read_first": sum(one["read"] for one in sessions),
        "passed": len(passed),
        "passed_after_reading": sum(one["read"] for one in passed),
        "calls": dict(Counter(name for one in sessions for name in one["tools"]).most_common()),
        "ends": dict(Counter(one["end"] for one in sessions).most_common()),
        "seconds_of_model_calls": max(one["to"] for one in sessions) - min(one["from"] for one in sessions),
    }


if __name__ == "__main__":
    main()
