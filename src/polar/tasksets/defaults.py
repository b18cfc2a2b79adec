"""Defaults under tasks: what a task does not say, the `defaults` of its file say."""

from __future__ import annotations

from typing import Any

from polar.models.task import TaskSpec

_COMPONENTS = ("harness", "evaluator", "runtime", "builder")
_BY_KEY = ("budgets", "sampling", "files", "metadata")
"""Fields merged key by key; of all others the task's own value stands alone."""


def check_defaults(defaults: Any) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with `defaults` itself, reported once instead of with every task, and the rest."""
    if not isinstance(defaults, dict):
        return ["defaults: must be a mapping of task fields"], {}
    allowed = TaskSpec.model_fields.keys() - {"id"}
    problems = [
        "defaults.id: every task needs an id of its own" if key == "id" else f"defaults.{key}: unknown key"
        for key in defaults
        if key not in allowed
    ]
    return problems, {key: value for key, value in defaults.items() if key in allowed}


def with_defaults(task: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The task with the defaults under it."""
    merged = {**defaults, **task}
    for key in task.keys() & defaults.keys():
        mine, under = task[key], defaults[key]
        if key in _COMPONENTS:
            merged[key] = _component(mine, under)
        elif key in _BY_KEY and isinstance(mine, dict) and isinstance(under, dict):
            merged[key] = {**under, **mine}
    return merged


def _component(mine: Any, under: Any) -> Any:
    """Options merge only under the same name: another component's options would mean nothing to it."""
    under = {"name": under} if isinstance(under, str) else under
    if not isinstance(mine, dict) or not isinstance(under, dict):
        return mine
    if mine.get("name", under.get("name")) != under.get("name"):
        return mine
    merged = {**under, **mine}
    if isinstance(mine.get("options"), dict) and isinstance(under.get("options"), dict):
        merged["options"] = {**under["options"], **mine["options"]}
    return merged
