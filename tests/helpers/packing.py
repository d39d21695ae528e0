"""Where weights can be packed. Not where packing works: a machine on which it fails must not skip its tests."""

from __future__ import annotations

import platform

import pytest
import torch

HAS_ONEDNN = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="weights are packed on x86 with oneDNN alone")
