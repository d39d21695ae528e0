"""URLs that no server may fetch."""

from __future__ import annotations

FORBIDDEN_URLS = [
    "http://example.com/a.png",
    "http://127.0.0.1:{port}/a.png",
    "http://[::1]:{port}/a.png",
    "http://169.254.169.254/latest",
    "http://10.0.0.1/a.png",
    "http://2130706433:{port}/a.png",
    "http://0x7f.1:{port}/a.png",
    "http://[::ffff:127.0.0.1]:{port}/a.png",
    "http://user:pass@127.0.0.1:{port}/a.png",
    "http://example.com\\@127.0.0.1:{port}/a.png",
    "file:///etc/passwd",
    "ftp://127.0.0.1:{port}/a.png",
    "gopher://127.0.0.1:{port}/a.png",
    "/etc/passwd",
    "unix:/tmp/a.sock",
]
