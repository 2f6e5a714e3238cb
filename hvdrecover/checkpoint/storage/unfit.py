"""Mounts that can't give what a checkpoint root needs: one winner, whole files, nothing remembered."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrecover.checkpoint.storage.mounted import Mount
from hvdrecover.errors import ConfigError

_S3, _GCS, _AZURE = "s3://BUCKET/PATH", "gs://BUCKET/PATH", "az://CONTAINER/PATH"
_SSHFS = "sshfs"
# Programs that show an object store as a folder, and the URL of such a store.
_STORES: Mapping[str, str] = {
    "s3fs": _S3,
    "ossfs": _S3,
    "cosfs": _S3,
    "goofys": _S3,
    "mountpoint-s3": _S3,
    "gcsfuse": _GCS,
    "blobfuse": _AZURE,
    "blobfuse2": _AZURE,
    "rclone": f"{_S3}, {_GCS}, {_AZURE} or sftp://HOST/PATH",
}


def refuse(mount: Mount, url: str) -> None:
    """Refuse a mount that no checkpoint root can be in.

    Args:
        mount: what the root lies in.
        url: the root's.

    Raises:
        ConfigError: it is of a program that is known for that; the error says what to name instead.
    """
    program = _program(mount)
    if program == _SSHFS:
        raise ConfigError(
            url,
            "sshfs shows what it remembers, so that a job does not see for 20 s that another one has "
            "taken the root. Name the server instead, as sftp://HOST/PATH, which needs no mount.",
        )
    if (instead := _STORES.get(program)) is not None:
        raise ConfigError(
            url,
            f"{program} shows a store as a folder, with no hard links, no renames that are one step for all "
            "hosts, and what it remembers of others' files, so two jobs could write to this root. Name the "
            f"store instead, as {instead}, which needs no mount.",
        )


def _program(mount: Mount) -> str:
    """Return the program of a FUSE mount: the type names most, and some are named as what is mounted."""
    if mount.kind == "fuse":
        return mount.source.partition("#")[0]  # s3fs#bucket, as in older lines of fstab
    kind, _, program = mount.kind.partition(".")
    return program if kind == "fuse" else ""
