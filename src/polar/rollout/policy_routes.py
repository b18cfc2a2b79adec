"""The REST API of policy updates: one part for trainers, one for nodes."""

from __future__ import annotations

from fastapi import APIRouter, Request

from polar.models.policy import Pause, PolicyOrder, PolicyReport, PolicyView, Resume, Update
from polar.models.task import Id
from polar.rollout.access import NODES, READERS, TRAINERS, allow
from polar.rollout.policy import PolicyService


def add_policy_routes(router: APIRouter, service: PolicyService) -> None:
    """What trainers ask."""

    @router.get("/policy", dependencies=[allow(READERS)])
    async def get_policy() -> PolicyView:
        """The policy's version, who pauses it, and how far each live node is."""
        return await service.view()

    @router.post("/policy/pause", dependencies=[allow(TRAINERS)])
    async def pause_policy(body: Pause, request: Request) -> PolicyView:
        """Have nothing sampled until the pause is resumed or times out; again: renew it."""
        return await service.pause(body, request.is_disconnected)

    @router.post("/policy/update", dependencies=[allow(TRAINERS)])
    async def update_policy(body: Update, request: Request) -> PolicyView:
        """Replace the weights of every engine and raise the policy's version."""
        return await service.update(body, request.is_disconnected)

    @router.post("/policy/resume", dependencies=[allow(TRAINERS)])
    async def resume_policy(body: Resume, request: Request) -> PolicyView:
        """End a pause; nothing changes where there is none."""
        return await service.resume(body, request.is_disconnected)


def add_policy_node_routes(router: APIRouter, service: PolicyService) -> None:
    """What nodes ask."""

    @router.post("/nodes/{node}/policy", dependencies=[allow(NODES, audited=False)])
    async def follow_policy(node: Id, body: PolicyReport, request: Request) -> PolicyOrder:
        """Report what a node has done, and get its next order; waits for one that is new."""
        return await service.follow(node, body, request.is_disconnected)
