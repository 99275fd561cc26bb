"""``python -m tracer``: the ``tracer`` command."""

from __future__ import annotations

from tracer.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
