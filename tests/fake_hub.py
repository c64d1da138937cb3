"""The few answers of the Hugging Face hub that a download and a push need, served from memory on 127.0.0.1."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`repos`: repository -> its files, or an error as (status, X-Error-Code); `requests`: what was asked.

    A push makes or changes an entry of `repos`. `accounts`: token -> what whoami says; `private`: repositories that
    only their owners see; `full`: those that take no commit.
    """

    repos: dict[str, Mapping[str, bytes] | tuple[int, str]]
    accounts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    revisions: tuple[str, ...] = ("main", COMMIT, "refs/pr/1")
    requests: list[str] = field(default_factory=list)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    url: str = ""


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve until the block ends."""

    class Handler(_Handler):
        fake = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        byte_range = self.headers.get("range", "")
        self.fake.requests.append(f"{self.command} {path} {byte_range}".strip())
        if path == "/api/whoami-v2":
            account = self.fake.accounts.get(self.headers.get("authorization", "").removeprefix("Bearer "))
            return self.fail(401, "") if account is None else self.send_json(account)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path)
        match = api or file
        if match is None:
            return self.fail(404, "EntryNotFound")
        repo = self.fake.repos.get(match[1])
        if repo is None:
            return self.fail(401, "RepoNotFound")
        if isinstance(repo, tuple):
            return self.fail(*repo)
        if api:
            return self.answer_api(repo, match[1], api[2], api[3] or "main")
        revision = next((r for r in self.fake.revisions if match[2].startswith(r + "/")), None)
        if revision is None:
            return self.fail(404, "RevisionNotFound")
        name = match[2].removeprefix(revision + "/")
        if name not in repo:
            return self.fail(404, "EntryNotFound")
        return self.send_file(name, repo[name], byte_range)

    def answer_api(self, repo: Mapping[str, bytes], name: str, kind: str | None, revision: str) -> None:
        if revision not in self.fake.revisions:
            return self.fail(404, "RevisionNotFound")
        if kind == "tree":
            entries = [{"type": "file", "path": p, "size": len(d), "oid": _oid(d)} for p, d in repo.items()]
            return self.send_json(entries)
        siblings = [{"rfilename": path} for path in repo]
        return self.send_json(
            {"id": name, "sha": COMMIT, "siblings": siblings, "private": name in self.fake.private, "tags": []}
        )

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.fake.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            return self.send_json({})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if match is None or match[1] not in self.fake.repos:
            return self.fail(404, "RepoNotFound")
        if match[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self.send_json({"files": files})
        if match[1] in self.fake.full:
            return self.fail(403, "")
        return self.commit(match[1], [json.loads(line) for line in body.splitlines()])

    def create(self, asked: Mapping[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        said = {"url": f"{self.fake.url}/{name}", "id": name}
        if name in self.fake.repos:
            return self.send(409, json.dumps(said).encode(), {"content-type": "application/json"})
        self.fake.repos[name] = {}
        if asked["visibility"] == "private":
            self.fake.private.add(name)
        return self.send_json(said)

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.fake.repos[name]
        assert not isinstance(files, tuple)
        changed = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del changed[value["path"]]
        self.fake.repos[name] = changed
        self.send_json({"success": True, "commitUrl": f"{self.fake.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"content-type": "application/json"})

    def fail(self, status: int, code: str) -> None:
        self.send(status, b"", {"x-error-code": code, "x-error-message": f"fake {code}"})

    def send_file(self, name: str, data: bytes, byte_range: str) -> None:
        status, part = 200, data
        headers = {"etag": f'"{_oid(data)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", byte_range):
            first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
            status, part = 206, data[first : last + 1]
            headers["content-range"] = f"bytes {first}-{last}/{len(data)}"
        if self.command == "GET":
            self.fake.bytes_sent[name] = self.fake.bytes_sent.get(name, 0) + len(part)
        self.send(status, part, headers)

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
