"""Versions: what this process is made of, for the journal and the log.

Owns the list of packages worth recording. Must never import them: their metadata is enough, and torch is slow.
"""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("bandmaster", "numpy", "msgspec", "pyzmq", "trio", "torch", "triton", "transformers", "tokenizers")


def versions() -> dict[str, str]:
    """Version by package, with python and the platform; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
