"""``python -m conformance``.

Python looks into the working directory first, where a project may have a ``fuzz`` or ``reports`` of its own: ours are
those that lie beside this package.
"""

import sys
from pathlib import Path

from conformance.worker_boot import Finder

_ROOT = Path(__file__).resolve().parent.parent
sys.meta_path.insert(0, Finder({name: str(_ROOT / name) for name in ("fuzz", "references", "reports")}))

from conformance.cli import main  # noqa: E402 - what it imports is looked for as just said

if __name__ == "__main__":
    sys.exit(main())
