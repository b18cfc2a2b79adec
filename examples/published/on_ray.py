"""Starts the published set-up on a Ray cluster: a part on each machine, until the one that trains has ended.

    python examples/published/on_ray.py examples/published/pi.yaml --machines 4 --engines 1 --gpus 8

The clone lies at one path on all machines. start.sh says what a part does, and reads the other variables.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

START = Path(__file__).resolve().with_name("start.sh")


@ray.remote(max_concurrency=2)
class Part:
    """One machine's part."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        return ray.util.get_node_ip_address()

    def run(self, hosts: list[str], run: str, variables: dict[str, str]) -> int:
        environment = {**os.environ, **variables, "RANK": str(self._rank), "HOSTS": " ".join(hosts)}
        self._process = subprocess.Popen(["bash", str(START), run], env=environment)
        return self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--engines", type=int, default=1, help="machines that serve the model")
    parser.add_argument("--gpus", type=int, default=8, help="of each machine that trains or serves")
    asked = parser.parse_args()
    shared = Path(os.environ.get("SHARED", "/shared"))
    write_token(shared / "token")
    ray.init(address="auto")
    has_gpus = [rank <= asked.engines for rank in range(asked.machines)]
    group = placement_group(
        [{"CPU": 1.0, "GPU": float(asked.gpus * has)} if has else {"CPU": 1.0} for has in has_gpus],
        strategy="STRICT_SPREAD",
    )
    ray.get(group.ready())
    parts = [
        Part.options(
            num_cpus=1,
            num_gpus=asked.gpus * has,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(rank)
        for rank, has in enumerate(has_gpus)
    ]
    hosts = ray.get([part.host.remote() for part in parts])
    variables = {"ENGINES": str(asked.engines), "GPUS": str(asked.gpus), "SHARED": str(shared)}
    run = str(asked.run.resolve())
    running = [part.run.remote(hosts, run, variables) for part in parts]
    (ended, *_), _ = ray.wait(running, num_returns=1)
    ray.get([part.stop.remote() for part in parts])
    ray.wait(running, num_returns=len(running), timeout=120)
    print(f"machine {running.index(ended)} of {hosts} has ended")
    raise SystemExit(ray.get(ended) if ended == running[0] else 1)


def write_token(path: Path) -> None:
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))


if __name__ == "__main__":
    main()
