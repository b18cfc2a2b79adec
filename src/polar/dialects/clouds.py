"""Paths under which Azure and Vertex AI serve other providers' APIs.

Only the path and the place of the key differ; the bodies are those of the provider's dialect.
"""

from __future__ import annotations

from polar.dialects.base import HttpAnswer, Route, RouteAction

AZURE = "/openai"
"""Prefix of the paths that belong to no deployment."""
AZURE_DEPLOYMENT = "/openai/deployments/{model:.+}"
AZURE_KEY = ("api-key",)


def openai_routes(
    method: str, path: str, action: RouteAction, azure: str, fixed: HttpAnswer | None = None
) -> tuple[Route, ...]:
    """Return the routes of one OpenAI operation: at OpenAI, at Azure today, and at Azure in the past."""
    return tuple(Route(method, f"{at}{path}", action, fixed) for at in ("/v1", f"{AZURE}/v1", azure))


def vertex_models(publisher: str) -> tuple[str, ...]:
    """Return the paths of a publisher's models on Vertex AI, inside a project and outside."""
    return tuple(
        f"/{version}{project}/publishers/{publisher}/models"
        for version in ("v1", "v1beta1")
        for project in ("/projects/{project}/locations/{location}", "")
    )
