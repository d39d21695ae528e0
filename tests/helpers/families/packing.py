"""Where weights can be packed. Not where packing works: a machine on which it fails must not skip its tests."""

from __future__ import annotations

import platform

import pytest
import torch

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
IS_PACKED = IS_X86 or platform.machine().lower() in ("aarch64", "arm64")
PACKED_DTYPES = [torch.float32, torch.bfloat16] if IS_X86 else [torch.float32]
HAS_ONEDNN = IS_PACKED and torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="weights are packed on x86 and AArch64 with oneDNN alone")
