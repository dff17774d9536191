"""A disk that is soon full."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(folder, size):
    """A disk of `size` at `folder`, which is made; skips the test where none can be mounted."""
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
                                 capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
