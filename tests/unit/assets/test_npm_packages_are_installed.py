"""npm packages: installed as they are locked without running their scripts, or refused with a reason."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from polar.assets.cache import DownloadFailed
from polar.assets.node import install_npm, native, unpack_npm
from polar.errors import NotInstalled
from tests.fakes.http_pages import http_pages

PACKAGE = {"name": "thing", "version": "1.2.3", "scripts": {"postinstall": "echo ran > ran.txt"}}


def tarball(*more: str) -> bytes:
    """The package, with more files."""
    buffer, body = io.BytesIO(), json.dumps(PACKAGE).encode()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("package/package.json", *more):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(body), 0o755 if name.endswith("cli.js") else 0o644
            archive.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


TARBALL = tarball()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Serves one package in one version; its files by path."""
    files = {"/thing.tgz": TARBALL}

    def pages(path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        version = {**PACKAGE, "dist": {"tarball": f"http://{headers['Host']}/thing.tgz"}}
        known = {"/thing": json.dumps({"name": "thing", "versions": {"1.2.3": version}}).encode(), **files}
        return (200, known[path]) if path in known else (404, b"{}")

    with http_pages(pages) as port:
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
        yield files


def lock(directory: Path, *, version: str = "1.2.3", data: bytes | None = None) -> Path:
    """A lock file for one package whose tarball is `data`; without data the lock has no hash."""
    entry = {"version": version} | ({"integrity": integrity(data)} if data is not None else {})
    packages = {"": {"dependencies": {"thing": version}}, "node_modules/thing": entry}
    path = directory / "thing.json"
    path.write_text(json.dumps({"lockfileVersion": 3, "packages": packages}))
    return path


def integrity(data: bytes) -> str:
    return f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"


@pytest.mark.usefixtures("registry")
def test_package_is_installed_and_its_scripts_are_not_run(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    install_npm(lock(tmp_path, data=TARBALL), into)
    installed = into / "node_modules" / "thing"
    assert json.loads((installed / "package.json").read_text())["version"] == "1.2.3"
    assert not (installed / "ran.txt").exists()


@pytest.mark.usefixtures("registry")
def test_version_the_registry_lacks_is_named(tmp_path: Path) -> None:
    locked = lock(tmp_path, version="9.9.9", data=b"")
    with pytest.raises(DownloadFailed, match=r"could not download thing@9\.9\.9 with npm: ") as caught:
        install_npm(locked, tmp_path)
    assert caught.value.hint is not None
    assert "thing@9.9.9" in caught.value.hint


@pytest.mark.usefixtures("registry")
def test_a_package_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"thing@1\.2\.3 with npm: code EINTEGRITY"):
        install_npm(lock(tmp_path, data=b"what was locked"), tmp_path)
    assert not (tmp_path / "node_modules" / "thing").exists()


def test_a_lock_without_a_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"thing\.json has no hash for node_modules/thing"):
        install_npm(lock(tmp_path), tmp_path)


def test_pinned_package_is_unpacked_without_its_top_directory(
    tmp_path: Path, registry: dict[str, bytes]
) -> None:
    registry["/thing.tgz"] = packed = tarball("package/dist/cli.js")
    into = tmp_path / "into"
    unpack_npm("thing", "1.2.3", integrity(packed), into)
    assert sorted(str(path.relative_to(into)) for path in into.rglob("*")) == [
        "dist",
        "dist/cli.js",
        "package.json",
    ]
    assert os.access(into / "dist/cli.js", os.X_OK)


@pytest.mark.usefixtures("registry")
def test_another_tarball_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"thing@1\.2\.3 with npm: code EINTEGRITY"):
        unpack_npm("thing", "1.2.3", integrity(b"other"), tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_tarball_cannot_write_elsewhere(tmp_path: Path, registry: dict[str, bytes]) -> None:
    registry["/thing.tgz"] = packed = tarball("package/../../evil")
    unpack_npm("thing", "1.2.3", integrity(packed), tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["package.json"]
    assert not (tmp_path / "evil").exists()


def test_failed_download_says_which_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    with pytest.raises(DownloadFailed) as caught:
        unpack_npm("no-such-package", "1.2.3", "sha512-", tmp_path / "into")
    assert "could not download no-such-package@1.2.3 with npm: " in caught.value.message
    assert "ECONNREFUSED" in caught.value.message
    assert "registry" in (caught.value.hint or "")


def test_machine_without_a_build_is_told_which_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    lock = tmp_path / "tool.json"
    lock.write_text('{"linux-x86_64": {"package": "tool-linux", "version": "1.0", "integrity": "sha512-"}}')
    with pytest.raises(NotInstalled, match=r"tool 1\.0 has no pinned build for \w+-vax") as caught:
        native("tool", "1.0", lock)
    assert caught.value.hint == "run the node on one of: linux-x86_64"
