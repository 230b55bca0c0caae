"""``python -m conformance``.

Python looks into the working directory first, where a project may have a ``fuzz`` or ``reports`` of its own: ours are
those that lie beside this package.
"""

import signal
import sys
from pathlib import Path

from conformance.worker_boot import Finder

_ROOT = Path(__file__).resolve().parent.parent
sys.meta_path.insert(0, Finder({name: str(_ROOT / name) for name in ("fuzz", "references", "reports")}))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run() -> int:
    """The command line's exit code, Ctrl-C and a cancelled job's SIGTERM included from the first import on."""
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        from conformance.cli import main

        return main()
    except KeyboardInterrupt:
        print("conformance: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(_run())
