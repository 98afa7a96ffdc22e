"""The version of this package, and those of MAX and Mojo that it is written for. Needs neither of them."""

VERSION = "0.1.0"
"""The one place: the build, `paged_kv.__version__` and all else read it from here."""

PINNED = {"max": "26.7.0", "mojo": "1.2.0"}
"""The versions that the Mojo sources are written for; pyproject.toml requires the same. When they move:
docs/notes/new-max.md."""
