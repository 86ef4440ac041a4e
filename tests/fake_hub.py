"""A small hub on the loopback address: serves folders as repos and takes uploads, for tests of the real client.

Speaks the part of the hub's protocol that huggingface_hub uses for snapshot downloads, range requests, `create_repo`
and `upload_folder`; every file is a regular one (no LFS, no Xet). The client reads HF_ENDPOINT when it is imported, so
code under test runs in a process of its own with `FakeHub.env()`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>revision|tree|preupload|commit)/(?P<rev>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")


@dataclass
class Repo:
    """Commits of one repo, oldest first: sha -> {path: content}; the newest is `main`."""

    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        """The full sha of a branch or of an (abbreviated) commit."""
        shas = list(self.commits)
        if revision == "main":
            return shas[-1] if shas else None
        return next((sha for sha in shas if len(revision) >= 7 and sha.startswith(revision)), None)


class FakeHub:
    """The server, as a context manager.

    Attributes:
        url: its address. requests: (method, path) of every request, in order.
        uploads: repo -> {path: content} of what was committed. status: an HTTP status to answer everything with.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploads: dict[str, dict[str, bytes]] = {}
        self.status: int | None = None
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_repo(self, repo_id: str, folder: Path, revision_sha: str | None = None, gated: bool = False) -> str:
        """Serve a folder as the newest commit of a repo; returns the commit's sha."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        repo = self.repos.setdefault(repo_id, Repo())
        repo.gated = gated
        sha = revision_sha or _sha(repo_id.encode(), str(len(repo.commits)).encode(), *files.values())
        repo.commits[sha] = files
        return sha

    def env(self, home: Path, **variables: str) -> dict[str, str]:
        """The environment for a process that takes this for the hub: own cache, no token, no proxy."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()
        }
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **variables}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        path = self._begin()
        if self.hub.status:
            return self._error(self.hub.status, "", "out of order")
        if (match := FILE.fullmatch(path)) and (found := self._find(match["repo"], match["rev"], gate=True)):
            return self._file(*found, match["file"])
        if (match := API.fullmatch(path)) and (found := self._find(match["repo"], match["rev"] or "main")):
            return self._json(self._tree(*found) if match["verb"] == "tree" else self._info(match["repo"], *found))
        if not self._answered:
            self._error(404, "", f"no such page {path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = self._begin()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.status:
            return self._error(self.hub.status, "", "out of order")
        if path == "/api/validate-yaml":
            return self._json({"warnings": [], "errors": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        match = API.fullmatch(path)
        if match is None or match["repo"] not in self.hub.repos:
            return self._error(404, "RepoNotFound", "Repository not found")
        if self.hub.repos[match["repo"]].gated:
            return self._error(403, "", "not yours to write to")
        if match["verb"] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        return self._commit(match["repo"], [json.loads(line) for line in body.splitlines() if line])

    def _begin(self) -> str:
        self._answered = False
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        return path

    def _find(self, repo_id: str, revision: str, gate: bool = False) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files, or None after an error was sent."""
        repo = self.hub.repos.get(repo_id)
        sha = repo.commit(revision) if repo else None
        if repo is None:
            self._error(404, "RepoNotFound", "Repository not found")
        elif gate and repo.gated:
            self._error(403, "GatedRepo", f"Access to model {repo_id} is restricted")
        elif sha is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return sha, repo.commits[sha]
        return None

    def _info(self, repo_id: str, sha: str, files: dict[str, bytes]) -> dict[str, Any]:
        return {
            "id": repo_id,
            "sha": sha,
            "private": False,
            "gated": "manual" if self.hub.repos[repo_id].gated else False,
            "tags": [],
            "siblings": [{"rfilename": name} for name in files],
        }

    def _tree(self, sha: str, files: dict[str, bytes]) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, "size": len(data), "oid": _sha(data)} for name, data in files.items()]

    def _file(self, sha: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        data, headers, status = files[name], {"X-Repo-Commit": sha, "ETag": f'"{_sha(files[name])}"'}, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"], status = f"bytes {first}-{last}/{len(data)}", 206
            data = data[first : last + 1]
        self._send(status, data, {**headers, "Accept-Ranges": "bytes"})

    def _create(self, wanted: dict[str, Any]) -> None:
        repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repo_id in self.hub.repos:
            return self._error(
                409, "", "You already created this model repo", body={"url": f"{self.hub.url}/{repo_id}"}
            )
        self.hub.repos[repo_id] = Repo(commits={_sha(repo_id.encode()): {}})
        self._json({"url": f"{self.hub.url}/{repo_id}"})

    def _commit(self, repo_id: str, lines: list[dict[str, Any]]) -> None:
        values = [line["value"] for line in lines if line["key"] == "file"]
        files = {value["path"]: base64.b64decode(value["content"]) for value in values}
        self.hub.uploads.setdefault(repo_id, {}).update(files)
        repo = self.hub.repos[repo_id]
        main = repo.commit("main")
        sha = _sha(str(main).encode(), *files.values())
        repo.commits[sha] = {**(repo.commits[main] if main else {}), **files}
        self._json({"commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "pullRequestUrl": None})

    def _error(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None, body: Any = None
    ) -> None:
        data = json.dumps(body or {"error": message}).encode()
        self._send(status, data, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self._answered = True
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep stderr for the code under test."""


def _sha(*parts: bytes) -> str:
    return hashlib.sha1(b"\0".join(parts)).hexdigest()
