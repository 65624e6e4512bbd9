"""What a page may do: run the one script and use the one style that it carries, show its own images, nothing else."""

from __future__ import annotations

import base64
import hashlib


def policy(script: str, style: str, images: bool = False) -> str:
    """A content security policy that names both by their digests, and allows `images` that the page itself holds."""
    only = f"script-src '{_digest(script)}'" if script else "script-src 'none'"
    only += f"; style-src '{_digest(style)}'" + ("; img-src data:" if images else "")
    return f"default-src 'none'; {only}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
