"""The peculiarities of SFTP: one connection that can be lost, answers that come late, renames."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import paramiko
import pytest
from paramiko.sftp import CMD_OPEN

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.sftp import _Session as Session
from hvdrecover.errors import ConfigError, HostKeyError, StorageError
from tests.contracts.servers import HOST, OTHER_KEY, SftpServer, kill
from tests.contracts.storages import SECRET, Backend, buffer, every_call, sftp_options


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root as it lies on the server's disk."""
    return tmp_path / "root"


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# -- the connection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["names", "write"])
def test_a_lost_connection_is_made_anew_by_the_attempt_after(
    sftp: Backend, sftp_server: SftpServer, call: str
) -> None:
    storage = sftp.open()
    storage.publish("f", b"content")
    assert sftp_server.sessions()
    kill(sftp_server.sessions())
    attempts = 0
    while True:
        attempts += 1
        try:
            every_call(storage)[call]()
            break
        except StorageError:
            assert attempts == 1
    assert storage.names() == (["f"] if call == "names" else ["f", "g"])


def test_a_server_that_does_not_answer_is_waited_for_as_long_as_fsspec_is_told(
    sftp: Backend, sftp_server: SftpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**sftp_options(sftp_server), "timeout": 5.0}  # a busy machine takes seconds to connect
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    storage = sftp.open()
    storage.publish("f", b"content")
    sessions = sftp_server.sessions()
    for process in sessions:
        process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StorageError):
            storage.write("g", buffer(b"1"))
        storage.names()  # over a new connection, though the old one still looks alive
    finally:
        kill(sessions)


# -- durability ----------------------------------------------------------------------------------------


def test_files_and_folders_are_on_the_disk_before_they_have_their_names(
    sftp: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    request = Session._request

    def note(self: Session, kind: int, *args: Any) -> Any:
        if args[0] == "fsync@openssh.com":
            done.append("fsync")
        elif (
            kind in (paramiko.sftp.CMD_RENAME, paramiko.sftp.CMD_MKDIR)
            or args[0] == "posix-rename@openssh.com"
        ):
            done.append("name")
        elif kind == CMD_OPEN:
            done.append("open " + args[0].decode().replace(str(root), ""))
        return request(self, kind, *args)

    storage = sftp.open()
    storage.publish("there", b"")
    monkeypatch.setattr(Session, "_request", note)
    for call in (storage.publish, storage.create):
        done.clear()
        call("f", b"content")
        storage.remove("f")
        assert done[0].startswith("open /.hvdrecover-")
        assert done[1:] == ["fsync", "name", "open ", "fsync", "open ", "fsync"]
    done.clear()
    storage.write("new/f", buffer(b"content"))
    assert done == [
        "name", "open ", "fsync", "open /new/f", "fsync", "open /new", "fsync"
    ]  # fmt: skip


def test_what_a_killed_process_left_is_neither_listed_nor_in_the_way_and_tidied_up(
    sftp: Backend, root: Path
) -> None:
    storage = sftp.open()
    storage.publish("claims/g0001.json", b"claim")
    for folder in (root, root / "claims"):
        (folder / ".hvdrecover-1234").write_bytes(b"half a cl")
    assert (storage.names(), storage.names("claims")) == (["claims"], ["g0001.json"])
    assert [file.folder for file in storage.temporaries()] == ["", "claims"]
    assert {file.nbytes for file in storage.temporaries()} == {9}
    storage.tidy(lambda folder: folder == "claims")
    assert files_below(root) == [".hvdrecover-1234", "claims/g0001.json"]
    storage.tidy(lambda folder: True)
    assert files_below(root) == ["claims/g0001.json"]


def test_nothing_is_changed_by_way_of_a_link(sftp: Backend, root: Path, tmp_path: Path) -> None:
    storage = sftp.open()
    storage.publish("a/1", b"x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("text")
    (root / "a" / "link").symlink_to(tmp_path / "mine")
    (root / "b").symlink_to(tmp_path / "mine")
    storage.delete("a")
    for call in (
        lambda: storage.delete("b"),
        lambda: storage.remove("b/thesis"),
        lambda: storage.publish("b/thesis", b""),
        lambda: storage.create("b/new", b""),
        lambda: storage.write("b/thesis", buffer(b"x")),
    ):
        with pytest.raises(StorageError, match="link"):
            call()
    assert storage.names() == ["b"]
    assert files_below(tmp_path / "mine") == ["thesis"]
    assert (tmp_path / "mine" / "thesis").read_text() == "text"


# -- credentials ---------------------------------------------------------------------------------------


def test_a_refused_password_is_a_storage_error_without_it(
    sftp_server: SftpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    options = {**sftp_options(sftp_server), "password": SECRET, "key_filename": None}
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    attempts = [lambda: open_storage(f"sftp://{HOST}:{sftp_server.port}/run").names()]
    url = f"sftp://{sftp_server.user}:{SECRET.strip('/')}@{HOST}:{sftp_server.port}/run"
    attempts.append(lambda: open_storage(url).names())
    for attempt in attempts:
        with pytest.raises(StorageError, match="list") as caught:
            attempt()
        assert SECRET.strip("/") not in f"{caught.value} {caught.value.__cause__} {caplog.text}"
        assert caught.value.url == f"sftp://{HOST}:{sftp_server.port}/run"


# -- the server's key ----------------------------------------------------------------------------------


def with_known_hosts(
    server: SftpServer, folder: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> tuple[str, Path]:
    """The URL of a root, with a file of known hosts of this content."""
    known = folder / "known"
    known.write_text(content)
    options = {**sftp_options(server), "known_hosts": str(known)}
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    return f"sftp://{HOST}:{server.port}{folder}/root", known


def hashed(line: str) -> str:
    name, _, key = line.partition(" ")
    return f"{paramiko.HostKeys.hash_host(name)} {key}"


KNOWN: dict[str, tuple[Callable[[str, str], str], str | None]] = {
    "that of another server": (lambda right, wrong: f"elsewhere.example {OTHER_KEY}\n", "ssh-keyscan -p"),
    "another one": (lambda right, wrong: wrong, "ssh-keygen -R"),
    "another one, hashed": (lambda right, wrong: hashed(wrong), "ssh-keygen -R"),
    "another one, of two names": (lambda right, wrong: f"x.example,{wrong}", "ssh-keygen -R"),
    "revoked": (lambda right, wrong: f"{right}@revoked * {right.partition(' ')[2]}", "revoked"),
    "the right one, hashed": (lambda right, wrong: f"# a comment\n{hashed(right)}", None),
}


@pytest.mark.parametrize(("content", "refusal"), KNOWN.values(), ids=KNOWN.keys())
def test_only_a_server_whose_key_is_known_is_used(
    sftp_server: SftpServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: Callable[[str, str], str],
    refusal: str | None,
) -> None:
    right = sftp_server.known_hosts()
    wrong = f"{right.partition(' ')[0]} {OTHER_KEY}\n"
    url, known = with_known_hosts(sftp_server, tmp_path, monkeypatch, content(right, wrong))
    if refusal is not None:
        with pytest.raises(HostKeyError, match=refusal) as caught:
            open_storage(url).names()
        assert str(known) in str(caught.value) and HOST in caught.value.host
        assert not (tmp_path / "root").exists()
        known.write_text(right)
    storage = open_storage(url)
    storage.publish("f", b"content")
    assert storage.read("f") == b"content"


@pytest.mark.parametrize("through", [False, True])
def test_a_name_is_what_the_users_ssh_config_says(
    sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: bool
) -> None:
    """A user's ssh knows the server, so `sftp://NAME` does; through another one, too."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    server = f"  HostName {HOST}\n  Port {sftp_server.port}\n  User {sftp_server.user}\n"
    server += f"  IdentityFile {sftp_server.key}\n"
    jump = f"  ProxyCommand ssh -F {folder}/config -oUserKnownHostsFile={folder}/known_hosts -W %h:%p jump\n"
    name = "through-another" if through else "store"
    (folder / "config").write_text(f"Host {name}\n{server}{jump if through else ''}Host jump\n{server}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(fsspec.config.conf, "sftp", {})
    url = f"sftp://{name}{tmp_path}/root"
    if not through:  # paramiko takes 28 s of a core to see that ssh has not reached the jump host
        with pytest.raises(HostKeyError, match=re.escape(f"{folder}/known_hosts")):
            open_storage(url).names()
    (folder / "known_hosts").write_text(sftp_server.known_hosts())
    storage = open_storage(url)
    storage.publish("file", b"content")
    assert storage.names() == ["file"]


def test_the_check_can_not_be_got_round(
    sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, known = with_known_hosts(sftp_server, tmp_path, monkeypatch, "")
    for around in (f"simplecache::{url}", f"dir::{url}"):
        with pytest.raises(ConfigError, match="SFTP"):
            open_storage(around)
    known.unlink()
    with pytest.raises(ConfigError, match=f"^known_hosts: .*'{known}'"):
        open_storage(url)
    known.write_text("")
    with pytest.raises(HostKeyError):
        open_storage(url.replace("sftp://", "ssh://")).names()
    options = {**sftp_options(sftp_server), "host_key_policy": "auto_add"}
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    with pytest.raises(ConfigError, match=r"^host_key_policy: "):
        open_storage(url)
