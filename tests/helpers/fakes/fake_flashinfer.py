"""Stands in for FlashInfer: the wrapper for paged prefill as it is for CUDA graphs, computed by the reference.

It keeps the library's rules: numbers live in buffers that were given at the start, their sizes never change, no step
has more rows than the first one that was planned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.models.layers.torch_attention import AttentionBatch, reference_attention


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD" and use_cuda_graph and backend == "fa3"
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.rows, self.pages, self.blocks, self.filled = (_checked(buffer) for buffer in buffers)
        assert len(self.rows) == len(self.pages) == len(self.filled) + 1
        self.max_rows: int | None = None
        self.plans = self.runs = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        seq_lens: Tensor | None = None,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(numbers.device.type == "cpu" and numbers.dtype == torch.int32 for numbers in given)
        assert paged_kv_indices.dtype == torch.int32 and paged_kv_indices.device == self.blocks.device
        rows, self.max_rows = int(qo_indptr[-1]), self.max_rows or int(qo_indptr[-1])
        if rows > self.max_rows or len(qo_indptr) != len(self.rows) or len(paged_kv_indices) > len(self.blocks):
            raise ValueError(f"{rows} rows, {len(qo_indptr)} windows, {len(paged_kv_indices)} pages do not fit")
        for buffer, numbers in zip((self.rows, self.pages, self.filled), given, strict=True):
            buffer.copy_(numbers)
        self.blocks.fill_(-1)
        self.blocks[: len(paged_kv_indices)] = paged_kv_indices
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page_size, self.causal, self.scale, self.dtype = page_size, causal, sm_scale, q_data_type
        assert seq_lens is not None and seq_lens.tolist() == self._contexts()
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        k, v = paged_kv_cache
        assert self.causal and self.scale is not None and q.dtype == self.dtype
        assert (q.shape[1], k.shape[2], q.shape[2]) == self.heads and k.shape[1] == v.shape[1] == self.page_size
        starts, pages, seq_lens = self.rows.tolist(), self.pages.tolist(), self._contexts()
        for i, context in enumerate(seq_lens):
            own = slice(starts[i], starts[i + 1])
            blocks = self.blocks[pages[i] : pages[i + 1]].long()
            assert (blocks >= 0).all() and len(blocks) == -(-context // self.page_size)
            if own.stop > own.start:
                batch = AttentionBatch([own.stop - own.start], [context], blocks[None], q.new_empty(0), self.page_size)
                out[own] = reference_attention(q[own], k.flatten(0, 1), v.flatten(0, 1), batch, self.scale)
        self.runs += 1
        return out

    def _contexts(self) -> list[int]:
        counts = (self.pages[1:] - self.pages[:-1] - 1).clamp(min=0)
        return (counts * self.page_size + self.filled).tolist()


def _checked(buffer: Tensor | None) -> Tensor:
    assert buffer is not None and buffer.dtype == torch.int32
    return buffer
