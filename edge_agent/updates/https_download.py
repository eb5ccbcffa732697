"""Fetches a file from a plain file server by HTTPS, in a thread; chunks that are there are not fetched again."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from edge_agent.updates.partial_file import PartialFile
from fleet_core.base.errors import FleetError, LinkError

TIMEOUT_S = 30.0
AGENT = "metafleet"


class HttpsDownload:
    """Starts at once. ``busy`` until the file is complete, or ``error`` says why it is not. context(): checks the
    server's certificate by the system's authorities."""

    def __init__(
        self, url: str, file: PartialFile, context: Callable[[], ssl.SSLContext] = ssl.create_default_context
    ):
        self._url, self._file, self._context = url, file, context
        self._stop = threading.Event()
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="program download", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Lets the download end at its next chunk, where it closes the file. Returns at once."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._fetch()
        except FleetError as error:
            self.error = str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{self._url}: {error}"
        finally:
            if self._stop.is_set():
                self._file.close()

    def _fetch(self) -> None:
        """Raises LinkError, MessageError for bytes that are not the file's, StateError."""
        url, blob = urlsplit(self._url), self._file.blob
        if url.scheme != "https" or not url.hostname:
            raise LinkError("is not an https address", where=self._url)
        connection = http.client.HTTPSConnection(
            url.hostname, url.port or 443, timeout=TIMEOUT_S, context=self._context()
        )
        begin = self._file.first_missing * blob.chunk
        try:
            headers = {"User-Agent": AGENT, "Accept-Encoding": "identity", "Range": f"bytes={begin}-{blob.size - 1}"}
            connection.request("GET", f"{url.path or '/'}{f'?{url.query}' if url.query else ''}", headers=headers)
            answer = connection.getresponse()
            if answer.status not in (200, 206):
                raise LinkError(f"the server answers {answer.status} {answer.reason}"[:200], where=self._url,
                                expected="200 or 206")
            first = begin // blob.chunk if answer.status == 206 else 0
            for k in range(first, blob.n):
                if self._stop.is_set():
                    raise LinkError("stopped", where=self._url)
                self._file.put(k, answer.read(blob.length(k)))
        finally:
            connection.close()
        if not self._file.complete:
            raise LinkError("the server has sent less than the whole file", where=self._url)
