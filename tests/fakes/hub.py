"""The Hugging Face hub as its own client sees it: dataset repositories, large files, and Xet's storage.

The client is always huggingface_hub itself, with hf_xet beneath it: what it does not take, fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml
from aiohttp import web

from polar.tasksets.sft import LICENCES

OWNER = "me"
TOKEN = "hf_write"
READ_ONLY = "hf_read"


@dataclass
class HubRepository:
    """What a repository holds; a commit is the paths that it changed."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, str] = field(default_factory=dict)
    """Path → the SHA-256 of a file that git knows by a pointer only."""
    commits: list[list[str]] = field(default_factory=lambda: [[".gitattributes"]])

    @property
    def sha(self) -> str:
        return hashlib.sha1(json.dumps(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    """One account, with a token that writes and one that reads."""

    url: str = ""
    repositories: dict[str, HubRepository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded as large files, by SHA-256."""
    xorbs: dict[str, bytes] = field(default_factory=dict)
    shards: list[bytes] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=1 << 26)
        repository = "/api/datasets/{owner}/{name}"
        app.add_routes(
            [
                web.post("/api/repos/create", self.create),
                web.post("/api/validate-yaml", self.validate),
                web.get(repository, self.info),
                web.post(repository + "/paths-info/main", self.paths_info),
                web.post(repository + "/preupload/main", self.preupload),
                web.post(repository + "/commit/main", self.commit),
                web.get(repository + "/xet-write-token/main", self.xet_token),
                web.post("/datasets/{owner}/{name}.git/info/lfs/objects/batch", self.lfs_batch),
                web.put("/uploads/{oid}", self.upload),
                web.get("/xet/v1/chunks/{prefix}/{hash}", self.xet_chunk),
                web.post("/xet/v1/xorbs/{prefix}/{hash}", self.xet_xorb),
                web.post("/xet/v1/shards", self.xet_shard),
            ]
        )
        return app

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        is_storage = request.path.startswith(("/uploads/", "/xet/"))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not is_storage and token not in (TOKEN, READ_ONLY):
            return _refused(401, "Invalid username or password.")
        is_write = request.method == "POST" and not request.path.endswith(
            ("/validate-yaml", "/paths-info/main")
        )
        may_write = token == TOKEN and request.match_info.get("owner", OWNER) == OWNER
        if not is_storage and is_write and not may_write:
            return _refused(403, "You don't have the rights to do this.")
        found: web.StreamResponse = await handler(request)
        return found

    def _repository(self, request: web.Request) -> HubRepository:
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        if name not in self.repositories:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        return self.repositories[name]

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["type"] == "dataset"
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.url}/datasets/{name}"
        if asked["organization"] != OWNER:
            return _refused(403, f"You don't have the rights to create a dataset under {name}")
        if name in self.repositories:
            return web.json_response(
                {"error": "You already created this dataset repo", "url": url}, status=409
            )
        self.repositories[name] = HubRepository(asked.get("visibility") == "private")
        return web.json_response({"url": url, "name": name, "id": "0"})

    async def validate(self, request: web.Request) -> web.Response:
        """What the hub is known to refuse: a licence that it does not know, a configuration without files."""
        content = (await request.json())["content"]
        front = yaml.safe_load(content.split("---")[1])
        wrong = [one for one in front.get("license", []) if one not in {*LICENCES, "other", "unknown"}]
        errors = [f'"license" must be one of what is listed, not {one}' for one in wrong]
        errors += ['"configs" must have data_files' for one in front["configs"] if not one["data_files"]]
        listed = [{"message": error} for error in errors]
        return web.json_response({"errors": listed, "warnings": []}, status=400 if errors else 200)

    async def info(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        return web.json_response({"id": request.path[14:], "sha": found.sha, "private": found.private})

    async def paths_info(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        asked = (await request.post()).getall("paths")
        listed = []
        for path in sorted({str(path) for path in asked} & {*found.files, *found.large}):
            if path in found.large:
                lfs = {"oid": found.large[path], "size": 1, "pointerSize": 130}
                listed.append({"type": "file", "path": path, "size": 1, "oid": "0" * 40, "lfs": lfs})
            else:
                oid = git_hash(found.files[path])
                listed.append({"type": "file", "path": path, "size": len(found.files[path]), "oid": oid})
        return web.json_response(listed)

    async def preupload(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        modes = []
        for file in (await request.json())["files"]:
            path = file["path"]
            is_large = path.endswith(".parquet")
            stored = found.large.get(path) if is_large else None
            if path in found.files:
                stored = git_hash(found.files[path])
            mode = "lfs" if is_large else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": stored})
        return web.json_response({"files": modes})

    async def lfs_batch(self, request: web.Request) -> web.Response:
        self._repository(request)
        objects = (await request.json())["objects"]
        for one in objects:
            if one["oid"] not in self.large:
                one["actions"] = {"upload": {"href": f"{self.url}/uploads/{one['oid']}"}}
        return web.json_response({"transfer": "basic", "objects": objects})

    async def upload(self, request: web.Request) -> web.Response:
        content = await request.read()
        assert hashlib.sha256(content).hexdigest() == request.match_info["oid"]
        self.large[request.match_info["oid"]] = content
        return web.Response()

    async def commit(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        header, *operations = [json.loads(line) for line in (await request.text()).splitlines()]
        assert header["key"] == "header"
        for one in operations:
            value = one["value"]
            match one["key"]:
                case "file":
                    found.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile" if self._has(value["oid"]):
                    found.large[value["path"]] = value["oid"]
                case _:
                    return _refused(400, f"cannot commit {one}")
        found.commits.append([one["value"]["path"] for one in operations])
        url = f"{self.url}{request.path.removeprefix('/api').removesuffix('/main')}/{found.sha}"
        return web.json_response({"success": True, "commitOid": found.sha, "commitUrl": url})

    def _has(self, oid: str) -> bool:
        """Uploaded as a large file, or named by a shard as the digest of what Xet was given."""
        return oid in self.large or any(_as_stored(oid) in shard for shard in self.shards)

    async def xet_token(self, request: web.Request) -> web.Response:
        self._repository(request)
        lives = int(time.time()) + 3600
        given = {"casUrl": f"{self.url}/xet", "accessToken": "xet", "exp": lives}
        headers = {
            "X-Xet-Cas-Url": given["casUrl"],
            "X-Xet-Access-Token": given["accessToken"],
            "X-Xet-Token-Expiration": str(lives),
        }
        return web.json_response(given, headers={name: str(value) for name, value in headers.items()})

    async def xet_chunk(self, request: web.Request) -> web.Response:
        return web.Response(status=404)

    async def xet_xorb(self, request: web.Request) -> web.Response:
        self.xorbs[request.match_info["hash"]] = await request.read()
        return web.json_response({"was_inserted": True})

    async def xet_shard(self, request: web.Request) -> web.Response:
        self.shards.append(await request.read())
        return web.json_response({"result": 1})


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def _as_stored(oid: str) -> bytes:
    """A digest as shards have it: four little-endian words."""
    plain = bytes.fromhex(oid)
    return b"".join(plain[place : place + 8][::-1] for place in range(0, 32, 8))


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status, headers={"X-Error-Message": message})


@asynccontextmanager
async def hugging_face_hub() -> AsyncIterator[Hub]:
    hub = Hub()
    runner = web.AppRunner(hub.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    hub.url = f"http://{host}:{port}"
    try:
        yield hub
    finally:
        await runner.cleanup()
