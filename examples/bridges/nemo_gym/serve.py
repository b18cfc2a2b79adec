"""The agent server on its own: NeMo Gym's HTTP interface without NeMo Gym.

python examples/bridges/nemo_gym/serve.py examples/bridges/nemo_gym/template.yaml --port 8090
"""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn
import yaml

from polar.bridges.nemo_gym import Agent, app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("template", type=Path, help="the fields that all tasks share")
    parser.add_argument(
        "--resources", help="URL of a resources server; by default the tasks' evaluators score"
    )
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    agent = Agent(yaml.safe_load(given.template.read_text()), resources=given.resources)
    uvicorn.run(app(agent), host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
