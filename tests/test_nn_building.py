"""KPoolIndexer before it runs: widths, refusals, and weights from a checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph.weights import SafetensorWeights, load_weights

import kpool_graph
from indexers import HOST, Indexer
from kpool_graph import OperandError, bfloat16
from kpool_graph.nn import KPoolIndexer
from models import Array, to_storage

SMALL = Indexer(
    "small",
    hidden_size=10,
    q_lora_rank=6,
    n_heads=2,
    head_dim=8,
    index_topk=12,
    kpool=4,
    ring_len=4,
    max_pools=9,
)
PREFIX = "model.layers.3.self_attn.indexer."
CODES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32}


def lines(error, name: str) -> list[str]:
    """The lines of an OperandError, without what opens each."""
    found = str(error.value).splitlines()
    assert all(line.startswith(f"{name}: ") for line in found)
    return [line.removeprefix(f"{name}: ") for line in found]


def refusal(
    indexer: Indexer = SMALL, next_n: int | None = None, **changed
) -> list[str]:
    """Builds a graph with some inputs of another type, and returns why it fails."""
    names = ["tail", "pooled_keys", "hidden", "q_resid", "slot_idx"]
    tables = ["input_row_offsets", "cache_lengths"]
    names[4:4] = tables if next_n is None else ["positions"]
    types = dict(zip(names, indexer.input_types(next_n), strict=True)) | changed
    module = indexer.module()
    step = module if next_n is None else module.decode
    with (
        Graph("refused", input_types=list(types.values())) as graph,
        pytest.raises(OperandError) as error,
    ):
        step(*graph.inputs)
    return lines(error, "KPoolIndexer")


@pytest.mark.parametrize("path", ["ragged", "three_ops", "decode"])
@pytest.mark.parametrize(("tail", "width"), [(True, 2051), (False, 2048)])
def test_a_selection_of_2048_tokens_is_this_wide(path, tail, width):
    indexer = replace(
        SMALL, index_topk=2048, always_select_tail=tail, max_pools=512, ring_len=4
    )
    module = indexer.module()
    module.load_state_dict(module.state_dict())
    next_n = 2 if path == "decode" else None
    with Graph("width", input_types=indexer.input_types(next_n)) as graph:
        if path == "decode":
            selected = module.decode(*graph.inputs)
            assert selected.shape[:2] == graph.inputs[4].shape
        else:
            selected = module(*graph.inputs, three_ops=path == "three_ops")
            assert selected.shape[0] == graph.inputs[2].shape[0]
        graph.output(selected)
    assert selected.shape[-1] == module.selection_width == width
    assert (selected.dtype, module.pools_selected) == (DType.int32, 512)


def test_a_budget_that_is_no_multiple_of_the_pool_is_refused():
    with pytest.raises(OperandError) as error:
        replace(SMALL, index_topk=2048, kpool=3).module()
    assert lines(error, "KPoolIndexer") == [
        "index_topk (2048) must be a multiple of kpool (3)"
    ]


def test_all_sizes_and_the_dtype_are_checked_together():
    with pytest.raises(OperandError) as error:
        KPoolIndexer(
            hidden_size=0,
            q_lora_rank=-1,
            n_heads=0,
            head_dim=0,
            index_topk=0,
            kpool=0,
            dtype=DType.float16,
        )
    assert lines(error, "KPoolIndexer") == [
        "hidden_size must be at least 1, got 0",
        "q_lora_rank must be at least 1, got -1",
        "n_heads must be at least 1, got 0",
        "head_dim must be at least 1, got 0",
        "index_topk must be at least 1, got 0",
        "kpool must be at least 1, got 0",
        "dtype must be float32 or bfloat16, got float16",
    ]


@pytest.mark.parametrize("next_n", [None, 2])
def test_buffers_that_are_not_the_modules_are_refused(next_n):
    assert refusal(
        next_n=next_n,
        tail=BufferType(DType.bfloat16, ("max_slots", 2, 3, 16), HOST),
        pooled_keys=BufferType(DType.bfloat16, ("max_slots", 2, 16), HOST),
    ) == [
        "tail.dtype must be float32, got bfloat16",
        "tail.shape[3] must be head_dim (8), got 16",
        "ring_len (3) must be at least kpool (4)",
        "pooled_keys.dtype must be float32, got bfloat16",
        "pooled_keys.shape[2] must be head_dim (8), got 16",
        "max_pools must be at least 3, got 2",
    ]
    assert refusal(
        next_n=next_n,
        tail=BufferType(DType.float32, (5, 2, 4, 8), HOST),
        pooled_keys=BufferType(DType.float32, (6, "max_pools", 8), HOST),
    ) == [
        "pooled_keys.shape[0] must be max_slots (5), got 6",
        "max_pools must be known while the graph is built, got max_pools",
    ]
    assert refusal(
        next_n=next_n, pooled_keys=TensorType(DType.float32, ("s", 9, 8), HOST)
    ) == [
        "pooled_keys must be a graph buffer (a BufferType input), because it is"
        " updated in place; got a TensorValue of float32 [s, 9, 8]"
    ]


def test_operands_of_a_ragged_step_that_do_not_fit_are_refused_together():
    assert refusal(
        hidden=TensorType(DType.bfloat16, ("total_tokens", 11), HOST),
        q_resid=TensorType(DType.float32, ("total_tokens", 1, 6), HOST),
        input_row_offsets=TensorType(DType.int64, ("batch_plus_1",), HOST),
        cache_lengths=TensorType(DType.int32, ("batch",), HOST),
        slot_idx=TensorType(DType.uint32, ("batch",), DeviceRef.GPU()),
    ) == [
        "hidden.dtype must be float32, got bfloat16",
        "hidden.shape[1] must be hidden_size (10), got 11",
        "q_resid.rank must be 2 ([total_tokens, q_lora_rank]), got 3",
        "input_row_offsets.dtype must be uint32, got int64",
        "cache_lengths.dtype must be uint32, got int32",
        "slot_idx.device must be the module's, cpu:0, got gpu:0",
    ]


def test_operands_of_a_uniform_step_that_do_not_fit_are_refused_together():
    assert refusal(
        next_n=2,
        hidden=TensorType(DType.float32, (3, 2, 10), HOST),
        q_resid=TensorType(DType.float32, (4, 2, 7), HOST),
        positions=TensorType(DType.int64, (3, 3), HOST),
    ) == [
        "q_resid.shape[0] must be batch (3), got 4",
        "q_resid.shape[2] must be q_lora_rank (6), got 7",
        "positions.dtype must be int32, got int64",
        "positions.shape[1] must be next_n (2), got 3",
    ]
    unknown = ("batch", "n")
    assert refusal(
        next_n=2,
        hidden=TensorType(DType.float32, (*unknown, 10), HOST),
        q_resid=TensorType(DType.float32, (*unknown, 6), HOST),
        positions=TensorType(DType.int32, unknown, HOST),
    ) == ["next_n must be known while the graph is built, got n"]


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, Array]], offset: int = 0
) -> Path:
    """Writes a checkpoint, its first tensor `offset` bytes into the data."""
    header: dict[str, object] = {}
    data = bytes(offset)
    if offset:
        header["before"] = {
            "dtype": "U8",
            "shape": [offset],
            "data_offsets": [0, offset],
        }
    for name, (code, value) in tensors.items():
        assert value.dtype == CODES[code]
        begin, data = len(data), data + value.tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(value.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def checkpoint(
    rng: np.random.Generator, code: str = "BF16"
) -> dict[str, tuple[str, Array]]:
    """Draws the tensors of a checkpoint: name, safetensors dtype, storage."""
    drawn = SMALL.random_weights(rng)
    return {
        PREFIX + name: (
            code,
            bfloat16.encode(value) if code == "BF16" else value.astype(CODES[code]),
        )
        for name, value in drawn.items()
    }


def values(tensors: Mapping[str, tuple[str, Array]]) -> dict[str, Array]:
    """Reads a checkpoint's tensors as float32, by the module's names."""
    return {
        name.removeprefix(PREFIX): (
            bfloat16.decode(value) if code == "BF16" else value.astype(np.float32)
        )
        for name, (code, value) in tensors.items()
    }


def test_the_weights_have_the_public_names_and_shapes():
    declared = SMALL.module().raw_state_dict()
    assert {name: tuple(weight.shape) for name, weight in declared.items()} == {
        "wq_b.weight": (16, 6),
        "wk.weight": (8, 10),
        "k_norm.weight": (8,),
        "k_norm.bias": (8,),
        "weights_proj.weight": (2, 10),
        "index_kpool_compress_gate": (8, 10),
        "index_kpool_compress_ape": (4, 8),
    }


@pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "unaligned"])
def test_a_checkpoint_is_cast_to_what_the_module_declares(
    tmp_path, code, dtype, offset
):
    tensors = checkpoint(np.random.default_rng(1), code)
    path = write_safetensors(tmp_path / "model.safetensors", tensors, offset)
    module = replace(SMALL, dtype=dtype).module()
    state = module.read_weights(load_weights([path]), PREFIX)
    module.load_state_dict(state)

    exact = {"k_norm.weight", "k_norm.bias", "index_kpool_compress_ape"}
    for name, value in values(tensors).items():
        wanted = DType.float32 if name in exact else dtype
        assert state[name].dtype == wanted
        want = bfloat16.encode(value) if wanted == DType.bfloat16 else value
        np.testing.assert_array_equal(to_storage(state[name]), want, name)


def test_weights_below_a_prefix_need_no_other(tmp_path):
    tensors = checkpoint(np.random.default_rng(2))
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    weights = SafetensorWeights([path]).model.layers[3].self_attn.indexer
    state = SMALL.module().read_weights(weights)
    assert state.keys() == values(tensors).keys()


def test_a_checkpoint_that_does_not_fit_is_refused_with_all_its_faults(tmp_path):
    tensors = checkpoint(np.random.default_rng(3))
    del tensors[PREFIX + "k_norm.bias"]
    tensors[PREFIX + "wk.weight"] = ("F32", np.zeros((10, 8), np.float32))
    tensors[PREFIX + "wq_b.weight"] = ("I32", np.zeros((16, 6), np.int32))
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(OperandError) as error:
        SMALL.module().read_weights(load_weights([path]), PREFIX)
    assert set(lines(error, "KPoolIndexer.read_weights")) == {
        f"the checkpoint must have {PREFIX}k_norm.bias, and does not",
        f"{PREFIX}wk.weight.shape must be [8, 10], got [10, 8]",
        f"{PREFIX}wq_b.weight.dtype must be float32 or float16 or bfloat16, got int32",
    }


def test_a_prefix_without_its_last_dot_is_answered_with_the_names_looked_for(tmp_path):
    tensors = checkpoint(np.random.default_rng(4))
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(OperandError) as error:
        SMALL.module().read_weights(load_weights([path]), PREFIX[:-1])
    found = lines(error, "KPoolIndexer.read_weights")
    assert len(found) == 7
    assert f"the checkpoint must have {PREFIX[:-1]}wk.weight, and does not" in found


def test_a_module_that_only_counts_weights_needs_no_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("KPOOL_GRAPH_KERNELS", str(tmp_path))
    assert SMALL.module().selection_width == 15
    with pytest.raises(kpool_graph.KernelBuildError):
        kpool_graph.kernels_path()
