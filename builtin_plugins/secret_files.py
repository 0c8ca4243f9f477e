"""Files that hold a secret, such as the keys of "p2p" and the password of "redis".

They are refused where other users can read them, before the secret is used.
"""

from __future__ import annotations

import os
import stat

from hardpoint.plugins import ConfigError


def read_secret(file: str, path: str, limit: int) -> bytes:
    """Return the first bytes of a file that others cannot read.

    Args:
        file: may be a symbolic link, as mounted secrets are.
        path: path of the setting that names it, for messages.
        limit: number of bytes at most.

    Raises:
        ConfigError: it cannot be read, is no file, or others can read it.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may hang
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: {file!r}: expected a regular file")
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o037:
                raise ConfigError(
                    f"{path}: {file!r}: expected a file of yours or root's with mode 0600 or 0640, "
                    f"got mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}"
                )
            return os.read(descriptor, limit)
        finally:
            os.close(descriptor)
    except OSError as cause:
        raise ConfigError(f"{path}: {file!r}: {cause.strerror}") from None
