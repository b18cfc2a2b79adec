"""The agent server as NeMo Gym starts it; copy it there to responses_api_agents/polar_agent/app.py."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.server_utils import get_first_server_config_dict

from polar.bridges.nemo_gym import Agent, app


class PolarAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc]
    resources_server: ResourcesServerRef | None = None
    template: dict[str, Any]


class PolarAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
    config: PolarAgentConfig

    def setup_webserver(self) -> FastAPI:
        return app(Agent(self.config.template, resources=self._resources_url()))

    def _resources_url(self) -> str | None:
        if self.config.resources_server is None:
            return None
        name = self.config.resources_server.name
        found = get_first_server_config_dict(self.server_client.global_config_dict, name)
        return f"http://{found['host']}:{found['port']}"

    async def responses(self, body: Any = None) -> Any:
        raise NotImplementedError("the web server answers this")

    async def run(self, body: Any = None) -> Any:
        raise NotImplementedError("the web server answers this")


if __name__ == "__main__":
    PolarAgent.run_webserver()
