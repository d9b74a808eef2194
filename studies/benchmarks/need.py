"""Say which of these modules cannot be imported, before anything else is done: ``python3 need.py torch numpy``."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """One line and a non-zero exit where some are missing."""
    missing = []
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        sys.exit(f"cannot import {', '.join(missing)}")


if __name__ == "__main__":
    main()
