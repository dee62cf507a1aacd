"""A file server for tests, with byte ranges, that can be killed and started again on its port."""

import re
import threading
from base64 import b64encode
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class FileServer:
    """Serves a folder on this machine while it is entered.

    Attributes set between requests: `ranges` (whether parts of files are sent), `versions` (whether ETags are), `broken`
    (statuses for the next requests, in order). `requests` has the path and the range of each GET. Requests without `login`,
    "user:password", are refused.
    """

    def __init__(self, folder: Path, login: str = "") -> None:
        self.folder, self.ranges, self.port = folder, True, 0
        self.login = f"Basic {b64encode(login.encode()).decode()}" if login else None
        self.versions = True
        self.broken: list[int] = []
        self.requests: list[tuple[str, str | None]] = []

    def __enter__(self) -> "FileServer":
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), partial(_Handler, self))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, served: FileServer, *args: object) -> None:
        self.served = served
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_GET(self) -> None:
        self.served.requests.append((self.path, self.headers["Range"]))
        self._answer(self.headers["Range"])

    def _answer(self, asked: str | None) -> None:
        path = self.served.folder / unquote(self.path.partition("?")[0]).lstrip("/")
        if self.served.login is not None and self.headers["Authorization"] != self.served.login:
            return self.send_error(401)
        if self.served.broken:
            return self.send_error(self.served.broken.pop(0))
        if path.is_dir():
            data, asked = "".join(f'<a href="{found.name}">{found.name}</a>\n' for found in path.iterdir()).encode(), None
        elif path.exists():
            data = path.read_bytes()
        else:
            return self.send_error(404)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") if self.served.ranges else None
        part = data[int(found[1]) : int(found[2]) + 1] if found else data
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(part)))
        if self.served.versions:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)
        return None
