"""Where clouds have the APIs of others: an operation's addresses on Azure and on Vertex AI.

Only the address and the place of the key are the cloud's own; the bodies are those of the provider's dialect.
"""

from __future__ import annotations

from polar.dialects.base import HttpAnswer, Route, RouteAction

AZURE = "/openai"
"""Before what belongs to no deployment."""
AZURE_DEPLOYMENT = "/openai/deployments/{model:.+}"
AZURE_KEY = ("api-key",)


def openai_routes(
    method: str, path: str, action: RouteAction, azure: str, fixed: HttpAnswer | None = None
) -> tuple[Route, ...]:
    """An operation of OpenAI's API where OpenAI has it, and where Azure has it now and had it before."""
    return tuple(Route(method, f"{at}{path}", action, fixed) for at in ("/v1", f"{AZURE}/v1", azure))


def vertex_models(publisher: str) -> tuple[str, ...]:
    """Where Vertex AI has a publisher's models: in a project, or outside for a key that tells the project."""
    return tuple(
        f"/{version}{project}/publishers/{publisher}/models"
        for version in ("v1", "v1beta1")
        for project in ("/projects/{project}/locations/{location}", "")
    )
