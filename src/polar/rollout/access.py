"""Which role may use which route, how much it may send, and what of it is written down: one table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from polar.models.access import Role

PREFIX = "/api/v1"

ANYONE: frozenset[Role] | None = None
"""Also without a token: what shows no task and no secret."""
READERS = frozenset({Role.ADMIN, Role.TRAINER, Role.READ_ONLY})
TRAINERS = frozenset({Role.ADMIN, Role.TRAINER})
NODES = frozenset({Role.ADMIN, Role.NODE})
ADMINS = frozenset({Role.ADMIN})


class Body(Enum):
    """How large a request's body may be."""

    SMALL = "small"
    """A few fields, or what a node says of its sessions."""
    LARGE = "large"
    """Tasks with their files, or several results: held in memory as a whole."""
    STREAMED = "streamed"
    """Bytes that go to the disk as they come."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes of a body."""

    small: int = 4 << 20
    large: int = 64 << 20
    streamed: int = 1 << 30

    def of(self, body: Body) -> int:
        match body:
            case Body.SMALL:
                return self.small
            case Body.LARGE:
                return self.large
            case Body.STREAMED:
                return self.streamed


@dataclass(frozen=True)
class Rule:
    """One route."""

    action: str
    """The operation's name, in the OpenAPI document and in the audit log."""
    method: str
    path: str
    roles: frozenset[Role] | None
    body: Body = Body.SMALL
    is_audited: bool = False
    """Written down when it is done. What is refused is written down whatever the route; see gate.py."""
    is_open_here: bool = False
    """Asked from this machine itself it needs no token."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """`{name}` is one segment of a path, `{name:path}` any number."""
        parts = re.split(r"(\{\w+(?::path)?\})", self.path)
        made = (
            re.escape(part) if not part.startswith("{") else "(.*)" if ":path" in part else "([^/]+)"
            for part in parts
        )
        return re.compile("".join(made))


def _rule(
    action: str,
    route: str,
    roles: frozenset[Role] | None,
    body: Body = Body.SMALL,
    *,
    audited: bool = False,
) -> Rule:
    method, _, path = route.partition(" ")
    return Rule(action, method, PREFIX + path, roles, body, audited)


RULES: tuple[Rule, ...] = (
    _rule("health", "GET /health", ANYONE),
    _rule("openapi", "GET /openapi.json", ANYONE),
    _rule("submit_task", "POST /tasks", TRAINERS, Body.LARGE, audited=True),
    _rule("submit_tasks", "POST /tasks/batch", TRAINERS, Body.LARGE, audited=True),
    _rule("list_tasks", "GET /tasks", READERS),
    _rule("get_task", "GET /tasks/{task_id}", READERS),
    _rule("cancel_task", "POST /tasks/{task_id}/cancel", TRAINERS, audited=True),
    _rule("list_sessions", "GET /sessions", READERS),
    _rule("get_session", "GET /sessions/{session_id}", READERS),
    _rule("cancel_session", "POST /sessions/{session_id}/cancel", TRAINERS, audited=True),
    _rule("get_recording", "GET /sessions/{session_id}/recording", READERS),
    _rule("list_session_events", "GET /sessions/{session_id}/events", READERS),
    _rule("get_artifacts", "GET /sessions/{session_id}/artifacts", READERS),
    _rule("list_events", "GET /events", READERS),
    _rule("list_results", "GET /results", READERS),
    _rule("get_policy", "GET /policy", READERS),
    _rule("pause_policy", "POST /policy/pause", TRAINERS, audited=True),
    _rule("update_policy", "POST /policy/update", TRAINERS, audited=True),
    _rule("resume_policy", "POST /policy/resume", TRAINERS, audited=True),
    _rule("list_nodes", "GET /nodes", READERS),
    _rule("list_callbacks", "GET /callbacks", TRAINERS),
    _rule("retry_callback", "POST /callbacks/{callback_id}/retry", TRAINERS, audited=True),
    _rule("join_node", "POST /nodes/{node}/join", NODES, audited=True),
    _rule("lease_sessions", "POST /nodes/{node}/lease", NODES),
    _rule("heartbeat", "POST /nodes/{node}/heartbeat", NODES),
    _rule("follow_policy", "POST /nodes/{node}/policy", NODES),
    _rule("deliver", "POST /nodes/{node}/deliveries", NODES, Body.LARGE),
    _rule("put_recording", "PUT /sessions/{session_id}/recording", NODES, Body.STREAMED),
    _rule("put_artifacts", "PUT /sessions/{session_id}/artifacts", NODES, Body.STREAMED),
    _rule("post_result", "POST /sessions/{session_id}/result", NODES, Body.LARGE),
    _rule("release_session", "POST /sessions/{session_id}/release", NODES),
    _rule("drain_node", "POST /nodes/{node}/drain", ADMINS, audited=True),
    _rule("resume_node", "POST /nodes/{node}/resume", ADMINS, audited=True),
    _rule("list_tokens", "GET /tokens", ADMINS),
    _rule("create_token", "POST /tokens", ADMINS, audited=True),
    _rule("rotate_token", "POST /tokens/{name}/rotate", ADMINS, audited=True),
    _rule("revoke_token", "POST /tokens/{name}/revoke", ADMINS, audited=True),
    _rule("list_audit", "GET /audit", ADMINS),
    _rule("dashboard", "GET /dashboard/{page:path}", READERS),
    _rule("unknown", "GET /{rest:path}", ADMINS),
    Rule("metrics", "GET", "/metrics", READERS, is_open_here=True),
    # Outside the API there are only the dashboard's page and its files, which hold no data.
    Rule("page", "GET", "/{file:path}", ANYONE),
)

UNKNOWN = Rule("unknown", "", "", ADMINS)
"""What the table does not name is closed to all but admins, for whom it is not found."""


_BY_METHOD = {rule.method: [each for each in RULES if each.method == rule.method] for rule in RULES}


def rule_for(method: str, path: str) -> tuple[Rule, str | None]:
    """The rule of a request, and the id in its path that it is about."""
    for rule in _BY_METHOD.get("GET" if method == "HEAD" else method, ()):
        if match := rule.pattern.fullmatch(path):
            return rule, match.group(1) if match.groups() else None
    return UNKNOWN, None


def words(roles: Iterable[Role]) -> str:
    """Roles as a person reads them."""
    return " or ".join(role.value for role in Role if role in set(roles))
