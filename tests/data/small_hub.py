"""A hub on this machine with one data set, as far as `datasets` asks for it: for tests of names on the hub."""

import http.server
import json
import threading
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 39 + "1"


class SmallHub(http.server.ThreadingHTTPServer):
    """Serves `files` (name -> content) as the data set ns/name."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        """paths-info: which of some paths are there."""
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        asked = (
            json.loads(body)["paths"]
            if body.startswith("{")
            else [unquote(pair.partition("=")[2]) for pair in body.split("&") if pair.startswith("paths=")]
        )
        self._send(json.dumps([self._entry(path) for path in asked if path in self.server.files]).encode())

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/datasets/ns/name/resolve/"):
            content = self.server.files.get(path.split("/", 6)[6])
            self._send(content) if content is not None else self._missing()
        elif path in (
            "/api/datasets/ns/name",
            f"/api/datasets/ns/name/revision/{COMMIT}",
            "/api/datasets/ns/name/revision/main",
        ):
            self._send(
                json.dumps(
                    {
                        "id": "ns/name",
                        "sha": COMMIT,
                        "private": False,
                        "tags": [],
                        "siblings": [{"rfilename": name} for name in self.server.files],
                    }
                ).encode()
            )
        elif path.startswith("/api/datasets/ns/name/tree/"):
            self._send(json.dumps([self._entry(name) for name in self.server.files]).encode())
        else:
            self._missing()

    def _entry(self, name: str) -> dict:
        return {
            "type": "file",
            "path": name,
            "size": len(self.server.files[name]),
            "oid": f"{hash(name) & 0xFFFFFFFF:040x}",
        }

    def _missing(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in (
            ("X-Repo-Commit", COMMIT),
            ("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"'),
            ("Content-Length", len(content)),
            ("Content-Type", "application/json"),
        ):
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass
