"""What a browser makes of a page, as PNG."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from refitd.errors import ConfigError

LAPTOP = (1440, 900)
_SCHEMES = {"dark": 0, "light": 1}  # Chromium's numbers
_SECONDS = 60.0


def snapshot(url: str, file: Path, scheme: str, size: tuple[int, int] = LAPTOP) -> None:
    """Draw the page at ``url`` in the ``scheme`` light or dark. Raises ConfigError where Chromium is not there."""
    program = shutil.which("chromium")
    if program is None:
        raise ConfigError("chromium", "a program on PATH (apt-get install chromium fonts-inter)", "none")
    with tempfile.TemporaryDirectory(prefix="refitd-chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}", f"--screenshot={file}", url,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
