"""HTTPS as a user sets it up: certificates made here, clients that trust them, and those that do not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from polar.app.stack import running, serving
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings, TlsSettings
from polar.errors import InvalidInput, Unavailable
from polar.models.access import TokenRole
from polar.rollout.server import RolloutServer, refuse_plain_http
from polar.store.store import Store
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import ASK, RUNTIMES, TOKEN, allow_processes, shell_task

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: of an authority, a server that it vouches for, and a client that it vouches for."""

    ca: Path
    cert: Path
    key: Path
    client: Path
    other_ca: Path

    def tls(self, **changes: Path) -> TlsSettings:
        return TlsSettings(cert=self.cert, key=self.key, **changes)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("certificates")
    ca, other = trustme.CA(), trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("a-client")
    made = Certificates(*(directory / name for name in ("ca", "cert", "key", "client", "other_ca")))
    ca.cert_pem.write_to_path(made.ca)
    other.cert_pem.write_to_path(made.other_ca)
    server.private_key_pem.write_to_path(made.key)
    client.private_key_and_cert_chain_pem.write_to_path(made.client)
    for blob in server.cert_chain_pems:
        blob.write_to_path(made.cert, append=True)
    return made


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data") as opened:
        yield opened


async def test_a_client_talks_to_a_server_that_it_trusts_and_to_no_other(
    store: Store, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(port=0, tls=certificates.tls())
    async with RolloutServer(store, TOKEN, settings) as server:
        assert server.url.startswith("https://127.0.0.1:")
        async with AsyncClient(server.url, TOKEN, ca=certificates.ca) as client:
            assert (await client.health()).status == "ok"
        monkeypatch.setenv("POLAR_CA", str(certificates.ca))
        async with AsyncClient(server.url, TOKEN) as client:
            assert (await client.policy()).version == 0
        async with AsyncClient(server.url, TOKEN, ca=certificates.other_ca) as client:
            with pytest.raises(Unavailable, match=r"certificate that is not trusted.*set POLAR_CA"):
                await client.health()
        with pytest.raises(InvalidInput, match="a certificate cannot be used"):
            AsyncClient(server.url, TOKEN, ca=certificates.ca.with_name("none"))
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(server.url.replace("https", "http") + "/api/v1/health")


async def test_clients_need_a_certificate_where_that_is_asked_for(
    store: Store, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(port=0, tls=certificates.tls(client_ca=certificates.ca))
    async with RolloutServer(store, TOKEN, settings) as server:
        async with AsyncClient(server.url, TOKEN, ca=certificates.ca) as client:
            with pytest.raises(Unavailable):
                await client.health()
        monkeypatch.setenv("POLAR_CLIENT_CERT", str(certificates.client))
        async with AsyncClient(server.url, TOKEN, ca=certificates.ca) as client:
            assert (await client.health()).status == "ok"


async def test_files_that_are_no_certificate_are_one_line(store: Store, certificates: Certificates) -> None:
    settings = ServerSettings(port=0, tls=TlsSettings(cert=certificates.key, key=certificates.ca))
    with pytest.raises(InvalidInput, match=r"server\.tls: the certificate .* cannot be used"):
        async with RolloutServer(store, TOKEN, settings):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "trainer.example"])
async def test_other_machines_are_not_served_in_plain_text_unasked(store: Store, host: str) -> None:
    with pytest.raises(InvalidInput, match=r"without TLS.*--insecure"):
        async with RolloutServer(store, TOKEN, ServerSettings(host=host, port=0)):
            pass


def test_plain_text_beyond_this_machine_can_be_asked_for() -> None:
    refuse_plain_http(ServerSettings(host="0.0.0.0", insecure=True))
    refuse_plain_http(ServerSettings(host="localhost"))
    refuse_plain_http(ServerSettings(host="::1"))


async def test_the_whole_system_works_over_tls_whatever_name_the_certificate_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "polar.audit")
    elsewhere = trustme.CA().issue_cert("trainer.example")
    cert, key = tmp_path / "cert", tmp_path / "key"
    for blob in elsewhere.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    elsewhere.private_key_pem.write_to_path(key)
    monkeypatch.chdir(tmp_path)
    async with vllm_wire(Said("Hello.")) as engine:
        settings = Settings.model_validate(
            {
                "server": {"port": 0, "tls": {"cert": cert, "key": key}},
                "engine": {"url": engine.url, "mode": "chat"},
                "node": {"run_slots": 1, "runtimes": RUNTIMES},
            }
        )
        async with running(settings, lambda _step: None) as stack:
            # As any command here: the server's file says which certificate is its own.
            async with AsyncClient() as client:
                assert client.server == stack.url
                await client.submit(shell_task("t", ASK))
                (result,) = await client.wait(["t"], timeout=60)
            assert result.reward == 1.0
            assert "join_node local by node-local (node) from 127.0.0.1: 200" in caplog.text
            assert stack.token not in (tmp_path / ".polar/server.json").read_text()


async def test_a_certificate_signed_beside_the_servers_own_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    ca = trustme.CA()
    own, beside = ca.issue_cert("trainer.example"), ca.issue_cert("trainer.example")
    paths = {name: tmp_path / name for name in ("own", "cert", "key")}
    for blob in own.cert_chain_pems:
        blob.write_to_path(paths["own"], append=True)
    for blob in beside.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    beside.private_key_pem.write_to_path(paths["key"])
    tls = TlsSettings(cert=paths["cert"], key=paths["key"])
    monkeypatch.chdir(tmp_path)
    async with RolloutServer(store, TOKEN, ServerSettings(port=0, tls=tls)) as server:
        (tmp_path / ".polar").mkdir()
        about = {"url": server.url, "certificate": str(paths["own"])}
        (tmp_path / ".polar/server.json").write_text(json.dumps(about))
        async with AsyncClient(server.url, TOKEN) as client:
            with pytest.raises(Unavailable, match="not trusted"):
                await client.health()


async def test_polar_node_joins_over_tls_with_a_node_token(
    tmp_path: Path, certificates: Certificates
) -> None:
    settings = Settings(
        data_dir=tmp_path / "server", server=ServerSettings(port=0, token=TOKEN, tls=certificates.tls())
    )
    async with (
        vllm_wire(Said("Hello.")) as engine,
        serving(settings, lambda _step: None) as server,
        AsyncClient(server.url, TOKEN, ca=certificates.ca) as client,
    ):
        made = await client.create_token("west", TokenRole.NODE)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar", "node", "--server", server.url, "--ca", str(certificates.ca)),
            *("--engine-url", engine.url, "--engine-mode", "chat", "--data-dir", str(tmp_path / "node")),
            *("--config", str(allow_processes(tmp_path))),
            cwd=tmp_path,
            env={**os.environ, "POLAR_TOKEN": made.token},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await client.submit(shell_task("t", ASK))
            (result,) = await client.wait(["t"], timeout=60)
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 30)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert result.reward == 1.0
    assert made.token.encode() not in errors
