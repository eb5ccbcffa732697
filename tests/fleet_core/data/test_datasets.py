"""The named data sets: the registry, downloads from a local server, local copies, the cache, the command."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cloud_server.choices.datasets import datasets_app
from fleet_core.base.errors import DataError, LinkError, StateError
from fleet_core.data.samples import Samples, save
from fleet_core.data.sets import download as downloading
from fleet_core.data.sets import fetch as fetching
from fleet_core.data.sets import registry, set_cache
from fleet_core.data.sets.download import ATTEMPTS, digest, download
from fleet_core.data.sets.fetch import OWN_FORM, READERS, fetch, take
from fleet_core.data.sets.registry import Entry, Form, Original, entries, entry
from fleet_core.data.sets.set_cache import load_set, note_of

CONTENT = bytes(range(256)) * 40
CUT = 3000


class Places:
    """A local download server. answers: what a path does, one entry per request, the last for all further ones. asked:
    (path, Range) of every request."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Callable[[BaseHTTPRequestHandler], None]]] = {}
        self.asked: list[tuple[str, str | None]] = []
        places = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                places.asked.append((self.path, self.headers.get("Range")))
                answers = places.answers.get(self.path, [status(404)])
                (answers.pop(0) if len(answers) > 1 else answers[0])(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def put(self, path: str, *answers: Callable[[BaseHTTPRequestHandler], None]) -> str:
        self.answers[path] = list(answers)
        return self.url + path


def whole(content: bytes = CONTENT) -> Callable[[BaseHTTPRequestHandler], None]:
    """Send the content from the requested offset."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        wanted = to.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        to.send_response(206 if wanted else 200)
        if wanted:
            to.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        to.send_header("Content-Length", str(len(content) - begin))
        to.end_headers()
        to.wfile.write(content[begin:])

    return answer


def cut(to: BaseHTTPRequestHandler) -> None:
    """Announce the rest of the content, and hang up after CUT bytes of it."""
    begin = int((to.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    to.send_response(206 if begin else 200)
    if begin:
        to.send_header("Content-Range", f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}")
    to.send_header("Content-Length", str(len(CONTENT) - begin))
    to.end_headers()
    to.wfile.write(CONTENT[begin : begin + CUT])
    to.close_connection = True


def plain(content: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Send the whole content, whatever range is requested, without its length."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        to.wfile.write(content)

    return answer


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            to.send_header(name, value)
        to.end_headers()

    return answer


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Places()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(set_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def original(*urls: str, content: bytes = CONTENT) -> Original:
    return Original("a file.bin", urls, len(content), hashlib.sha256(content).hexdigest())


class Waits(list[float]):
    """Replaces ``time.sleep`` and records its arguments."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def get(wanted: Original, folder: Path) -> tuple[bytes, str, Waits]:
    waits = Waits()
    path, url = download(wanted, folder, wait=waits)
    return path.read_bytes(), url, waits


# downloads -----------------------------------------------------------------------------------------------------------


def test_a_file_is_downloaded_and_its_progress_shown(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", whole())
    seen: list[tuple[str, int, int]] = []
    path, origin = download(original(url), tmp_path / "new", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert origin == url
    assert seen[-1] == ("a file.bin", len(CONTENT), len(CONTENT))
    assert places.asked == [("/a", None)]


def test_a_cut_connection_is_taken_up_where_it_ended(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", cut, cut, whole())
    content, _, waits = get(original(url), tmp_path)
    assert content == CONTENT
    assert places.asked == [("/a", None), ("/a", f"bytes={CUT}-"), ("/a", f"bytes={2 * CUT}-")]
    assert waits == [1.0, 2.0]


def test_a_later_call_continues_where_an_earlier_one_stopped(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", cut, status(403), whole())
    with pytest.raises(LinkError, match="403"):
        get(original(url), tmp_path)
    assert get(original(url), tmp_path)[0] == CONTENT
    assert [asked for _, asked in places.asked] == [None, f"bytes={CUT}-", f"bytes={CUT}-"]


def test_a_file_that_is_whole_already_is_not_downloaded_again(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", whole(), status(500))
    get(original(url), tmp_path)
    assert get(original(url), tmp_path)[0] == CONTENT
    assert len(places.asked) == 1


def test_a_server_that_cannot_resume_is_read_from_the_beginning(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", cut, plain(CONTENT))
    assert get(original(url), tmp_path)[0] == CONTENT
    assert len(places.asked) == 2


def test_a_mirror_continues_where_the_first_place_was_cut(places: Places, tmp_path: Path) -> None:
    first, second = places.put("/a", cut, status(404)), places.put("/b", whole())
    content, origin, _ = get(original(first, second), tmp_path)
    assert (content, origin) == (CONTENT, second)
    assert places.asked[-1] == ("/b", f"bytes={CUT}-")


def test_wrong_content_behind_a_wrong_beginning_is_fetched_anew_once(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", whole())
    path = tmp_path / f"{original(url).sha256[:16]}-a file.bin"
    path.write_bytes(b"x" * CUT)
    assert get(original(url), tmp_path)[0] == CONTENT
    assert [asked for _, asked in places.asked] == [f"bytes={CUT}-", None]


@pytest.mark.parametrize("left", [len(CONTENT), len(CONTENT) + 1])
def test_wrong_content_that_is_as_long_as_the_file_is_replaced(places: Places, tmp_path: Path, left: int) -> None:
    url = places.put("/a", whole())
    (tmp_path / f"{original(url).sha256[:16]}-a file.bin").write_bytes(b"x" * left)
    assert get(original(url), tmp_path)[0] == CONTENT


def test_a_file_with_another_digest_is_refused_and_deleted(places: Places, tmp_path: Path) -> None:
    other = CONTENT[:-1] + b"!"
    url = places.put("/a", whole(other))
    with pytest.raises(LinkError) as raised:
        get(original(url), tmp_path)
    assert hashlib.sha256(other).hexdigest() in str(raised.value)
    assert original(url).sha256 in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    assert len(places.asked) == 1


def test_a_server_that_always_cuts_is_given_up_and_what_came_is_kept(places: Places, tmp_path: Path) -> None:
    def nothing(to: BaseHTTPRequestHandler) -> None:
        to.close_connection = True

    url = places.put("/a", cut, nothing)
    waits = Waits()
    with pytest.raises(LinkError, match=f"{ATTEMPTS} attempts"):
        download(original(url), tmp_path, wait=waits)
    assert waits == [1.0, 2.0, 4.0]
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [CUT]


@pytest.mark.parametrize("length", [0, len(CONTENT) - 1, len(CONTENT) + 1, 10**15])
def test_another_announced_length_is_refused_before_anything_is_taken(
    places: Places, tmp_path: Path, length: int
) -> None:
    url = places.put("/a", status(200, **{"Content-Length": str(length)}))
    with pytest.raises(LinkError, match=f"announces {length} bytes"):
        get(original(url), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_endless_answer_is_cut_off_at_the_registered_size(places: Places, tmp_path: Path) -> None:
    sent = []

    def endless(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        try:
            for _ in range(10_000):
                to.wfile.write(CONTENT)
                sent.append(len(CONTENT))
        except OSError:
            pass

    url = places.put("/a", endless)
    with pytest.raises(LinkError, match="more than the expected"):
        get(original(url), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(sent) < 10_000


def test_a_place_without_the_file_is_passed_over_for_its_mirror(places: Places, tmp_path: Path) -> None:
    first, second = places.put("/a", status(404)), places.put("/b", whole())
    content, origin, waits = get(original(first, second), tmp_path)
    assert (content, origin, waits) == (CONTENT, second, [])


def test_a_redirection_is_followed(places: Places, tmp_path: Path) -> None:
    places.put("/b", whole())
    url = places.put("/a", status(302, Location="/b"))
    assert get(original(url), tmp_path)[0] == CONTENT


def test_redirections_in_a_circle_end(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", status(302, Location="/a"))
    with pytest.raises(LinkError, match="302"):
        get(original(url), tmp_path)
    assert len(places.asked) < 20


def test_a_busy_server_is_asked_again(places: Places, tmp_path: Path) -> None:
    url = places.put("/a", status(503), status(429), whole())
    content, _, waits = get(original(url), tmp_path)
    assert (content, waits) == (CONTENT, [1.0, 2.0])


def test_every_place_and_its_reason_is_named_when_none_has_the_file(places: Places, tmp_path: Path) -> None:
    urls = [places.put("/a", status(404)), places.put("/b", whole(b"short")), "http://127.0.0.1:9/c"]
    with pytest.raises(LinkError) as raised:
        get(original(*urls), tmp_path)
    lines = str(raised.value).splitlines()
    assert [url in line for url, line in zip(urls, lines[1:4], strict=True)] == [True, True, True]
    assert "--from" in lines[4]


def test_the_proxy_of_the_environment_is_used(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", places.url)
    monkeypatch.delenv("no_proxy", raising=False)
    url = "http://data.invalid/a"
    places.answers[url] = [whole()]
    assert get(original(url), tmp_path)[0] == CONTENT


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be written"):
        get(original("http://127.0.0.1:9/a"), tmp_path / "file")


def test_a_full_disk_is_not_taken_for_a_broken_connection(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(downloading, "_opened", lambda path, have: Full())
    url = places.put("/a", whole())
    with pytest.raises(StateError, match="No space left"):
        get(original(url), tmp_path)
    assert len(places.asked) == 1


# a small set with two originals --------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


RNG = np.random.default_rng(0)
ARRAYS = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (6, 28, 28)), "train-labels-idx1-ubyte": np.arange(6),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (4, 28, 28)), "t10k-labels-idx1-ubyte": np.arange(4),
}
PLAIN = {name: idx(array) for name, array in ARRAYS.items()}
PACKED = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in PLAIN.items()}


def small(url: str = "http://127.0.0.1:9") -> Entry:
    """Fashion-MNIST with ten images."""
    files = tuple(
        Original(name, (f"{url}/{name}",), len(data), hashlib.sha256(data).hexdigest(),
                 (Form(name.removesuffix(".gz"), len(plain), hashlib.sha256(plain).hexdigest()),))
        for (name, data), plain in zip(PACKED.items(), PLAIN.values(), strict=True)
    )
    return replace(entry("fashion-mnist"), name="small", train=6, test=4, clients=0, files=files)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, places: Places) -> Entry:
    """The small set, registered and on the server."""
    for name, data in PACKED.items():
        places.put(f"/{name}", whole(data))
    made = small(places.url)
    monkeypatch.setattr(registry, "entries", lambda: {"small": made})
    return made


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_fetched_set_is_loaded_by_its_name(known: Entry, cache: Path) -> None:
    with pytest.raises(DataError, match="metafleet datasets fetch small"):
        load_set("small")
    fetch(known)
    loaded = load_set("small")
    assert loaded.test is not None
    np.testing.assert_array_equal(loaded.train.x[:, 0], ARRAYS["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(loaded.test.x[:, 0], ARRAYS["t10k-images-idx3-ubyte"])
    assert loaded.train.x.dtype == np.uint8
    assert sorted(path.name for path in (cache / "small").iterdir()) == [".lock", "note.json", "test.npz", "train.npz"]


def test_the_note_says_where_every_file_came_from(known: Entry, places: Places) -> None:
    fetch(known)
    note = note_of(known)
    assert note is not None
    assert note.checked
    assert (note.train, note.test, note.clients) == (6, 4, 0)
    assert [(source.file, source.origin, source.sha256) for source in note.sources] == [
        (file.name, f"{places.url}/{file.name}", file.sha256) for file in known.files
    ]


def test_originals_that_hold_other_numbers_than_registered_are_refused(known: Entry, cache: Path) -> None:
    with pytest.raises(DataError, match="6 in 'train'; expected 7"):
        fetch(replace(known, train=7))
    assert note_of(known) is None


def test_a_conversion_that_failed_leaves_the_downloads_for_the_next_fetch(known: Entry, places: Places) -> None:
    with pytest.raises(DataError):
        fetch(replace(known, train=7))
    before = len(places.asked)
    fetch(known)
    assert len(places.asked) == before
    assert len(load_set("small").train) == 6


def test_a_fetch_that_fails_leaves_no_set(known: Entry, places: Places) -> None:
    places.put("/t10k-labels-idx1-ubyte.gz", status(404))
    with pytest.raises(LinkError, match="t10k-labels"):
        fetch(known)
    assert note_of(known) is None


def test_a_set_that_could_not_be_written_whole_is_not_here(
    known: Entry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch(known)

    def full(path: Path, samples: Samples) -> None:
        if path.name == "test.npz":
            raise StateError("cannot be written")
        save(path, samples)

    monkeypatch.setattr(set_cache, "save", full)
    with pytest.raises(StateError):
        take(known, written(tmp_path / "copy", PACKED))
    with pytest.raises(DataError, match="has not been fetched"):
        load_set("small")


def test_two_fetches_of_a_set_at_once_are_refused(known: Entry, cache: Path) -> None:
    (cache / "small").mkdir(parents=True)
    with (cache / "small" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process"):
            fetch(known)


def test_a_set_without_public_places_says_how_it_comes(cache: Path) -> None:
    with pytest.raises(DataError, match="fetch heartbeat-22 --from PATH"):
        fetch(entry("heartbeat-22"))
    with pytest.raises(DataError, match="fetch heartbeat-22 --from PATH"):
        load_set("heartbeat-22")


def test_a_set_that_an_older_reader_converted_is_not_here(known: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(known)
    monkeypatch.setattr(registry, "entries", lambda: {"small": replace(known, version=2)})
    with pytest.raises(DataError, match="has not been fetched"):
        load_set("small")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "small"}', "[" * 100_000])
def test_a_note_that_cannot_be_read_means_the_set_is_not_here(known: Entry, cache: Path, text: str) -> None:
    fetch(known)
    (cache / "small" / "note.json").write_text(text)
    with pytest.raises(DataError, match="has not been fetched"):
        load_set("small")


# local copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [PACKED, PLAIN, {name: gzip.compress(data, 1) for name, data in zip(
    PACKED, PLAIN.values(), strict=True)}], ids=["as published", "unpacked", "packed again"])
def test_a_local_copy_of_the_originals_is_taken_in_every_form(
    known: Entry, tmp_path: Path, files: dict[str, bytes]
) -> None:
    note = take(known, written(tmp_path / "copy", files), remark="from a friend")
    assert note.checked
    assert note.remark == "from a friend"
    np.testing.assert_array_equal(load_set("small").train.x[:, 0], ARRAYS["train-images-idx3-ubyte"])


def test_every_local_original_that_is_wrong_or_missing_is_named(known: Entry, tmp_path: Path) -> None:
    files = {**PACKED, "train-labels-idx1-ubyte.gz": gzip.compress(b"other")}
    del files["t10k-labels-idx1-ubyte.gz"]
    with pytest.raises(DataError) as raised:
        take(known, written(tmp_path / "copy", files))
    assert f"has sha256 {hashlib.sha256(files['train-labels-idx1-ubyte.gz']).hexdigest()}" in str(raised.value)
    assert "t10k-labels-idx1-ubyte.gz is missing" in str(raised.value)
    assert note_of(known) is None


IMAGES = Samples(np.zeros((3, 1, 28, 28), np.uint8), np.array([0, 1, 2]), np.array(["a", "b", "a"]),
                 classes=tuple("0123456789"))


def test_a_single_original_is_known_by_its_digest_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "one", lambda files: (IMAGES, None))
    one = replace(small(), files=(original("http://127.0.0.1:9/a"),), reader="one", train=3, test=0, clients=2)
    renamed = tmp_path / "renamed"
    renamed.write_bytes(CONTENT)
    assert take(one, renamed).checked
    renamed.write_bytes(b"other")
    with pytest.raises(DataError, match=digest(renamed)):
        take(one, renamed)


def test_metafleets_own_form_is_taken_and_marked_as_unchecked(known: Entry, tmp_path: Path) -> None:
    save(tmp_path / "mine.npz", IMAGES)
    note = take(known, tmp_path / "mine.npz")
    assert not note.checked
    assert note.remark == OWN_FORM
    assert note.sources[0].sha256 == digest(tmp_path / "mine.npz")
    loaded = load_set("small")
    assert (len(loaded.train), loaded.test, loaded.train.clients) == (3, None, ("a", "b"))


def test_a_folder_in_metafleets_form_brings_both_parts_and_replaces_what_was_there(
    known: Entry, tmp_path: Path
) -> None:
    fetch(known)
    folder = tmp_path / "copy"
    save(folder / "train.npz", IMAGES)
    save(folder / "test.npz", IMAGES.take([0]))
    take(known, folder)
    loaded = load_set("small")
    assert loaded.test is not None
    assert (len(loaded.train), len(loaded.test)) == (3, 1)
    take(known, folder / "train.npz")
    assert load_set("small").test is None


@pytest.mark.parametrize(
    ("samples", "wrong"),
    [
        (replace(IMAGES, x=IMAGES.x[:, :, :27]), "uint8 (1, 27, 28); expected uint8 (1, 28, 28)"),
        (replace(IMAGES, x=IMAGES.x.astype(np.float32)), "float32 (1, 28, 28); expected uint8 (1, 28, 28)"),
        (replace(IMAGES, classes=("a", "b", "c")), "names 3 classes; expected 10"),
        (replace(IMAGES, classes=None), "names no classes; expected 10"),
    ],
)
def test_a_copy_in_metafleets_form_that_does_not_fit_is_refused(
    known: Entry, tmp_path: Path, samples: Samples, wrong: str
) -> None:
    save(tmp_path / "mine.npz", samples)
    with pytest.raises(DataError) as raised:
        take(known, tmp_path / "mine.npz")
    assert wrong in str(raised.value)
    assert note_of(known) is None


def test_a_local_copy_that_cannot_be_read_is_reported(
    known: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(fetching, "digest", refused)
    with pytest.raises(DataError, match="Permission denied"):
        take(known, written(tmp_path / "copy", PACKED))


def test_a_copy_of_what_does_not_exist_or_ships_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        take(small(), tmp_path / "nothing")
    with pytest.raises(DataError, match="ships with the package"):
        take(entry("heartbeat"), tmp_path)
    with pytest.raises(DataError, match="a folder with train"):
        take(entry("heartbeat-22"), tmp_path)


# the registry and the cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries())
def test_every_registered_set_is_complete(name: str) -> None:
    one = entry(name)
    assert one.reader in (*READERS, "package", "none")
    assert bool(one.files) == (one.reader in READERS)
    assert one.redistribute or one.terms
    assert (one.client is None) == (one.clients is None)
    assert one.input_spec.shape == one.shape
    assert len(one.mean) == len(one.std)
    assert len(one.mean) in (0, one.shape[0])
    assert bool(one.mean) == bool(one.figures)
    assert len({file.name for file in one.files}) == len(one.files)
    assert all(file.urls for file in one.files)
    assert not any("python" in url.rpartition("/")[2] for file in one.files for url in file.urls)  # the pickled CIFAR


def test_the_heartbeat_set_is_always_here() -> None:
    loaded = load_set("heartbeat")
    one = loaded.entry
    assert (len(loaded.train), loaded.train.x.shape[1:], len(loaded.train.clients)) == (
        one.train, one.shape, one.clients)
    assert loaded.test is None


def test_an_unknown_set_is_refused_with_a_suggestion() -> None:
    with pytest.raises(DataError, match="did you mean 'cifar-10'"):
        load_set("cifar10")


def test_the_cache_is_where_the_environment_or_the_platform_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set_cache.home() == tmp_path / "cache"
    monkeypatch.delenv(set_cache.FOLDER_VARIABLE)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert set_cache.home() == Path("/x/metafleet/datasets")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert set_cache.home() == Path.home() / ".cache/metafleet/datasets"
    monkeypatch.setattr("sys.platform", "darwin")
    assert set_cache.home() == Path.home() / "Library/Caches/metafleet/datasets"


# the command ---------------------------------------------------------------------------------------------------------


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(datasets_app, arguments)


def test_the_listing_names_every_set_and_what_may_not_be_passed_on() -> None:
    asked = ask()
    lines = asked.stdout.splitlines()
    assert lines[0].split() == ["name", "what", "samples", "clients", "sample", "here", "size", "licence"]
    assert [line.split()[0] for line in lines[1:]] == list(entries())
    kept = [name for name, one in entries().items() if not one.redistribute]
    assert f"not to be passed on without leave: {', '.join(kept)}" in asked.stderr


@pytest.fixture
def listed(known: Entry, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The small set's row in the listing."""
    monkeypatch.setattr(registry, "entries", lambda: {"small": known})
    return lambda: json.loads(ask("--json").stdout)[0]


def test_the_listing_as_json_tells_what_is_here(known: Entry, listed: Callable[[], Any]) -> None:
    before = listed()
    assert (before["here"], before["disk_bytes"], before["samples"]) == (False, None, 10)
    assert before["download_bytes"] == sum(map(len, PACKED.values()))
    assert before["input"]["shape"] == before["shape"] == [1, 28, 28]
    fetch(known)
    after = listed()
    assert (after["here"], after["checked"], after["samples"]) == (True, True, 10)
    assert after["disk_bytes"] > 0


def test_the_listing_has_the_numbers_of_the_copy_that_is_here(
    known: Entry, listed: Callable[[], Any], tmp_path: Path
) -> None:
    save(tmp_path / "mine.npz", IMAGES)
    take(known, tmp_path / "mine.npz")
    one = listed()
    assert (one["samples"], one["clients"], one["checked"], one["remark"]) == (3, 2, False, OWN_FORM)
    assert " copy " in ask().stdout.splitlines()[1]


def test_fetching_says_what_came_and_under_which_licence(known: Entry, cache: Path) -> None:
    asked = ask("fetch", "small")
    assert asked.exit_code == 0, asked.exception
    assert asked.stdout.split("\n")[0] == f"small: 6 samples and 4 for testing, in {cache / 'small'}"
    assert "fetching train-images-idx3-ubyte.gz" in asked.stderr
    assert "licence: MIT" in asked.stderr
    assert "is here already" in ask("fetch", "small").stdout


def test_a_terminal_shows_a_bar_for_each_file(known: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    asked = ask("fetch", "small")
    assert asked.exit_code == 0, asked.exception
    assert [name in asked.stderr for name in PACKED] == [True] * 4
    assert "fetching" not in asked.stderr


def test_a_local_copy_is_taken_from_the_command_line(known: Entry, tmp_path: Path, places: Places) -> None:
    asked = ask("fetch", "small", "--from", str(written(tmp_path / "copy", PACKED)))
    assert asked.exit_code == 0, asked.exception
    assert places.asked == []
    assert len(load_set("small").train) == 6


def test_an_unknown_name_on_the_command_line_ends_in_an_error_with_a_suggestion() -> None:
    asked = ask("fetch", "mnits")
    assert isinstance(asked.exception, DataError)
    assert "did you mean 'mnist'" in str(asked.exception)
