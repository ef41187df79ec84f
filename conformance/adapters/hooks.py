"""The functions of docs/hooks.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"


def load() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "hooks"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names
