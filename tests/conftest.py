"""What all tests share: compiled CPU kernels are kept in a directory of the tests, not in the user's."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

os.environ.setdefault("LOWBIT_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"lowbit-tests-{getpass.getuser()}"))
