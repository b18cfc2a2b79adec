"""A bubblewrap sandbox reaches the gateway and what its task's allow list names, with ordinary programs."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar.models.session import SessionStatus
from polar.runtimes.base import Command, Host, Sandbox, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.network import GATEWAY_PORT, PROXY_PORT
from tests.fakes.http_pages import http_pages
from tests.sandboxes import require_runtime
from tests.systems import shell_task, system

pytestmark = pytest.mark.sandbox


def reached(_path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    return 200, b"reached " + headers["Host"].encode()


@pytest.fixture
def web() -> Iterator[int]:
    with http_pages(reached) as port:
        yield port


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate for localhost."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    files = ("-keyout", f"{path}.key", "-out", f"{path}.crt")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(Path(f"{path}.key").read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture
def secure_web(certificate: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http_pages(reached, context) as port:
        yield port


@asynccontextmanager
async def started(root: Path, *allow: str, gateway_port: int = 9) -> AsyncIterator[Sandbox]:
    await require_runtime("bubblewrap")
    options = BubblewrapRuntime.Options.model_validate({"network": {"allow": allow}})
    sandbox = await BubblewrapRuntime(options).start(SandboxSpec("s1", "127.0.0.1", gateway_port), Host(root))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def said(sandbox: Sandbox, script: str) -> str:
    command = Command(("/bin/bash", "-c", f"exec 2>&1; {script}"))
    result = await sandbox.exec(command, timeout=30, log_name="test")
    return result.stdout.text().strip()


async def test_listed_servers_are_reached_by_name(
    tmp_path: Path, web: int, secure_web: int, certificate: Path
) -> None:
    async with started(tmp_path / "s1", f"localhost:{web}", f"localhost:{secure_web}") as sandbox:
        await sandbox.upload(sandbox.workspace / "ca.crt", Path(f"{certificate}.crt").read_bytes())
        assert await said(sandbox, f"curl -sS http://localhost:{web}/") == f"reached localhost:{web}"
        seen = await said(sandbox, f"curl -sS --cacert ca.crt https://localhost:{secure_web}/")
        assert seen == f"reached localhost:{secure_web}"
        both = await said(sandbox, f"curl -sS http://localhost:{web}/ http://localhost:{web}/")
        assert both.count("reached") == 2


async def test_everything_else_stays_shut(tmp_path: Path, web: int) -> None:
    async with started(tmp_path / "s1", "localhost:1", "*.example.org:443") as sandbox:
        for url in (f"http://localhost:{web}/", "http://example.com/", f"http://[::1]:{web}/"):
            assert "403" in await said(
                sandbox, f"curl -sS -o /dev/null -w '%{{http_code}}' --noproxy '' {url}"
            )
        refused = await said(sandbox, f"curl -sS --noproxy '' https://127.0.0.1:{web}/")
        assert "CONNECT tunnel failed, response 403" in refused
        for claim in (f"Host: 127.0.0.1:{web}", "Host: a.example.org"):
            told = await said(sandbox, f"curl -sS --noproxy '' -H '{claim}' http://127.0.0.1:{web}/")
            assert f"127.0.0.1:{web} is not in runtime.options.network.allow" in told
        # Around the proxy there is nothing.
        assert "onnection refused" in await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{web}")
        assert "unreachable" in await said(sandbox, "cat < /dev/tcp/192.0.2.1/443")


async def test_the_gateway_is_reached_without_the_proxy(tmp_path: Path, web: int) -> None:
    async with started(tmp_path / "s1", "pypi.org:443", gateway_port=web) as sandbox:
        assert await said(sandbox, f"curl -sS {sandbox.gateway_url}/") == f"reached 127.0.0.1:{GATEWAY_PORT}"
        # The proxy is no second way to it, nor to the host's own address of it.
        for port in (GATEWAY_PORT, PROXY_PORT, web):
            told = await said(sandbox, f"curl -sS --noproxy '' http://localhost:{port}/")
            assert "is not in runtime.options.network.allow" in told


async def test_without_a_list_there_is_no_proxy(tmp_path: Path) -> None:
    async with started(tmp_path / "s1") as sandbox:
        assert "refused" in await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{PROXY_PORT}")
        assert await said(sandbox, "env | grep -ic proxy") == "0"


async def test_a_task_gets_only_what_its_node_allows(tmp_path: Path, web: int) -> None:
    await require_runtime("bubblewrap")

    def runtime(*allow: str) -> dict[str, object]:
        return {"name": "bubblewrap", "options": {"network": {"allow": list(allow)}}}

    fetch = f"curl -sS http://localhost:{web}/ > answer.txt"
    async with (
        system(tmp_path / "data", ["unused"]) as running,
        running.node(network_allow=(f"localhost:{web}", "*.example.org:443")),
    ):
        await running.client.submit(shell_task("good", fetch, runtime=runtime(f"localhost:{web}")))
        await running.client.submit(shell_task("bad", fetch, runtime=runtime("pypi.org:443")))
        results = await running.client.wait(["good", "bad"], timeout=60)
    by_task = {result.task_id: result for result in results}
    assert by_task["good"].status is SessionStatus.COMPLETED
    assert by_task["good"].reward == 1.0
    assert by_task["bad"].status is SessionStatus.FAILED
    assert "this node does not allow pypi.org:443 (setting node.network_allow)" in str(by_task["bad"].error)
