"""Layers with packed weights against the plain decoder's, for every number of rows that is treated differently."""

from __future__ import annotations

import pytest

from saccade.models.cuda.gemm_self_tests import can_multiply_int4, can_unpack_int4
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.layers.decoder import Biases
from tests.helpers.families.decoder_layers import assert_layer_agrees
from tests.helpers.families.int4_layers import WIDTH, packed_decoder


@pytest.mark.parametrize("rows", [1, 5, 40, 65])
@pytest.mark.parametrize(("is_ordered", "biases"), [(False, Biases()), (True, Biases(True, True, True))])
def test_a_packed_layer_computes_as_the_dequantised_one(
    rows: int, is_ordered: bool, biases: Biases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.models.cuda.gemms._MIN_SCRATCH_ROWS", 64)
    assert_layer_agrees(packed_decoder(is_ordered=is_ordered, biases=biases), rows, WIDTH)


@pytest.mark.parametrize("rows", [1, 40, 65])
def test_kernels_that_fail_their_self_tests_are_replaced_with_one_line_each(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    for choice in (can_multiply_int4, can_unpack_int4):
        monkeypatch.setattr(choice, "decided", {})
        monkeypatch.setattr(choice, "self_test", fail)
    monkeypatch.setattr("saccade.kernels.ops.unpack_int4._ROWS_AT_A_TIME", 100)
    assert_layer_agrees(packed_decoder(is_ordered=True, biases=Biases()), rows, WIDTH)
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "the INT4 GEMM of a few rows cannot be used: weights are unpacked for it",
        "the kernel that unpacks INT4 cannot be used: PyTorch dequantises weights",
    ]


def test_kernels_are_decided_before_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = packed_decoder(is_ordered=False, biases=Biases())
    for choice in (can_multiply_int4, can_unpack_int4):
        monkeypatch.setattr(choice, "decided", {})
    DecoderGemms(made).for_rows(1)
    case = (made.table.device, made.table.dtype)
    assert can_multiply_int4.decided == can_unpack_int4.decided == {case: True}


def test_scratch_memory_is_for_the_largest_packed_weight() -> None:
    made = packed_decoder(is_ordered=False, biases=Biases())
    scratch = DecoderGemms(made).workspace.unpacked
    assert scratch is not None and scratch.numel() == made.layers[0].mlp.gate_up.inputs * 512
